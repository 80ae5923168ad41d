"""Switches the thinking of a reasoning model off or on through its chat template, and finds in an answer where the
thought ends.

A thought is what the model writes for itself before it answers: between `<think>` and `</think>`, or in another channel
of gpt-oss (harmony). It is no part of the answer."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness.prompts.facts import TOKENS
from harness.prompts.prompt import (
    NO_KEYWORDS,
    PROBE,
    Keywords,
    Prompt,
    Tokenizer,
    in_template,
    tokenize,
)
from harness.prompts.stops import MARGIN, Reason, StopRule
from harness.prompts.teacher import following

# the variable by which chat templates are told; those that do not know it ignore it
ENABLE = "enable_thinking"
# tokens of a thought under thinking=on; models write one to a few thousand about a question on a long text
MOST = 8192
AFTER = 2048  # tokens of an answer after a thought whose tokens the task's length counts, too
SPACE = 4  # tokens of white space that may stand between a thought and its answer
CUT: Literal["thought"] = "thought"  # why an answer ended whose thought was cut


class Marks(NamedTuple):
    """Hold the texts by which a kind of model marks its thoughts."""

    opening: str  # how a thought begins
    end: str  # how it ends
    white: str = ""  # between the marks of an empty one, and after it
    go_on: str = ""  # the token that ends a turn, but within a thought only a part of it


KINDS = (
    Marks("<think>", "</think>", "\n\n"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<thought>", "</thought>", "\n\n"),  # EXAONE Deep
    Marks("<seed:think>", "</seed:think>"),  # Seed-OSS
    Marks("<|channel>thought\n", "<channel|>"),  # Gemma 4
)
HARMONY = Marks("<|channel|>", "<|channel|>final<|message|>", go_on="<|end|>")
# the end of a prompt in gpt-oss's format: the model writes the channel's name
HARMONY_TURN = "<|start|>assistant"
# marks around the answer of Granite 3.3 and of Hunyuan, which nothing takes out
WRAPPED = ("<response>", "<answer>")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Describe how a model thinks under its chat template."""

    marks: Marks
    opened: bool  # the template itself writes the opening mark at the end of a prompt
    empty: str  # makes an empty thought after a prompt that asks for one
    # ends the thought that the template opens although it was asked not to; usually empty
    closing: str
    # the mark with which the answer behind a thought begins, one of WRAPPED; usually none
    wrapped: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, keywords: Keywords = NO_KEYWORDS) -> Thinking | None:
        """Return how a model thinks, by what its chat template writes after the user's text with
        thinking on and off; None for a model that does not. `keywords`: for the template."""
        on, off = (_tail(tokenizer, {**keywords, ENABLE: thinks}) for thinks in (True, False))
        template = str(tokenizer.chat_template)
        if on.rstrip().endswith(HARMONY_TURN):
            closing = HARMONY.end if off.rstrip().endswith(HARMONY_TURN) else ""
            return cls(HARMONY, False, HARMONY.end, closing)
        for marks in KINDS:
            opened, closed = on.rstrip().endswith(marks.opening), off.rstrip().endswith(marks.end)
            if on.rstrip().endswith(marks.end):  # it closes the thought whatever is asked
                continue
            # templates cut thoughts out of answers
            if opened or closed or marks.end in template:
                block = off.rpartition(on)[2] if closed and on.strip() else ""  # the template's own
                bare = marks.opening + marks.white + marks.end + marks.white
                empty = _closing(on, marks) or block or bare
                wrapped = next((mark for mark in WRAPPED if mark in template), "")
                return cls(marks, opened, empty, _closing(off, marks), wrapped)
        return None

    @property
    def after(self) -> str:
        """Return what stands between a thought's end and the answer."""
        return self.empty.rpartition(self.marks.end)[2]


def _tail(tokenizer: Tokenizer, keywords: Keywords) -> str:
    """Return what the chat template writes after the user's text; empty if there is no template, or
    one that fails, which rendering a prompt will report."""
    try:
        turns = [{"role": "user", "content": PROBE}]
        whole = in_template(tokenizer, turns, **keywords, add_generation_prompt=True)
        return whole.rpartition(PROBE)[2]
    except Exception:  # a template is a program and may raise anything
        return ""


def _closing(tail: str, marks: Marks) -> str:
    """Return the text that ends the thought at once which the template opens in `tail`; empty if it
    opens none."""
    if not tail.rstrip().endswith(marks.opening):
        return ""
    white = tail[len(tail.rstrip()) :]
    # one is empty, as between the marks of Qwen3's empty thought
    lines = "" if "\n\n" in white else "\n"
    return f"{lines}{marks.end}{marks.white}" if white else marks.end


def marks_ending_in(end: str) -> Marks:
    """Return the marks of the kind of thoughts that end in `end`; for an unknown kind, marks of
    thoughts with which every answer begins."""
    same = (kind for kind in (*KINDS, HARMONY) if kind.end.endswith(end) or end.endswith(kind.end))
    return next(same, Marks("", end))


def divided(length: int) -> tuple[int, int]:
    """Return how many tokens a thought may have, and how many its answer, for a task that allows
    `length` tokens. A length of at least twice MOST is made for models that think, and counts
    both."""
    return (length - AFTER, AFTER) if length >= 2 * MOST else (MOST, length)


class ThinkingTokenizer:
    """Stand in for a tokenizer whose chat template is given `keywords`, and told to let the model
    think, or not to; with `on=None` it is told neither.

    Templates that know the variable `enable_thinking` obey it, for others it changes nothing. With
    thinking off, a thought that the template opens by itself is closed at once."""

    def __init__(
        self, tokenizer: Tokenizer, keywords: Keywords = NO_KEYWORDS, *, on: bool | None
    ) -> None:
        self.tokenizer, self.keywords = tokenizer, dict(keywords)
        self.on, self.thinking = on, Thinking.of(tokenizer, keywords)
        # what its prompts depend on besides the tokenizer
        self.told = [json.dumps(self.keywords, sort_keys=True)] * bool(keywords)
        if self.thinking and on is not None:
            self.told.append(f"thinking {'on' if on else 'off'}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        return self.tokenizer(text, **options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        asked = {} if self.on is None else {ENABLE: self.on}
        keywords = {**asked, **options, **self.keywords}
        text = self.tokenizer.apply_chat_template(conversation, **keywords)
        if self.on is False and self.thinking and options.get("add_generation_prompt"):
            text += self.thinking.closing
        return text


@dataclass(frozen=True, slots=True)
class Thought:
    """Describe the thought that the model has before one answer."""

    marks: Marks
    opened: bool  # the prompt ends with the opening mark
    # tokens that it may have, its end mark among them; None: no limit of its own
    most: int | None = None
    prefix: tuple[int, ...] = ()  # the answer's first words, fed once the thought has ended
    # an empty thought and the answer's first words, as they follow the prompt
    empty: tuple[int, ...] = ()
    text: str = ""  # the prompt with these

    @classmethod
    def after(
        cls, prompt: Prompt, tokenizer: Tokenizer, thinking: Thinking, prefix: str
    ) -> Thought:
        """Return the thought after `prompt`, without a limit. `prefix`: the first words of the
        answer."""
        marks, added = thinking.marks, thinking.empty + prefix
        end = tokenize(tokenizer, marks.end).ids
        fed = following(marks.end, end, thinking.after + prefix, tokenizer) if prefix else ()
        empty = following(prompt.text, prompt.ids[prompt.bos_added :], added, tokenizer)
        return cls(marks, thinking.opened, None, fed, empty, prompt.text + added)

    @property
    def room(self) -> int:
        """The most tokens that stand between the prompt and the answer's own: those of a thought, or
        of an empty one where likelihoods are measured, and the answer's first words."""
        return max(self.most or 0, len(self.empty)) + max(SPACE, len(self.prefix))


class ThoughtfulAnswer:
    """Follow one answer that a thought precedes: decide when it ends, and pick its tokens. Once the
    thought has ended, the answer's first words are fed, and stop strings count only after them.

    An answer that does not begin with the opening mark has no thought."""

    def __init__(self, thought: Thought, answer: StopRule, most_answer: int | None = None) -> None:
        """`answer`: ends the answer itself. `most_answer`: tokens that it may have; None for no
        limit."""
        self.thought, self.answer, self.most_answer = thought, answer, most_answer
        marks, tokenizer = thought.marks, answer.tokenizer
        go_on = set(tokenize(tokenizer, marks.go_on).ids) if marks.go_on else set[int]()
        self._eos_ids = answer.eos_ids - go_on
        # tokens that contain the end mark, and what came with it
        self._window = len(marks.end.encode()) + MARGIN
        self._look = len(marks.opening.encode()) + MARGIN
        self._end: int | None = None  # tokens up to the end mark, once it was seen
        self._count = 0
        self._pick_thought: Callable[[Tensor], Tensor]
        self._pick_answer: Callable[[Tensor], Tensor]

    def picking(
        self, thought: Callable[[Tensor], Tensor], answer: Callable[[Tensor], Tensor]
    ) -> ThoughtfulAnswer:
        """Pick tokens of the thought and of the answer by these functions: logits [B V] -> ids
        [B]. Return this object, which picks as a sampler does."""
        self._pick_thought, self._pick_answer = thought, answer
        return self

    def pick(self, logits: Tensor) -> Tensor:
        """Return the next token [B]: the model's choice, or one of the answer's first words."""
        if self._end is None:
            return self._pick_thought(logits)
        fed = self._count - self._end
        if self._end and fed < len(self.thought.prefix):
            return torch.full((len(logits),), self.thought.prefix[fed], device=logits.device)
        return self._pick_answer(logits)

    def __call__(self, tokens: list[int]) -> Reason | None:
        """Return why the answer ends with the last of `tokens`, or None. It is called after each
        token."""
        self._count = len(tokens)
        if self._end is None:
            self._end = self._ends_here(tokens)
            if self._end is None:
                if tokens[-1] in self._eos_ids:
                    return "eos"
                most = self.thought.most
                return CUT if most is not None and len(tokens) >= most else None
        start, skip = self._start(tokens, self._end)
        answer = tokens[start:]
        if not answer:
            return None
        full = self.most_answer is not None and len(answer) >= self.most_answer
        return self.answer(answer, skip) or ("length" if full else None)

    @property
    def ends(self) -> list[int]:
        """Return the tokens that end the answer by themselves, as `StopRule.ends`."""
        return self.answer.ends

    def text(self, tokens: Sequence[int]) -> str:
        """Return the answer without its thought, its first words and special tokens; empty if the
        thought did not end."""
        start, skip = self.start(tokens)
        return self.answer.text(tokens[start:], skip)

    def start(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many of `tokens` precede the answer, all if the thought did not end, and how
        many characters of the next one are still the thought's."""
        end = self._end_of(tokens)
        return (len(tokens), 0) if end is None else self._start(tokens, end)

    def thought_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many of the answer's `tokens` are its thought, with its marks and the white
        space behind it: all of them if it did not end. A token that the end mark and the answer share
        is the answer's."""
        end = self._end_of(tokens) if self.thought.prefix else None
        return self.start(tokens)[0] if end is None else end

    def facts(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return what a record holds of the thought, by key (harness/prompts/facts.py)."""
        return {TOKENS: self.thought_tokens(tokens)}

    def answers(self, tokens: Sequence[int]) -> bool:
        """Return False if all `tokens` are a thought, so that there is no answer."""
        return self.thought_tokens(tokens) < len(tokens)

    def _ends_here(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens if the last one ends the thought, 0 if there is none, and
        None while it goes on."""
        if len(tokens) <= self._look and self._has_none(tokens):
            return 0
        ended = self.thought.marks.end in self._decoded(tokens[-self._window :])
        return len(tokens) if ended else None

    def _end_of(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the tokens of a whole answer precede the end of its thought: 0 if it
        has none, None if the thought does not end."""
        end = self.thought.marks.end
        if self._has_none(tokens[: self._look]):
            return 0
        if end not in self._decoded(tokens):
            return None
        return bisect_left(
            range(len(tokens)), True, key=lambda count: end in self._decoded(tokens[:count])
        )

    def _has_none(self, tokens: Sequence[int]) -> bool:
        """Return True if an answer that begins with `tokens` does not begin with a thought."""
        begun, opening = self._decoded(tokens).lstrip(), self.thought.marks.opening
        return not (self.thought.opened or begun.startswith(opening) or opening.startswith(begun))

    def _start(self, tokens: Sequence[int], end: int) -> tuple[int, int]:
        """Return where in `tokens` the answer begins, if its thought ends after `end` tokens: the
        number of the token, and how many characters of it still belong to the thought. The answer
        begins after the words that were fed, or else after white space."""
        if not end or self.thought.prefix:
            return min(len(tokens), end + len(self.thought.prefix) if end else 0), 0
        mark, last = self.thought.marks.end, self._decoded(tokens[end - 1 : end])
        if not mark.endswith(last.rstrip()):
            known = self._decoded(tokens[max(0, end - self._window) : end])
            if shared := known.rpartition(mark)[2].lstrip():
                return end - 1, len(last) - len(shared)
        white = (
            i
            for i in range(end, len(tokens))
            if tokens[i] in self.answer.eos_ids or self._decoded([tokens[i]]).strip()
        )
        return next(white, len(tokens)), 0

    def _decoded(self, tokens: Sequence[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.answer.tokenizer.decode(list(tokens), **options))
