"""Asks to track variables, vt (RULER, arXiv:2404.06654): a chain of five assignments between lines
of noise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from string import ascii_uppercase

from evals.base import TextTools
from evals.ruler.fitting import Generator, TooShort
from evals.ruler.templates import NEW_TOKENS, NOISE, TEMPLATES, FilledTemplate
from evals.ruler.vocabulary import Streams

HOPS = 4
EXAMPLE_TOKENS = 500  # limits the worked example; its answer does not count
EXAMPLE_VALUE = "12345"


class _Chain(Generator):
    """Make prompts with one chain of variable assignments, hidden in `size` lines of noise, as in
    RULER's vt."""

    letters: int

    def minimum(self, index: int) -> int:
        return HOPS + 1  # the assignments stand on distinct lines

    def probe(self, size: int, index: int) -> FilledTemplate:
        names = [self.streams.letters(ascii_uppercase, self.letters) for _ in range(HOPS + 1)]
        while len(set(names)) <= HOPS:  # the official script breaks off here (once in 10^6 draws)
            names.append(self.streams.letters(ascii_uppercase, self.letters))
        names = list(dict.fromkeys(names))
        value = self.value()
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {name} = VAR {source} " for source, name in pairwise(names)]
        lines = [NOISE] * size
        places = sorted(self.streams.python.sample(range(size), len(chain)))
        for shift, (place, assignment) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + shift, assignment)
        context = "\n".join(lines).replace(". \n", ".\n")
        return TEMPLATES["vt"].fill(context, tuple(names), query=value, num_v=str(HOPS + 1))

    def value(self) -> str:
        return self.streams.value()


class _Example(_Chain):
    """Draw the worked example that stands before the task in RULER's vt: short names, a fixed
    value, never in a chat template of its own."""

    new_tokens = 0
    letters = 3
    chat = False

    def __init__(self, text: TextTools, streams: Streams) -> None:
        super().__init__(text, streams, EXAMPLE_TOKENS, unit=5)
        self.is_fine, self.unit = False, 5

    def draw(self, *, smallest: bool) -> FilledTemplate:
        """Draw the worked example, within its limit of tokens or with as few lines as possible
        (`smallest`). A tokenizer that needs more than the limit for five lines gets those; the
        official script never ends there."""
        if not smallest:
            try:
                return self.official(1)[0]
            except TooShort:
                pass
        return self.probe(self.minimum(0), 0)

    def value(self) -> str:
        return EXAMPLE_VALUE


class Tracing(_Chain):
    """Make the prompts of RULER's vt (variable tracking): a worked example, then the chain to
    track. The example stands inside the user turn, with new names and a new value in every sample.
    """

    new_tokens = NEW_TOKENS["vt"]
    letters = 5

    def __init__(self, text: TextTools, streams: Streams, length: int) -> None:
        super().__init__(text, streams, length, unit=10 if length >= 4096 else 5)
        example = _Example(text, streams).draw(smallest=self.is_fine)
        self._example = f"{example.text} {' '.join(example.references)}\n"

    @property
    def reserved(self) -> int:
        return self.new_tokens + self.text.count(self._example, chat=False)

    def sample(self, size: int, index: int) -> FilledTemplate:
        """Draw a prompt as the model is asked, with a new worked example. The chain is drawn before
        the example changes, as in the official script."""
        prompt, example = self.probe(size, index), self._example
        for name in example.split()[-HOPS - 1 :]:
            example = example.replace(name, self.streams.letters(ascii_uppercase, len(name)))
        example = example.replace(EXAMPLE_VALUE, self.streams.value())
        return replace(prompt, context=f"{example}\n{prompt.context}")
