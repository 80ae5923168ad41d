"""Searches how large a haystack fits a length: RULER's own search, and a finer one for lengths that
it cannot fill."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from evals.base import TaskError, TextTools
from evals.ruler.templates import FilledTemplate
from evals.ruler.vocabulary import Streams

OFFICIAL_FROM = 1024  # tokens below which the official units are too coarse
SMALLEST = 512
MARGIN = 0.005  # share of the limit that random keys may add to or take from a haystack's tokens
MARGIN_TOKENS = 200  # the least margin
DOUBT = 0.15  # share of the tokens between a prompt and the nearest one counted
REDRAWS = 20  # draws at the smallest size, where the official scripts draw for ever


class FitCheck:
    """Say whether prompts hold at most `limit` tokens, and count only those near it.

    Prompts far off are judged by the nearest one that was counted. Every prompt draws from the
    random stream, so a wrong guess would change all that follows. `guesses_hold` therefore checks
    afterwards that each guess rests on a counted prompt: one that is shorter and yet too long, or
    longer and yet short enough. Prompts of a search differ in the size of their haystack alone, so
    that settles it. Where it fails, the caller restores the stream and searches with `guess=False`.
    """

    def __init__(self, count: Callable[[FilledTemplate], int], limit: int, *, guess: bool = True) -> None:
        self._count = count
        self._limit = limit
        self._guess = guess
        self._margin = max(MARGIN, MARGIN_TOKENS / max(limit, 1))
        self._counted: list[tuple[int, int]] = []  # characters, tokens
        self._guessed: list[tuple[int, bool]] = []  # characters, whether it was held to fit

    def tokens(self, prompt: FilledTemplate) -> int:
        """Count a prompt's tokens, and remember them for later guesses."""
        tokens = self._count(prompt)
        self._counted.append((len(prompt.text), tokens))
        return tokens

    def fits(self, prompt: FilledTemplate) -> bool:
        """Return whether a prompt fits, by a guess if that is safe, or else by counting."""
        guess = self._verdict(len(prompt.text)) if self._guess and self._counted else None
        if guess is None:
            return self.tokens(prompt) <= self._limit
        self._guessed.append((len(prompt.text), guess))
        return guess

    def guesses_hold(self) -> bool:
        """Return whether counted prompts confirm every guess."""
        shortest_over = min((size for size, tokens in self._counted if tokens > self._limit), default=float("inf"))
        longest_fit = max((size for size, tokens in self._counted if tokens <= self._limit), default=0)
        spread = 1 + self._margin
        return all(
            size * spread <= longest_fit if fits else size >= shortest_over * spread for size, fits in self._guessed
        )

    def _verdict(self, size: int) -> bool | None:
        """Return what the nearest counted prompt implies, or None if that is in doubt."""
        near_size, near_tokens = min(self._counted, key=lambda known: abs(known[0] - size))
        expected = near_tokens * size / near_size
        doubt = self._margin * self._limit + DOUBT * abs(expected - near_tokens)
        return None if abs(expected - self._limit) <= doubt else expected < self._limit


def bisect_size(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """Return the last size that fitted in the official binary search, or None if none did."""
    best = None
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


class TooShort(TaskError):
    """Report that not even the smallest haystack fits the length."""


class Generator(ABC):
    """Draw the prompts of one task at one length. The size of a haystack counts words, lines or
    documents.

    Below `OFFICIAL_FROM` tokens the unit is one, and every sample has a size of its own. From there
    on, units, random draws and their order are those of the official scripts."""

    new_tokens: ClassVar[int]
    chat: ClassVar[bool] = True  # whether prompts are counted inside the chat template

    def __init__(self, text: TextTools, streams: Streams, length: int, unit: int) -> None:
        self.text = text
        self.streams = streams
        self.length = length
        self.is_fine = length < OFFICIAL_FROM
        self.unit = 1 if self.is_fine else unit

    @abstractmethod
    def probe(self, size: int, index: int) -> FilledTemplate:
        """Draw a new prompt as the size search looks at it."""

    def sample(self, size: int, index: int) -> FilledTemplate:
        """Draw a new prompt as it is asked."""
        return self.probe(size, index)

    def minimum(self, index: int) -> int:
        """Return the size below which a prompt is no longer the task."""
        return 1

    def prompts(self, samples: int) -> list[FilledTemplate]:
        """Draw `samples` prompts that fit. Raises `TooShort` where none does."""
        return self.fine(samples) if self.is_fine else self.official(samples)

    def count(self, prompt: FilledTemplate) -> int:
        """Count the tokens of a prompt with the longest of its questions."""
        return max(self.text.count(one.user, one.prefix, chat=self.chat) for one in prompt.questions)

    def largest(self, tokens_per_unit: float) -> int:
        """Return the size up to which the official search goes."""
        return max(int(self.length / tokens_per_unit * 3), self.unit * 2)

    def official(self, samples: int) -> list[FilledTemplate]:
        """Draw prompts as the official scripts do: search one size, then step down where a sample
        does not fit it."""
        size = self.official_size(self.unit, reserved=self.new_tokens)
        return [self.stepping_down(size, index) for index in range(samples)]

    def official_size(self, first: int, reserved: int) -> int:
        """Find one size for all samples, with the first question; each probe is a new prompt."""
        check = FitCheck(self.count, self.length - reserved)
        largest = self.largest(check.tokens(self.probe(first, 0)) / first)
        state = self.streams.state()
        size = bisect_size(self.unit, largest, lambda size: check.fits(self.probe(size, 0)))
        if not check.guesses_hold():
            self.streams.restore(state)
            exact = FitCheck(self.count, self.length - reserved, guess=False)
            size = bisect_size(self.unit, largest, lambda size: exact.fits(self.probe(size, 0)))
        return size or self.unit

    def fine(self, samples: int) -> list[FilledTemplate]:
        """Draw prompts that are each as long as fits."""
        size, prompts = self.minimum(0), []
        for index in range(samples):
            size, prompt = self.largest_prompt(size, partial(self.sample, index=index))
            prompts.append(prompt)
        return prompts

    def largest_prompt(self, start: int, draw: Callable[[int], FilledTemplate]) -> tuple[int, FilledTemplate]:
        """Return the largest size that fits and the prompt drawn with it. The search gallops from
        `start`, then bisects."""
        low, high = self.minimum(0) - 1, self.length + 1  # a unit has at least one token
        best, size, step = None, start, 1
        while high - low > 1:
            prompt = self.noted(draw(size))
            if prompt is None:
                high = size
            else:
                best, low = prompt, size
            if best is not None and high <= self.length:
                size = (low + high) // 2
            else:
                size = min(max(high - step if best is None else low + step, low + 1), high - 1)
            step *= 2
        if best is None:
            raise TooShort
        return low, best

    def noted(self, prompt: FilledTemplate) -> FilledTemplate | None:
        """Return the prompt with its token count noted, or None if it is too long."""
        tokens = self.count(prompt) + self.new_tokens
        return replace(prompt, data={**prompt.data, "tokens": tokens}) if tokens <= self.length else None

    def smallest(self, index: int) -> FilledTemplate:
        """Draw a new sample of the smallest size that a search would end with."""
        return self.sample(max(self.unit, self.minimum(index)), index)

    def smallest_length(self, samples: int) -> int:
        """Return the tokens at which the smallest prompts fit, with 3 % to spare for other random
        draws."""
        needed = max(self.count(self.smallest(index)) for index in range(samples)) + self.new_tokens
        return max(SMALLEST, math.ceil(needed * 1.03 / 32) * 32)

    def stepping_down(self, size: int, index: int) -> FilledTemplate:
        """Draw again until the prompt fits, each time one unit smaller if possible."""
        attempts = size // self.unit + REDRAWS
        for _ in range(attempts):
            prompt = self.noted(self.sample(size, index))
            if prompt is not None:
                return prompt
            if size > self.unit:
                size = max(size - self.unit, self.minimum(index))
        raise TooShort
