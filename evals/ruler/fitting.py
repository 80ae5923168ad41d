"""Searches how large a haystack fits a length: RULER's own search, and a finer one for lengths that
it cannot fill."""

from __future__ import annotations

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
REDRAWS = 20  # draws at the smallest size, where the official scripts draw for ever


class TooShort(TaskError):
    """Report that not even the smallest haystack fits the length."""


class Generator(ABC):
    """Draw the prompts of one of RULER's tasks at one length. The size of a haystack counts words,
    lines or documents.

    Below `OFFICIAL_FROM` tokens sizes go in steps (the unit) of one, and every sample has a size of
    its own. From there on, units, random draws and their order are those of the official scripts.
    """

    new_tokens: ClassVar[int]
    chat = True  # whether prompts are counted inside the chat template

    def __init__(self, text: TextTools, streams: Streams, length: int, unit: int) -> None:
        self.text = text
        self.streams = streams
        self.length = length
        self.is_fine = length < OFFICIAL_FROM
        self.unit = 1 if self.is_fine else unit

    @property
    def first(self) -> int:
        """Return the size from which RULER's scripts estimate the tokens per unit."""
        return self.unit

    @property
    def reserved(self) -> int:
        """Return how many tokens RULER's scripts keep free beside what is counted."""
        return self.new_tokens

    @abstractmethod
    def probe(self, size: int, index: int) -> FilledTemplate:
        """Draw a new prompt with a haystack of `size`, as the search for a size counts it. `index`:
        the number of the sample."""

    def sample(self, size: int, index: int) -> FilledTemplate:
        """Draw a new prompt as the model is asked. By default it is what `probe` draws for the size
        search."""
        return self.probe(size, index)

    def drawing(self, index: int) -> Callable[[int], FilledTemplate]:
        """Return the function by which the finer generator draws a sample at the sizes that it tries."""
        return partial(self.sample, index=index)

    def minimum(self, index: int) -> int:
        """Return the smallest haystack with which a prompt still is the task. `index`: the number
        of the sample."""
        return 1

    def prompts(self, samples: int) -> list[FilledTemplate]:
        """Draw `samples` prompts that fit. Raises `TooShort` where none does."""
        return self.fine(samples) if self.is_fine else self.official(samples)

    def count(self, prompt: FilledTemplate) -> int:
        """Return the number of tokens of a prompt, asked with the longest of its questions."""
        return max(
            self.text.count(one.user, one.prefix, chat=self.chat) for one in prompt.questions
        )

    def largest(self, tokens_per_unit: float) -> int:
        """Return the largest haystack size that the search of RULER's scripts tries, where each
        word, line or document takes `tokens_per_unit` tokens."""
        return max(int(self.length / tokens_per_unit * 3), self.unit * 2)

    def official(self, samples: int) -> list[FilledTemplate]:
        """Draw `samples` prompts as RULER's scripts do: search one haystack size for all, then step
        down where a sample does not fit."""
        size = self.official_size()
        return [self.stepping_down(size, index) for index in range(samples)]

    def official_size(self) -> int:
        """Find one haystack size for all samples as RULER's scripts do, with the first question: the
        last that fitted in a binary search in which each try draws a new prompt."""
        limit, first = self.length - self.reserved, self.first
        best, low = self.unit, self.unit
        high = self.largest(self.count(self.probe(first, 0)) / first)
        while low <= high:
            middle = (low + high) // 2
            if self.count(self.probe(middle, 0)) <= limit:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def fine(self, samples: int) -> list[FilledTemplate]:
        """Draw `samples` prompts for a length below `OFFICIAL_FROM`: each has the largest haystack
        that fits."""
        size, prompts = self.minimum(0), []
        for index in range(samples):
            size, prompt = self.largest_prompt(size, self.drawing(index))
            prompts.append(prompt)
        return prompts

    def largest_prompt(
        self, start: int, draw: Callable[[int], FilledTemplate]
    ) -> tuple[int, FilledTemplate]:
        """Return the largest size at which a prompt drawn by `draw(size)` fits, and that prompt.
        The search gallops from `start`, then bisects."""
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
        """Return the prompt with its token count written into `data`, or None if it is too long."""
        tokens = self.count(prompt) + self.new_tokens
        return (
            replace(prompt, data={**prompt.data, "tokens": tokens})
            if tokens <= self.length
            else None
        )

    def stepping_down(self, size: int, index: int) -> FilledTemplate:
        """Draw prompts until one fits, each time with a haystack that is one unit smaller if
        possible, starting at `size`."""
        attempts = size // self.unit + REDRAWS
        for _ in range(attempts):
            prompt = self.noted(self.sample(size, index))
            if prompt is not None:
                return prompt
            if size > self.unit:
                size = max(size - self.unit, self.minimum(index))
        raise TooShort
