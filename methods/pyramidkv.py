"""PyramidKV: SnapKV with more of the budget in the lower layers (arXiv 2406.02069; amounts as in NVIDIA's kvpress).

The budgets fall in a straight line from the first layer to the last, which gets 1/beta of the mean; together they are
exactly num_layers times the budget. Where no such line fits between the window and the prompt, all get the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import ClassVar, Literal

from methods.base import Case, KVLayer, LayerSpec, Request
from methods.card import Card
from methods.snapkv import SnapKV, SnapLayer


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV's parameters and beta: how many times smaller than the mean the last layer's budget is."""

    card: ClassVar[Card | None] = Card(
        prefill="dense",
        rule="evicts, once at the seal: the tokens the last {window} queries give most weight stay, more in low layers",
        unit="token",
        group_rule="mean of the weights over the query heads of a group (select_per={select_per})",
        dense_layers="none",
        sinks="none",
        window="{window}",
        on_device="kept K and V, generated tokens",
        on_host="nothing",
        index_cost="weights of {window} queries at the seal, pooled over {kernel} tokens",
        budget="window and voted tokens, the mean over the layers; the last layer gets 1/{beta} of it",
        deviations="amounts as in kvpress; the layers' budgets add up to the last token",
    )

    beta: float = 20
    window: int = 64
    kernel: int = 5
    pooling: Literal["max", "avg"] = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(f"beta={self.beta} would turn the pyramid over: give at least 1, 20 in the paper.")

    def kept(self, case: Case) -> int:
        layers, index = case.spec.num_layers, case.spec.index
        return pyramid(case.budget, case.sealed, layers, self.window, self.beta)[index]

    def start(self, specs: Sequence[LayerSpec], request: Request) -> list[KVLayer]:
        return [PyramidLayer(spec, request, self) for spec in specs]


class PyramidLayer(SnapLayer):
    """Its own share of all layers' budgets."""

    method: PyramidKV

    def limit(self) -> int | None:
        tokens = super().limit()
        if tokens is None:
            return None
        layers = self.spec.num_layers
        return pyramid(tokens, self.seen, layers, self.method.window, self.method.beta)[self.spec.index]


def pyramid(tokens: int, sealed: int, layers: int, window: int, beta: float) -> list[int]:
    """Budgets of all layers, first to last, that add up to layers * tokens."""
    least = tokens / Fraction(beta)
    most = min(2 * tokens - least, Fraction(sealed - window))
    least = 2 * tokens - most
    if layers == 1 or not most >= least >= window:
        return [tokens] * layers
    step = (most - least) / (layers - 1)
    # exact sums of the first layers, rounded: so no layer is off by more than one, and the total by nothing
    sums = [floor(layer * most - step * (layer * (layer - 1) // 2) + Fraction(1, 2)) for layer in range(layers + 1)]
    return [upto - before for before, upto in pairwise(sums)]
