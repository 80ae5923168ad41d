"""PyramidKV: evicts as SnapKV does, with more of the budget in the lower layers (arXiv 2406.02069).

The rule: as in the authors' scripts, the window is kept in every layer, and what the budget holds
beyond it forms the pyramid: these amounts fall in a straight line from the first layer to the last,
which gets 1/beta of their mean. Together the layers keep exactly num_layers times the budget. Where
more than half of the prompt would be voted for, all layers get the same, in the released code and
here. Votes come from 8 queries, as in the authors' scripts, while SnapKV takes 32: the two methods
differ in more than the pyramid.

The released code rounds down, and so keeps more the higher a layer is: in 30 layers 18 % more than a
budget of 65 tokens and 4 % more than one of 263. `rounding=released` does the same."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import Literal

from methods.base import LayerWorkload
from methods.snapkv import SnapKeep, SnapKV


class PyramidKeep(SnapKeep, capturable=True, of_each={"last": None}):
    """Evict tokens as SnapKV does, with a number of kept tokens of the layer's own: lower layers
    keep more."""

    method: PyramidKV

    def size(self, budget: int) -> int:
        asked = budget, self.layer.seen, self.spec.num_layers
        self.layer.fallback = self.method.uniform(*asked)
        return self.method.layer_budgets(*asked)[self.spec.index]


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """Define PyramidKV, which evicts as SnapKV does and keeps more tokens in lower layers, by its
    parameters: SnapKV's and two more. `beta`: how many times fewer tokens, besides its window, the
    last layer keeps than the mean layer. `rounding`: whether the layers' numbers add up to the
    budget (exact) or are the authors' whole numbers (released)."""

    policies = (PyramidKeep,)
    tunable = {**SnapKV.tunable, "beta": (5, 10, 20, 40)}

    beta: float = 20
    window: int = 8
    rounding: Literal["exact", "released"] = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(
                f"beta={self.beta} would turn the pyramid upside down: give at least 1, 20 in the paper."
            )

    def kept(self, case: LayerWorkload) -> int:
        return self.layer_budgets(case.budget, case.sealed, case.spec.num_layers)[case.spec.index]

    def uniform(self, tokens: int, sealed: int, layers: int) -> str | None:
        """Return why all layers keep the same number of tokens under a budget of `tokens` of
        `sealed` prompt tokens, or None if they form a pyramid."""
        if layers == 1:
            return "a single layer leaves nothing to distribute"
        if 2 * (tokens - self.window) > sealed:
            return (
                "more than half of the prompt is kept, so every layer keeps as much, as SnapKV does"
            )
        return None

    def layer_budgets(self, tokens: int, sealed: int, layers: int) -> list[int]:
        """Return how many of `sealed` prompt tokens each layer keeps, first layer to last: together
        layers * `tokens`, or more with rounding=released."""
        if self.uniform(tokens, sealed, layers):
            return [tokens] * layers
        line = pyramid if self.rounding == "exact" else released_pyramid
        voted = line(tokens - self.window, sealed - self.window, layers, self.beta)
        return [self.window + share for share in voted]


def pyramid(mean: int, most: int, layers: int, beta: float) -> list[int]:
    """Return one whole number per layer on a falling straight line, that add up to layers * mean;
    the last is about mean / beta, or more where `most` limits the first. mean must not exceed
    `most`."""
    last = mean / Fraction(beta)
    first = min(2 * mean - last, Fraction(most))
    step = 2 * (first - mean) / (layers - 1)
    # The exact sums of the first layers are rounded, so no layer is off by more than one, and the total by nothing.
    sums = [
        floor(layer * first - step * (layer * (layer - 1) // 2) + Fraction(1, 2))
        for layer in range(layers + 1)
    ]
    return [upto - before for before, upto in pairwise(sums)]


def released_pyramid(mean: int, most: int, layers: int, beta: float) -> list[int]:
    """Return the authors' whole numbers for the line of `pyramid`: its end and its step are rounded
    down, so the sum may be larger than layers * mean."""
    last = int(mean // beta)
    first = min(2 * mean - last, most)
    step = (first - (2 * mean - first)) // (layers - 1)
    return [first - layer * step for layer in range(layers)]
