"""Where the answer of an example stands in its prompt, as token positions.

A needle is the line or sentence of the context that holds a reference answer word for word (where the task names what
it planted: that). An example whose answer is not in its text, or stands there many times, has no needle to follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evals.base import Example
from harness.prompts.prompt import Prompt, Tokenizer, tokenize

MOST = 4  # places; a word that stands in more of them is no needle (RULER's common words)
LONGEST = 300  # characters on either side that can belong to an answer's sentence
ENDS = re.compile(r"\n|[.!?](?=\s)")


@dataclass(frozen=True, slots=True)
class LocatedNeedle:
    """One answer. `positions`: of the tokens of its sentences in the prompt, ascending; none where all were cut."""

    answer: str
    positions: tuple[int, ...]


def needles(example: Example, prompt: Prompt, tokenizer: Tokenizer) -> list[LocatedNeedle]:
    """One per reference that the uncut context holds; none at all for a text that is fed (teacher forcing, choices)."""
    if example.teacher_forced or example.choices:
        return []
    known = [answer for answer in example.references if 0 < len(list(_places(example.context, answer))) <= MOST]
    ends = tokenize(tokenizer, prompt.text).ends if known else []
    found = []
    for answer in known:
        spans = [_sentence(prompt.text, example, *place) for place in _places(prompt.text, answer)]
        tokens = {token + prompt.bos_added for span in spans for token in _tokens(ends, *span)}
        found.append(LocatedNeedle(answer, tuple(sorted(token for token in tokens if token < prompt.split))))
    return found


def missing(found: Sequence[LocatedNeedle], output: str) -> list[LocatedNeedle]:
    """Those whose answer is not in the output; all of them where every answer is there."""
    return [needle for needle in found if plain(needle.answer) not in plain(output)] or list(found)


def plain(text: str) -> str:
    """Letters and digits alone, in lower case: `1,234` is 1234."""
    return re.sub(r"[\W_]+", "", text.lower())


def _places(text: str, answer: str) -> Iterator[tuple[int, int]]:
    """Where `answer` stands as words of its own, whatever its case."""
    if not answer.strip():
        return
    for match in re.finditer(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", text, re.IGNORECASE):
        yield match.span()


def _sentence(text: str, example: Example, start: int, end: int) -> tuple[int, int]:
    """The span of what was planted around text[start:end], else of the line or sentence."""
    planted = str(example.data.get("needle", ""))
    at = text.find(planted, max(0, end - len(planted)), start + len(planted)) if planted else -1
    if 0 <= at <= start:
        return at, at + len(planted)
    before, after = text[max(0, start - LONGEST) : start], text[end : end + LONGEST]
    last = max((match.end() for match in ENDS.finditer(before)), default=0)
    first = ENDS.search(after)
    begin = start - len(before[last:].lstrip())
    return begin, end + (first.end() if first else len(after))


def _tokens(ends: Sequence[int], start: int, end: int) -> Iterator[int]:
    """Tokens that hold a character of text[start:end]."""
    begin = 0
    for token, stop in enumerate(ends):
        if begin < end and stop > start:
            yield token
        begin = stop
