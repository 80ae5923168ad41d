"""Hides needles in a haystack, eight ways: niah_single, _multikey, _multivalue, _multiquery (RULER,
arXiv:2404.06654)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from evals.base import TextTools
from evals.haystack import split_sentences
from evals.ruler.fitting import Generator
from evals.ruler.templates import NEW_TOKENS, NIAH_NEEDLE, NOISE, TEMPLATES, FilledTemplate
from evals.ruler.vocabulary import Streams, keys

# percent of the sentences
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, num=40)))


class Needles(NamedTuple):
    """Define a kind of needle task: `keys` needles of `values` values each are hidden in a
    haystack, and `queries` of the keys are asked for."""

    haystack: str  # noise, essay or needle
    key_type: str = "words"  # or uuids
    value_type: str = "numbers"  # or uuids
    keys: int = 1
    values: int = 1
    queries: int = 1


KINDS = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value_type="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", key_type="uuids", value_type="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}


def essay_words(text: str) -> list[str]:
    """Split an essay into words, the unit of its haystack."""
    return re.sub(r"\s+", " ", text).split(" ")


class Niah(Generator):
    """Make the prompts of RULER's niah tasks: needles of one kind in a haystack. `essay`: the
    haystack's words, for the kinds that hide their needles in essays."""

    new_tokens = NEW_TOKENS["niah"]

    def __init__(
        self,
        text: TextTools,
        streams: Streams,
        length: int,
        *,
        kind: Needles,
        essay: Sequence[str] = (),
        questions: int = 1,
    ) -> None:
        """Prepare the kind and its template for `questions` questions on each haystack."""
        unit = 500 if kind.haystack == "essay" else 25 if length >= 4096 else 5
        super().__init__(text, streams, length, unit)
        # enough keys (names of needles) that no two questions on one haystack ask for the same
        self.kind = kind._replace(keys=max(kind.keys, questions * kind.queries))
        self.essay, self.questions = essay, questions
        single = kind.queries * kind.values == 1
        self.template = TEMPLATES["niah"].singular() if single else TEMPLATES["niah"]
        self.noun = kind.value_type[:-1] if single else kind.value_type

    def minimum(self, index: int) -> int:
        return self.kind.keys * self.kind.values  # one line each

    def probe(self, size: int, index: int) -> FilledTemplate:
        names, values, needles = self._needles()
        self.streams.shuffle(needles)
        context = (
            self._in_essay(size, needles)
            if self.kind.haystack == "essay"
            else self._in_lines(size, needles)
        )
        count = self.kind.queries
        drawn = self.streams.python.sample(range(self.kind.keys), count * self.questions)
        filled = []
        for wanted in (drawn[i : i + count] for i in range(0, len(drawn), count)):
            answers = tuple(value for i in wanted for value in values[i])
            depth = 100 * context.index(answers[0]) / len(context)  # in percent, as in every task
            query = _enumeration([names[i] for i in wanted])
            data = {"depth": round(depth, 2)}
            filled.append(
                self.template.fill(
                    context, answers, data=data, type_needle_v=self.noun, query=query
                )
            )
        more = tuple(replace(one, context="") for one in filled[1:])
        return replace(filled[0], more=more)

    def _draw(self, kind: str) -> str:
        if kind == "words":
            return self.streams.python.choice(keys())
        return self.streams.number() if kind == "numbers" else self.streams.uuid()

    def _needle(self, key: str, value: str) -> str:
        return NIAH_NEEDLE.format(type_needle_v=self.kind.value_type, key=key, value=value)

    def _needles(self) -> tuple[list[str], list[list[str]], list[str]]:
        names, values, needles = [], [], []
        for _ in range(self.kind.keys):
            names.append(self._draw(self.kind.key_type))
            values.append([self._draw(self.kind.value_type) for _ in range(self.kind.values)])
            needles += [self._needle(names[-1], value) for value in values[-1]]
        return names, values, needles

    def _in_essay(self, size: int, needles: list[str]) -> str:
        """Return `size` words of the essay with the needles between its sentences, at distinct
        depths. Text that is too short is repeated."""
        sentences = split_sentences(" ".join(islice(cycle(self.essay), size)).strip())
        depths = self.streams.python.sample(DEPTHS, len(needles))
        places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        pieces = []
        for start, stop, needle in zip([0, *places], places, needles, strict=False):
            pieces += [" ".join(sentences[start:stop]), needle]
        return " ".join([*pieces, " ".join(sentences[places[-1] :])])

    def _in_lines(self, size: int, needles: list[str]) -> str:
        """Return `size` lines, of noise or of other needles, with the needles as lines between
        them."""
        if self.kind.haystack == "noise":
            lines = [NOISE] * size
        else:
            kinds = self.kind.key_type, self.kind.value_type
            lines = [self._needle(*map(self._draw, kinds)) for _ in range(size)]
        places = sorted(self.streams.python.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


def _enumeration(names: list[str]) -> str:
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
