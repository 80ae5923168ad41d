"""Measures attention weights: how few tokens hold most of them, for a prompt's last queries and over all queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from torch import Tensor

from harness.attention_statistics.observation import (
    Figures,
    Observation,
    causal_weights,
    line_per_layer,
    rounded,
    spread,
)
from methods.base import AttnInput, LayerSpec

MASS_SHARES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of the tokens
HITTER_SHARES = tuple(place / 20 for place in range(1, 21))
AT_ONCE = 256  # queries at a time, because their weights take heads x queries x tokens


@dataclass(frozen=True, kw_only=True)
class AttentionMass(Observation):
    """Measure how few tokens hold how much of the attention weight (PQCache, arXiv 2407.12820, figure 5).

    For the prompt's last `queries`, per query head: the weights in falling order, and how much the largest shares
    of the tokens hold together.
    """

    title: ClassVar[str] = "Attention weight on the tokens with the largest weights"
    columns: ClassVar[Mapping[str, str]] = {
        "top_0.01": "weight on the top 1 %",
        "top_0.05": "5 %",
        "top_0.1": "10 %",
        "top_0.2": "20 %",
        "first": "on the first token",
    }

    queries: int = 64

    def of_layer(self, x: AttnInput, spec: LayerSpec) -> Figures:
        tokens = x.k.shape[2]
        weights = causal_weights(x, spec, max(0, tokens - self.queries), tokens)
        falling = weights.sort(-1, descending=True).values.mean((0, 1))  # [N], over heads and queries
        ranks = spread(tokens)
        return {
            **mass_of_top(falling, MASS_SHARES),
            "first": round(weights[..., 0].mean().item(), 5),
            "ranks": ranks,
            "falling": rounded(falling[[rank - 1 for rank in ranks]], 9),
        }

    def paint(self, panels: Sequence[Axes], layers: Sequence[Figures]) -> None:
        curves, shares = panels
        axis = {"xscale": "log", "yscale": "log", "xlabel": "rank of the token"}
        axis |= {"ylabel": "attention weight, mean over heads and queries"}
        ranks, falling = ([layer[key] for layer in layers] for key in ("ranks", "falling"))
        line_per_layer(curves, ranks, falling, title="falling weights; a line per layer, darker: later", **axis)
        axis = {"xlabel": "tokens with the largest weights (%)", "ylabel": "attention weight on them (%)"}
        paint_shares(shares, layers, MASS_SHARES, xscale="log", **axis)


@dataclass(frozen=True, kw_only=True)
class HeavyHitters(Observation):
    """Measure how sparse attention is per layer, and how unevenly it accumulates on tokens (H2O, arXiv 2306.14048).

    A weight counts as zero if it is below `zero` of its row's largest. A token's accumulated weight is its column
    sum over all queries, the score by which H2O keeps heavy hitters.
    """

    title: ClassVar[str] = "Attention sparsity, and the weight that heavy hitters accumulate"
    columns: ClassVar[Mapping[str, str]] = {
        "sparsity": "weights near zero (share)",
        "top_0.05": "accumulated weight of the top 5 %",
        "top_0.2": "20 %",
        "top_0.5": "50 %",
    }

    zero: float = 0.01

    def of_layer(self, x: AttnInput, spec: LayerSpec) -> Figures:
        tokens = x.k.shape[2]
        received = x.q.new_zeros(x.q.shape[1], tokens, dtype=torch.float32)  # [H N]
        small, seen = 0, 0
        for first in range(0, tokens, AT_ONCE):
            weights = causal_weights(x, spec, first, min(first + AT_ONCE, tokens))
            visible = torch.ones_like(weights, dtype=torch.bool).tril(first)
            small += int(((weights < self.zero * weights.amax(-1, keepdim=True)) & visible).sum())
            seen += int(visible.sum())
            received += weights.sum(1)
        falling = (received.sort(-1, descending=True).values / received.sum(-1, keepdim=True)).mean(0)
        return {"sparsity": round(small / seen, 5), **mass_of_top(falling, HITTER_SHARES)}

    def paint(self, panels: Sequence[Axes], layers: Sequence[Figures]) -> None:
        bars, curves = panels
        bars.bar(range(len(layers)), [100 * layer["sparsity"] for layer in layers], color="#1a59b3")
        bars.set(xlabel="layer", ylabel=f"weights below {self.zero:g} of their row's largest (%)", ylim=(0, 100))
        axis = {"xlabel": "tokens with the most weight (%)", "ylabel": "accumulated weight on them (%)"}
        paint_shares(curves, layers, HITTER_SHARES, title="a line per layer, darker: later", **axis)


def mass_of_top(falling: Tensor, shares: Sequence[float]) -> dict[str, float]:
    """Return how much of the sorted weights [N] the first shares of them hold; each share has at least one token."""
    tops = falling.double().cumsum(0)[[max(1, int(share * len(falling))) - 1 for share in shares]]
    return {f"top_{share:g}": top for share, top in zip(shares, rounded(tops), strict=True)}


def paint_shares(axes: Axes, layers: Sequence[Figures], shares: Sequence[float], **labels: Any) -> None:
    percents = [[100 * layer[f"top_{share:g}"] for share in shares] for layer in layers]
    line_per_layer(axes, [[100 * share for share in shares]] * len(layers), percents, ylim=(0, 100), **labels)
