"""Asks for common and frequent words, cwe and fwe (RULER, arXiv:2404.06654): which words of a long
list come up most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_lowercase

import numpy as np

from evals.base import TaskError, TextTools
from evals.ruler.fitting import Generator, TooShort
from evals.ruler.templates import NEW_TOKENS, TEMPLATES, FilledTemplate
from evals.ruler.vocabulary import Streams, distinct_words

COMMON = 10  # words asked for
ENGLISH_WORDS = "english_words.json"

CODED_LETTERS = 6
ALPHA = 2.0  # exponent of the zeta distribution
ZETA = math.pi**2 / 6  # zeta(ALPHA)


class CommonWords(Generator):
    """Make the prompts of RULER's cwe (common words): a list in which ten common words come ten
    times as often as the others (six times below 4096 tokens), after one worked example.

    Where a chat template is used, the official script wraps the example in it too, so that the
    template stands twice in a prompt. Here the example is plain and inside the user turn, since a
    task knows no template; without a template the two are equal. `english` is the official
    repository's list, for lists longer than wonderwords' 8166 words."""

    new_tokens = NEW_TOKENS["cwe"]
    first = 4096

    def __init__(
        self, text: TextTools, streams: Streams, length: int, *, english: Sequence[str] = ()
    ) -> None:
        super().__init__(text, streams, length, unit=10)
        self._english = english
        self._words = list(distinct_words())
        streams.shuffle(self._words)
        # Words of the example, how often they come, then how often those of the list come: common words, other words.
        self._shape = (40, (10, 3), (30, 3)) if length >= 4096 else (20, (3, 1), (6, 1))

    def minimum(self, index: int) -> int:
        return 2 * COMMON if self.is_fine else COMMON

    def largest(self, tokens_per_unit: float) -> int:
        return max(int(self.length // tokens_per_unit) * 2, self.unit * 2)

    def probe(self, size: int, index: int) -> FilledTemplate:
        example_size, example_repeats, repeats = self._shape
        example_list, example_answers = self._list(example_size, *example_repeats)
        example = TEMPLATES["cwe"].fill(example_list, example_answers).text
        context, answers = self._list(size, *repeats)
        before = f"{example} {_numbered(example_answers)}\n"
        return TEMPLATES["cwe"].fill(context, answers, before=before, data={"words": size})

    def _list(
        self, size: int, common_repeats: int, other_repeats: int
    ) -> tuple[str, tuple[str, ...]]:
        pool = self._words if size <= len(self._words) else self._english
        if size > len(pool):
            raise TaskError(
                f"cwe at {self.length} tokens tries lists of {size} words and wonderwords has {len(self._words)}: put "
                f"RULER's {ENGLISH_WORDS} into the data root, or lower task.lengths"
            )
        words = self.streams.python.sample(pool, size)
        common, others = words[:COMMON], words[COMMON:]
        listed = common * common_repeats + others * other_repeats
        self.streams.shuffle(listed)
        return _numbered(listed), tuple(common)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


class FrequentWords(Generator):
    """Make the prompts of RULER's fwe (frequent words): invented words whose frequencies fall with
    the square of their rank. The first rank is dots; the next three are asked for.

    The size of the haystack is searched as in the official script: with one vocabulary for the
    whole search, then a new one for each sample. RULER's other tasks draw anew at every try."""

    new_tokens = NEW_TOKENS["fwe"]

    def __init__(self, text: TextTools, streams: Streams, length: int) -> None:
        self._room = length - self.new_tokens
        super().__init__(text, streams, length, unit=self._room // 32)

    def minimum(self, index: int) -> int:
        return 80  # in words; ranks 2, 3, 4 then come 12, 5, 3 times and rank 5 once

    def probe(self, size: int, index: int) -> FilledTemplate:
        return self._coded(self._vocabulary(), size)

    def official(self, samples: int) -> list[FilledTemplate]:
        size = self._search()
        return [self._shrinking(size) for _ in range(samples)]

    def drawing(self, index: int) -> Callable[[int], FilledTemplate]:
        return partial(self._coded, self._vocabulary())

    def _search(self) -> int:
        """Return the number of words in the largest haystack whose prompt stays below the length,
        less the tokens kept free for the answer. It draws one vocabulary, however many sizes it
        tries, so later random draws do not depend on the result."""
        vocabulary = self._vocabulary()
        size = self._room // CODED_LETTERS
        while self.count(self._coded(vocabulary, size)) < self._room:
            size += self.unit
        return size - self.unit

    def _shrinking(self, size: int) -> FilledTemplate:
        """Draw one prompt of `size` words and make it smaller until it fits, with the same
        vocabulary throughout."""
        draw = self.drawing(0)
        while size >= self.minimum(0):
            prompt = self.noted(draw(size))
            if prompt is not None:
                return prompt
            size -= self.unit
        raise TooShort

    def _vocabulary(self) -> list[str]:
        size = self._room // 50
        words = [self.streams.letters(ascii_lowercase, CODED_LETTERS) for _ in range(size)]
        while len(set(words)) < size:
            words.append(self.streams.letters(ascii_lowercase, CODED_LETTERS))
        vocabulary = sorted(set(words))
        self.streams.shuffle(vocabulary)
        return ["...", *vocabulary[1:]]

    def _coded(self, vocabulary: Sequence[str], size: int) -> FilledTemplate:
        ranks = np.arange(1, len(vocabulary) + 1)
        repeats = (size * (ranks**-ALPHA) / ZETA).astype(int)
        words = np.repeat(vocabulary, repeats).tolist()
        self.streams.shuffle(words)
        return TEMPLATES["fwe"].fill(" ".join(words), tuple(vocabulary[1:4]), data={"words": size})
