"""The examples of a task as token ids, each checked by harness/prompts/prompt_lint.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from evals.base import Example, Task, TaskEnv
from harness.config import plugins
from harness.config.settings import Settings, SettingsError
from harness.models.base import ModelSource
from harness.models.snapshots import cache_root
from harness.prompts.prompt import (
    ContextTooShort,
    Cut,
    Prompt,
    PromptError,
    Tokenizer,
    Tools,
    check_keywords,
    render,
    render_turn,
)
from harness.prompts.prompt_lint import Finding, lint
from harness.prompts.teacher import choices_ids, forced_ids
from harness.prompts.thinking import HARMONY, KINDS, SPACE, ThinkingTokenizer, Thought, divided
from harness.results.files import canonical
from harness.results.records import LeftOut
from harness.terminal.notices import alike, say_once

SHORTER = (
    ": use shorter prompts or answers (generation.max_new_tokens), or a model with a longer window"
)
# prompts that the chat template refuses before one passes, after which it is no matter of one example
REFUSED = 3
# an example, and what is cut from its context -> the example as token ids
Make = Callable[..., "PreparedExample"]


@dataclass(frozen=True, slots=True)
class PreparedExample:
    """An example as token ids, ready to run. A conversation's later turns are in `further`."""

    example: Example
    prompt: Prompt
    new_tokens: int
    findings: tuple[Finding, ...]
    forced: tuple[int, ...] = ()  # what is fed in place of what the model would have said
    choices: tuple[tuple[int, ...], ...] = ()  # what is fed one by one, each behind the same prompt
    further: tuple[PreparedExample, ...] = ()  # user turns behind the first
    # the prompt's last token is read behind the seal: what follows is the method's
    by_steps: bool = False
    most: int | None = None  # tokens that a cache holds, where what is more leaves it
    thought: Thought | None = None  # that precedes the answer; its tokens are among `new_tokens`

    @property
    def turns(self) -> tuple[PreparedExample, ...]:
        return (self, *self.further)

    @property
    def given(self) -> bool:
        """Return True if every answer is fed by force (`forced` or `choices`), so that the model
        chooses no token itself."""
        return bool(self.forced or self.choices)

    @property
    def parts(self) -> tuple[PreparedExample, ...]:
        """Return what the engine runs for this example, one after the other on one cache: for a
        question with choices one example per choice, whose tokens are fed by force; otherwise the
        example itself."""
        return tuple(
            replace(
                self,
                example=replace(
                    self.example,
                    id=f"{self.example.id}/choice {number}" if number else self.example.id,
                ),
                new_tokens=len(choice),
                forced=choice,
                choices=(),
                by_steps=True,
            )
            for number, choice in enumerate(self.choices)
        ) or (self,)

    @property
    def answer_tokens(self) -> int:
        """The most tokens of the answer, without a thought before it."""
        return self.new_tokens - (self.thought.room if self.thought else 0)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompts of all turns."""
        return sum(len(turn.prompt.ids) for turn in self.turns)

    @property
    def tokens(self) -> int:
        """The most tokens that this turn's prompt and answer have together."""
        return len(self.prompt.ids) + self.new_tokens

    @property
    def room(self) -> int:
        """The most tokens that a cache must hold for this example: prompts and answers of all
        turns, or `most`, the window of `overflow.window`, where older tokens leave the cache."""
        needed = sum(turn.tokens for turn in self.turns)
        return needed if self.most is None else min(needed, self.most)

    @property
    def needed(self) -> int:
        """The most tokens of the model's window that it takes: those of prompts and answers of all
        turns, or of the longest turn where older tokens leave the cache."""
        return (max if self.most is not None else sum)(turn.tokens for turn in self.turns)

    def sealed(self, protocol: str) -> list[int]:
        """Return, for each turn, the most tokens that the cache holds when the prompt ends and the
        method digests it (the seal). Under protocol=context this is one number, the context's
        tokens."""
        if protocol == "context":
            return [self.prompt.split]
        before = accumulate((turn.tokens for turn in self.turns), initial=0)
        whole = [fed + len(turn.prompt.ids) for fed, turn in zip(before, self.turns, strict=False)]
        return whole if self.most is None else [min(tokens, self.most) for tokens in whole]

    @property
    def sha256(self) -> str:
        """The hash of all tokens that are fed: prompts of all turns, texts fed by force, and an
        answer's first words."""
        ids = ",".join(map(str, self.prompt.ids))
        given = [self.forced] if self.forced else self.choices
        if self.thought is not None and self.thought.prefix:
            given = [self.thought.prefix]
        forced = "".join(f":{','.join(map(str, text))}" for text in given)
        later = "".join(f"/{turn.sha256}" for turn in self.further)
        return hashlib.sha256(f"{self.prompt.split}:{ids}{forced}{later}".encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """The values that a record holds of it, by key (harness/jobs/facts.py)."""
        warnings = [finding.message for finding in self.findings]
        return {
            "warnings": warnings,
            "cut_tokens": self.prompt.cut_tokens,
            "unit": self.example.unit,
        }

    @property
    def answers_sha256(self) -> str:
        """The hash of all that outputs are scored by and averaged over: right answers, groups,
        data."""
        turns = [[turn.group, turn.references, turn.data] for turn in self.example.turns]
        return hashlib.sha256(
            canonical({"unit": self.example.unit, "turns": turns}).encode()
        ).hexdigest()


def sampling_seed(seed: int, example: str) -> int:
    """Return the seed of an example's answer, made from its id, so that a resumed run draws the same
    tokens."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{example}".encode()).digest()[:4])


def blank(tokens: int, new_tokens: int) -> PreparedExample:
    """Return an example with these lengths and no content, for forecasts of memory."""
    example = Example(
        id="blank", group="blank", context="", references=(), max_new_tokens=new_tokens
    )
    return PreparedExample(
        example, Prompt((0,) * tokens, tokens, 0, 0, template=False, text=""), new_tokens, ()
    )


def by_context(
    items: Iterable[PreparedExample],
    stage: Callable[[int], int] = lambda tokens: 0,
    *,
    shared: bool = True,
) -> Iterator[list[PreparedExample]]:
    """Yield lists of examples with the same context, in the order in which the contexts first
    occur. An example without a question after its context is a list by itself, and so is every one unless prefills
    are `shared`.

    `stage` maps a prompt length to a number; prompts with different numbers are kept apart, because
    the model rotates them with different frequencies (as with long and short RoPE factors).
    """
    groups: dict[tuple[object, ...], list[PreparedExample]] = {}
    for item in items:
        ids, split = item.prompt.ids, item.prompt.split
        # without a question there is one prompt
        key = ids[:split] if shared and split < len(ids) else (item.example.id,)
        groups.setdefault((*key, stage(len(ids))), []).append(item)
    yield from groups.values()


def room(items: Sequence[PreparedExample]) -> int:
    """Return the tokens that a cache must hold so that each of `items` can be asked on it in turn:
    those of the longest."""
    return max(item.room for item in items)


class LintError(ValueError):
    """Report that a prompt is not what the user believes (cut off, empty, ...), so that its results
    would mislead."""


class Prompts(NamedTuple):
    """The examples of a task that have a prompt to run, and those that have none: too long for the
    model's window (`too_long=skip`), or refused by the chat template."""

    items: Sequence[PreparedExample]
    left_out: Sequence[LeftOut] = ()

    @property
    def any_too_long(self) -> bool:
        """True if an example was left out or cut because of the model's window."""
        skipped = any(example.kind == "skipped" for example in self.left_out)
        return skipped or any(item.prompt.cut for item in self.items)


def prepare(task: Task, source: ModelSource, settings: Settings) -> Sequence[PreparedExample]:
    """Return the examples of `task` that can be run (see `prompts_of`)."""
    return prompts_of(task, source, settings).items


def prompts_of(task: Task, source: ModelSource, settings: Settings) -> Prompts:
    """Return all examples of `task`, with the prompts that the model of `source` gets, and print
    how many are left out. Raise `LintError` for the first prompt with an error."""
    info, tokenizer = source.describe(), asked_tokenizer(source.tokenizer(), settings)
    check_keywords(tokenizer, settings.template_kwargs or {})
    env = TaskEnv(
        text=Tools(tokenizer, settings.chat),  # type: ignore[arg-type]
        seed=settings.seed,
        data_root=settings.data.folder(),
        cache_dir=cache_root() / "tasks",
        window=info.limit,
    )
    with plugins.naming("task", plugins.describe(task)):
        examples = _told_apart(task, env)
        prompts = itemised(examples, tokenizer, settings, info.limit, info.limit_because)
    count = len(prompts.items) + len(prompts.left_out)
    for why, times in alike([example.why for example in prompts.left_out]):
        say_once(f"{times} of {count} examples left out: {why}")
    return prompts


def _told_apart(task: Task, env: TaskEnv) -> Iterator[Example]:
    """Yield the examples of `task`. Raise `SettingsError` if two have the same id."""
    places = dict[str, int]()
    for place, example in enumerate(task.examples(env), start=1):
        if (first := places.setdefault(example.id, place)) != place:
            twice = [
                f"task.{key}"
                for key, value in plugins.describe(task).items()
                if isinstance(value, (list, tuple)) and any(value.count(one) > 1 for one in value)
            ]
            remedy = (
                f"name each value of {twice[0]} once"
                if twice
                else "give every row of its data an id of its own"
            )
            raise SettingsError(
                f"Examples {first} and {place} of the task are both called {example.id}: {remedy}."
            )
        yield example


def asked_tokenizer(tokenizer: Tokenizer, settings: Settings) -> Tokenizer:
    """Return the tokenizer with a chat template that has the model think or not, as
    `settings.thinking` says. Raise `SettingsError` if the model is to think and cannot."""
    asked: Any = ThinkingTokenizer(tokenizer, settings.template_kwargs or {}, on=settings.thinks)
    known, why = asked.thinking, ""
    if known is None:
        why = f"knows no thoughts that end in {', '.join(kind.end for kind in (*KINDS, HARMONY))}"
    elif known.wrapped:
        why = f"has it write {known.wrapped} before its answers, which would be scored with it"
    if settings.thinks and why:
        raise SettingsError(
            f"thinking={settings.thinking} needs a model that thinks, and this one's chat template {why}: set "
            "thinking=off, or choose another reasoning model."
        )
    given: Tokenizer = asked
    return given


def itemised(
    examples: Iterable[Example],
    tokenizer: Tokenizer,
    settings: Settings,
    window: int,
    because: str = "",
) -> Prompts:
    """Return `examples` as prompts of a model whose context window has `window` tokens, with words
    that say why (`because`). An example
    whose prompt the chat template refuses is left out; raise its `PromptError` if the template
    refuses the first few, or all."""
    items = list[PreparedExample]()
    left_out = list[LeftOut]()
    side = settings.too_long
    make = partial(_item, tokenizer=tokenizer, settings=settings, window=window, because=because)
    refusal: PromptError | None = None
    for example in examples:
        try:
            item = make(example)
            shorter = (
                item
                if side == "refuse" or item.needed <= window
                else _fitted(item, make, side, window)
            )
        except PromptError as error:
            why = f"{type(error).__name__}: {error}"
            left_out.append(LeftOut(example.id, example.group, "", 0, "error", why))
            if not items and len(left_out) == REFUSED:
                raise
            refusal = error
            continue
        if shorter is None:
            why = f"prompt and answer take {item.needed} tokens, and the model's window has {window}{because}"
            why += (
                "" if side == "skip" else "; too_long cuts the context, which is too short for that"
            )
            left_out.append(
                LeftOut(example.id, example.group, item.sha256, item.prompt_tokens, "skipped", why)
            )
            continue
        if errors := [finding for finding in shorter.findings if finding.level == "error"]:
            raise LintError(f"Example {example.id}: {errors[0].message}")
        items.extend(_samples(shorter, settings.generation.samples))
    if not items:
        advice = "The task has no examples: see its parameters with `python -m harness.list`."
        if not left_out:
            raise SettingsError(advice)
        if refusal:
            raise refusal
        raise LintError(f"Every example is left out: {left_out[0].why}{SHORTER}.")
    return Prompts(_cut_alike(items, make, side, window), left_out)


def _samples(item: PreparedExample, count: int) -> Iterator[PreparedExample]:
    """Yield the example `count` times. Each copy has an id of its own, from which its seed is made;
    statistics count all copies as one example. An example whose answer is fed is yielded once, as
    it is."""
    if count == 1 or item.given:
        yield item
        return
    for number in range(1, count + 1):
        name, unit = f"{item.example.id}/sample {number}", item.example.unit or item.example.id
        example = replace(item.example, id=name, unit=unit)
        turns = zip(item.further, example.turns[1:], strict=True)
        yield replace(
            item,
            example=example,
            further=tuple(replace(turn, example=asked) for turn, asked in turns),
        )


def _fitted(item: PreparedExample, make: Make, side: str, window: int) -> PreparedExample | None:
    """Return the example with its context cut on `side` so that it fits the window. If the context
    is too short for that, and the task says that the question is long, context and question are cut
    together. Return None under too_long=skip, and if nothing would be left. A cut text may have
    other tokens at the seam than were counted, so it is cut until it fits."""
    question = False
    while side != "skip" and item.needed > window:
        before = item.prompt.cut.tokens if item.prompt.cut else 0
        try:
            item = make(item.example, cut=Cut(side, before + item.needed - window, question))  # type: ignore[arg-type]
        except ContextTooShort:
            if question or not item.example.long_question:
                return None
            question = True
    return item if item.needed <= window else None


def _cut_alike(
    items: Sequence[PreparedExample], make: Make, side: str, window: int
) -> list[PreparedExample]:
    """Return the examples with equal cuts of equal contexts: questions that are too long with one
    context lose the same part of it, so that they can share its prefill."""
    most = dict[tuple[str, str], Cut]()
    for item in items:
        if (cut := item.prompt.cut) and not cut.question:
            key = item.example.context, item.example.system
            most[key] = max(cut, most.get(key, cut))

    def alike_cut(item: PreparedExample) -> PreparedExample:
        cut = most.get((item.example.context, item.example.system))
        if not item.prompt.cut or item.prompt.cut.question or item.prompt.cut == cut:
            return item
        return _fitted(make(item.example, cut=cut), make, side, window) or item

    return list(map(alike_cut, items))


def _item(
    example: Example,
    tokenizer: Tokenizer,
    settings: Settings,
    window: int,
    because: str,
    cut: Cut | None = None,
) -> PreparedExample:
    """Turn an example into token ids, turn by turn, and check each turn's prompt. Tokens of earlier
    turns take room in the model's window from later ones, unless `overflow.window` drops old
    tokens. `cut`: what leaves the first turn's context."""
    items: list[PreparedExample] = []
    most = settings.overflow.window
    thinks = settings.thinks and example.chat
    if thinks:
        _refuse_thoughts(example, settings)
    for turn in example.turns:
        # the answer's first words follow its thought
        asked = replace(turn, prefix="") if thinks else turn
        to_prompt = render_turn if items else partial(render, cut=cut)
        prompt = to_prompt(asked, tokenizer, chat=settings.chat)  # type: ignore[arg-type]
        limit = settings.generation.max_new_tokens
        forced = forced_ids(turn, prompt, tokenizer)[:limit]
        choices = choices_ids(turn, prompt, tokenizer)
        new_tokens = (
            max(map(len, choices), default=0) or len(forced) or limit or turn.max_new_tokens
        )
        thought = None
        if thinks:
            allowed, new_tokens = divided(new_tokens)
            thought = _thought(
                prompt, tokenizer, settings, turn.prefix, window - new_tokens, allowed
            )
            new_tokens += thought.room
        asked_thought = (
            f" ({thought.room} of them by thinking={settings.thinking})" if thought else ""
        )
        before = 0 if most else sum(one.room for one in items)
        findings = list(
            lint(
                turn,
                prompt,
                tokenizer,
                window,
                new_tokens,
                before,
                asked_thought,
                because,
            )
        )
        item = PreparedExample(
            turn, prompt, new_tokens, tuple(findings), forced, choices, by_steps=bool(choices)
        )
        items.append(replace(item, thought=thought))
    found = dict.fromkeys(finding for one in items for finding in one.findings)
    return replace(
        items[0], example=example, findings=tuple(found), further=tuple(items[1:]), most=most
    )


def _refuse_thoughts(example: Example, settings: Settings) -> None:
    """Raise `SettingsError` for an example whose answer no thought can precede."""
    why = ""
    if example.teacher_forced or example.choices:
        why = "feeds its answers"
    elif example.further:
        why = "has several turns, and a chat template drops the thoughts of earlier ones, which a cache keeps"
    if why:
        raise SettingsError(
            f"thinking={settings.thinking} does not suit this task, which {why}: set thinking=off."
        )


def _thought(
    prompt: Prompt, tokenizer: Tokenizer, settings: Settings, prefix: str, room: int, most: int
) -> Thought:
    """Return the thought before the answer to `prompt`. `prefix`: the first words of the answer;
    `room`: the tokens that the model's window leaves for prompt and thought; `most`: those that a
    thought may have if the user does not say."""
    asked: Any = tokenizer
    thought = Thought.after(prompt, tokenizer, asked.thinking, prefix)
    left = room - len(prompt.ids) - max(SPACE, len(thought.prefix))
    if prompt.cut is not None:  # which would otherwise be cut to fill the window
        left = max(left, room // 2)
    most = max(1, min(most, left)) if settings.thinking == "on" else int(settings.thinking)
    return replace(thought, most=most)
