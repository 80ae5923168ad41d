"""Turns an example into token ids: chat template, BOS, middle cut, and where the context ends.

The text is put together first and tokenised once, so that both protocols and every method see the
same ids. Only an example that says so (`Example.apart`) has its context and the rest tokenised apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import cache, cached_property, partial
from itertools import cycle
from threading import Lock
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from evals.base import Example, TaskEnv
from evals.haystack import load

Chat = Literal["template", "none"]
Keywords = Mapping[str, Any]  # for the chat template: the setting template_kwargs
NO_KEYWORDS: Keywords = MappingProxyType({})
# the date that templates write; with today's, prompts would change overnight
TEMPLATE_DAY = datetime(2024, 7, 26)
TEMPLATE_DATE = TEMPLATE_DAY.strftime("%d %b %Y")  # in the form of Llama 3's templates
_CLOCK = Lock()  # the clock is replaced for one template at a time
PROBE, ANSWER_PROBE = "USER-TEXT", "ASSISTANT-TEXT"
MOST = 4096  # tokens of ordinary text that a method may ask for to calibrate itself


class PromptError(ValueError):
    """Report that an example cannot become a prompt of this model; the message says why, and what
    to do instead."""


class ExampleError(ValueError):
    """Report that a task's example is incomplete or contradicts itself. This is a mistake of the
    task, so it ends the run, where a prompt that the chat template refuses fails alone."""


class Tokenizer(Protocol):
    """Describe the attributes and calls of a transformers tokenizer that are used here."""

    chat_template: Any
    bos_token_id: Any
    eos_token: Any
    eos_token_id: Any

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __call__(self, text: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class ContextTooShort(PromptError):
    """Report that a prompt cannot be made so short by cutting its context."""


class Cut(NamedTuple):
    """Say how many tokens leave a context that is too long for the window, and from where: its
    middle, or its left side, which is the beginning. `question`: the question is cut together with
    the context."""

    side: Literal["middle", "left"]
    tokens: int
    question: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    # leading tokens that belong to the context; a token that straddles the end belongs to the question
    split: int
    cut_tokens: int  # removed from the user's text
    # special tokens that the tokenizer puts before plain text, such as BOS, and this text lacks
    bos_added: int
    template: bool
    text: str  # the tokenised text, without an added BOS
    # it begins with a reply that replaces the model's answer before it
    replaces_answer: bool = False
    cut: Cut | None = None  # what of `cut_tokens` was removed to fit the window, and where


class Shell(NamedTuple):
    """Hold the text that the chat template puts around the user's text: `head` contains the system
    text and what was said earlier, `tail` opens the assistant's turn."""

    head: str
    tail: str


class Tools:
    """Implement `evals.base.TextTools`, what a task may know of a tokenizer, for one tokenizer and
    chat setting."""

    def __init__(self, tokenizer: Tokenizer, chat: Chat) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        # which refuses what would be counted wrongly
        self._shell = cache(partial(shell, tokenizer))

    @cached_property
    def fingerprint(self) -> str:
        """Return the hash of the tokenizer, the chat setting and what the template is told; computed
        on demand, because serialising a tokenizer is slow."""
        tokenizer: Any = self.tokenizer
        parts = [
            tokenizer.backend_tokenizer.to_str(),
            str(tokenizer.chat_template),
            TEMPLATE_DATE,
            self.chat,
            *getattr(tokenizer, "told", ()),  # harness/prompts/thinking.py
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return tokenize(self.tokenizer, text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, ids)

    def count(
        self,
        user: str,
        prefix: str = "",
        *,
        system: str = "",
        chat: bool = True,
        earlier: Sequence[str] = (),
    ) -> int:
        """Return the number of tokens of the whole prompt, without a BOS that the tokenizer
        adds."""
        template = chat and self.chat == "template"
        self._shell(system=system, template=template, earlier=tuple(earlier))
        text = wrap(self.tokenizer, user, system, template=template, earlier=earlier)
        return len(self.encode(text + prefix))


def render(
    example: Example,
    tokenizer: Tokenizer,
    *,
    chat: Chat,
    cut: Cut | None = None,
) -> Prompt:
    """Return the prompt of `example`. With `chat=none` nothing is wrapped in the chat template;
    with `chat=template` every example is wrapped unless it asks not to be (`Example.chat`).
    `cut`: what leaves the context, after the task's own cut."""
    template = chat == "template" and example.chat
    context, question, cut_tokens = cut_middle(example, tokenizer)
    if cut is not None:
        if cut.question:
            context, question = context + question, ""
        context, cut_tokens = shortened(context, tokenizer, cut), cut_tokens + cut.tokens
    around = shell(tokenizer, example.system, template=template, earlier=example.earlier)
    in_turn = partial(
        wrap,
        tokenizer,
        system=example.system,
        template=template,
        earlier=example.earlier,
    )
    if example.apart:
        head, _, tail = in_turn(context + PROBE).rpartition(PROBE)
        text = head + question + tail + example.prefix
        first, rest = (tokenize(tokenizer, part).ids for part in (head, text[len(head) :]))
        ids, split = [*first, *rest], len(first)
    else:
        wrapped = in_turn(context + question)
        end = _end_of_context(wrapped, context, question, around)
        text = wrapped + example.prefix
        ids, ends = tokenize(tokenizer, text)
        split = next((i for i, token_end in enumerate(ends) if token_end > end), len(ids))
    start = start_tokens(tokenizer)
    written = tokenize(tokenizer, "".join(around)).ids if template else ids[: len(start)]
    if set(start) <= set(written):
        start = []
    return Prompt(
        (*start, *ids), split + len(start), cut_tokens, len(start), template, text, cut=cut
    )


def render_turn(example: Example, tokenizer: Tokenizer, *, chat: Chat) -> Prompt:
    """Return the tokens to feed for a further turn of a conversation: the template's end of the
    earlier answer, the user's text (`example.question`), and the opening of the next answer. Where
    the task gives the earlier answer itself (`example.reply`), its text goes in front, after what the
    template puts between the opening of an answer and the answer. All of these tokens count as
    question, none as context."""
    template = chat == "template" and example.chat
    text, reply, opening = example.question, example.reply or "", ""
    if template:
        talk = [("user", PROBE), ("assistant", ANSWER_PROBE), ("user", text)]
        history, answer, text = _templated(tokenizer, talk).rpartition(ANSWER_PROBE)
        if not answer:
            raise PromptError(
                "The chat template leaves out earlier answers: set chat=none, or use another model."
            )
        opening, usual = shell(tokenizer).tail, history.rpartition(PROBE)[2]
        if usual.startswith(opening) and example.reply is not None and not example.prefix:
            reply = usual.removeprefix(opening) + reply
    text = reply + text + example.prefix
    ids = tokens_after(tokenizer, text, opening if example.reply else "")
    return Prompt(tuple(ids), 0, 0, 0, template, text, example.reply is not None)


def wrap(
    tokenizer: Tokenizer,
    user: str,
    system: str,
    *,
    template: bool,
    earlier: Sequence[str] = (),
) -> str:
    """Return the user's turn, after what user and assistant said `earlier`, and the opening of the
    assistant's turn. Without a template, the system text and a blank line precede the user's text."""
    if not template:
        if earlier:
            raise PromptError(
                "Only a chat template says who said what in an earlier conversation: set chat=template."
            )
        return f"{system}\n\n{user}" if system else user
    turns = [("system", system)] * bool(system) + list(zip(cycle(("user", "assistant")), earlier))
    return _templated(tokenizer, [*turns, ("user", user)])


def _templated(tokenizer: Tokenizer, talk: Sequence[tuple[str, str]]) -> str:
    """Return the text of a conversation in the chat template, up to the opening of the next answer.
    `talk`: pairs of role and text. Raises `PromptError` where the template refuses it."""
    if not tokenizer.chat_template:
        raise PromptError(
            "This model's tokenizer has no chat template: set chat=none, or use an instruct model."
        )
    turns = [{"role": role, "content": content} for role, content in talk]
    try:
        return in_template(tokenizer, turns, add_generation_prompt=True)
    except Exception as error:  # a template is a program and may raise anything
        raise PromptError(
            f"The chat template refuses this prompt ({error}): set chat=none."
        ) from error


def in_template(tokenizer: Tokenizer, turns: Sequence[Mapping[str, str]], /, **options: Any) -> str:
    """Return the text that the tokenizer's chat template makes of a conversation. `turns`: role and
    content of each message; `options`: further arguments of `apply_chat_template`, and keywords of
    the template. A template that writes today's date writes one fixed day, so that prompts stay the
    same."""
    arguments = {"date_string": TEMPLATE_DATE, **options}
    with _on_template_day():
        return tokenizer.apply_chat_template(list(turns), tokenize=False, **arguments)


def check_keywords(tokenizer: Any, keywords: Keywords) -> None:
    """Raise `PromptError` for a keyword that the chat template never reads, such as a misspelt one.
    A template that is missing or cannot be parsed passes, because applying it reports that."""
    if not keywords or not tokenizer.chat_template:
        return
    from jinja2 import TemplateError, meta
    from transformers.utils import chat_template_utils

    helper: Any = chat_template_utils
    try:
        template = tokenizer.get_chat_template()
        # knows the tags that transformers adds
        parser = helper._compile_jinja_template(template).environment
        read = meta.find_undeclared_variables(parser.parse(template))
    except (TemplateError, ValueError):
        # ValueError: several templates, none of which is the default
        return
    for key in sorted(keywords.keys() - read):
        others = ", ".join(sorted(read - {"messages", "add_generation_prompt"})) or "no keyword"
        raise PromptError(
            f"template_kwargs.{key} would change nothing, because this model's chat template never reads it: correct "
            f"the name or leave it out; it reads {others}."
        )


class _TemplateDay(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return TEMPLATE_DAY.replace(tzinfo=tz)


@contextmanager
def _on_template_day() -> Iterator[None]:
    """Make templates that ask for the date with `strftime_now` write the fixed day. transformers
    passes no function of ours to a template, and its own reads the clock by the module's
    `datetime`."""
    from transformers.utils import chat_template_utils

    clock: Any = chat_template_utils
    with _CLOCK:
        usual = clock.datetime
        clock.datetime = _TemplateDay
        try:
            yield
        finally:
            clock.datetime = usual


def shell(
    tokenizer: Tokenizer,
    system: str = "",
    *,
    template: bool = True,
    earlier: Sequence[str] = (),
) -> Shell:
    """Return the text that `wrap` puts around the user's text, including a system text that some
    templates add by themselves."""
    wrapped = wrap(tokenizer, PROBE, system, template=template, earlier=earlier)
    head, probe, tail = wrapped.rpartition(PROBE)
    if not probe:
        raise PromptError(
            "The chat template changes the user's text: set chat=none, or use another model."
        )
    if PROBE in head and not any(PROBE in text for text in (system, *earlier)):
        raise PromptError(
            "The chat template writes the user's text twice: set chat=none, or correct the template."
        )
    return Shell(head, tail)


def _end_of_context(wrapped: str, context: str, question: str, around: Shell) -> int:
    """Return the position just after the context in `wrapped`, the user's turn with the template's
    text `around` it. It is found also if the template strips the user's text (Llama 3)."""
    user = context + question
    inside = wrapped[len(around.head) : len(wrapped) - len(around.tail)]
    if inside == user:
        return len(around.head) + len(context)
    if inside.strip() != user.strip():
        raise PromptError(
            "The chat template changes the user's text: set chat=none, or use another model."
        )
    stripped = len(inside.lstrip()) - len(inside) - len(user.lstrip()) + len(user)
    return len(around.head) + min(max(len(context) - stripped, 0), len(inside))


def cut_middle(example: Example, tokenizer: Tokenizer) -> tuple[str, str, int]:
    """Return context, question and the number of tokens cut from an example that is longer than its
    `max_prompt_tokens`. The first and the last half of so many tokens stay, decoded as one text, or
    each half by itself (`Example.halves_apart`).

    If the question was cut, what is left of it counts as context."""
    limit = example.max_prompt_tokens
    if limit is None:
        return example.context, example.question, 0
    if limit < 2:
        raise ExampleError(f"max_prompt_tokens={limit} leaves nothing of a prompt: use at least 2.")
    ids = tokenizer(example.context + example.question, verbose=False)["input_ids"]
    if len(ids) <= limit:
        return example.context, example.question, 0
    half = limit // 2
    parts = (
        [ids[:half], ids[-half:]] if example.halves_apart else [ids[:half] + ids[half - limit :]]
    )
    text_of = partial(tokenizer.decode, skip_special_tokens=True)
    user = "".join(map(text_of, parts))
    question = example.question
    if not user.endswith(question):  # a tokenizer may normalise its text, the question's, too
        question = text_of(tokenizer(question, verbose=False)["input_ids"])
    question = question if user.endswith(question) else ""
    return user.removesuffix(question), question, len(ids) - sum(map(len, parts))


def shortened(context: str, tokenizer: Tokenizer, cut: Cut) -> str:
    """Return the context without `cut.tokens` of its tokens. If the middle leaves, half of the
    remaining tokens stay before the cut and half after it; if the beginning leaves, all of them
    stay after it. Raise `ContextTooShort` if hardly any would be left."""
    ends = [0, *tokenize(tokenizer, context).ends]
    left = len(ends) - 1 - cut.tokens
    if left < 2:
        raise ContextTooShort(
            f"The context has {len(ends) - 1} tokens, and {cut.tokens} would have to leave it."
        )
    head = left // 2 if cut.side == "middle" else 0
    return context[: ends[head]] + context[ends[head + cut.tokens] :]


class Tokens(NamedTuple):
    ids: list[int]
    ends: list[int]  # characters of the text up to the end of each token


def tokenize(tokenizer: Tokenizer, text: str) -> Tokens:
    """Return the tokens of `text`. No special tokens are added; those spelled out in `text` are
    recognised."""
    options = {"return_offsets_mapping": True, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(text, add_special_tokens=False, **options)
    return Tokens(list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]])


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text without special tokens, with white space as the model wrote it."""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def tokens_after(tokenizer: Tokenizer, text: str, before: str = "") -> list[int]:
    """Return the tokens of `text` as they are when it follows `before` (or some other text, if
    `before` is unknown). By itself `text` may have other tokens: tokenizers of the sentencepiece
    kind put a space before a text."""
    before = before or ("x" if text[:1].isspace() else "\n")  # neither is merged with what follows
    ids, ends = tokenize(tokenizer, before + text)
    if len(before) not in ends:
        return tokenize(tokenizer, text).ids
    return [token for token, end in zip(ids, ends, strict=True) if end > len(before)]


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer puts before plain text: BOS, or as GLM-4's several."""
    plain, whole = tokenize(tokenizer, "a").ids, list(tokenizer("a", verbose=False)["input_ids"])
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(plain)] == plain), [])


def calibration_text(tokenizer: Tokenizer, tokens: int = MOST) -> list[int]:
    """Return `tokens` token ids of ordinary text, on which a method may calibrate itself: the end
    of Python's help topics, because haystacks are cut from their beginning."""
    tools = Tools(tokenizer, "none")
    text = load("pydoc", TaskEnv(text=tools, seed=0)).text
    return tools.encode(text[-8 * tokens :])[-tokens:]
