"""Makes observations: figures of each layer, computed from its attention input on one prompt, with a picture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from harness.reports.pictures.figures import Look, panels
from kernels.rope import unrotate
from kernels.sink_logits import softmax
from methods.base import AttnInput, LayerSpec

LOOK = Look(width=None, font=9)
POINTS = 60
LINE = "#bb5500"  # colour of a threshold
Figures = Mapping[str, Any]  # figures of one layer: plain numbers and lists
KINDS = {
    "before": "keys before the rotation",
    "after": "keys after the rotation",
    "values": "values",
}
BINS = 40  # bins of a cosine from -1 to 1
MASS_SHARES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of the tokens
HITTER_SHARES = tuple(place / 20 for place in range(1, 21))
AT_ONCE = 256  # queries at a time, because their weights take heads x queries x tokens


class Observation(ABC):
    """Compute numbers that describe the attention of each layer (its figures), and draw them.
    Subclasses are frozen dataclasses; their fields are options of the command line."""

    title: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]  # figure -> its heading in the table that is printed
    panels: ClassVar[int] = 2

    @abstractmethod
    def of_layer(self, x: AttnInput, spec: LayerSpec) -> Figures:
        """Return the figures of one layer, numbers and lists by name. x: its attention input for a
        whole prompt of one sequence."""

    @abstractmethod
    def paint(self, panels: Sequence[Axes], layers: Sequence[Figures]) -> None:
        """Draw the figures of all layers into as many axes as the observation has panels."""

    def draw(self, layers: Sequence[Figures]) -> Figure:
        figure, axes, *_ = panels(self.panels, LOOK, 4.6, 3.1)
        self.paint(axes, layers)
        return figure


def causal_weights(x: AttnInput, spec: LayerSpec, first: int, last: int) -> Tensor:
    """Return the attention weights [H T N] in fp32 of queries `first` up to `last` of a prompt, with later tokens
    at 0."""
    groups, tokens = x.k.shape[1], x.k.shape[2]
    q = x.q[0, :, first:last].unflatten(0, (groups, -1)).float()  # [G g T D]
    logits = q @ x.k[0].float().unsqueeze(1).transpose(-1, -2) * spec.scale
    positions = logits.new_tensor(range(tokens))
    hidden = positions > positions[first:last].unsqueeze(1)
    return softmax(logits.masked_fill(hidden, float("-inf"))[None], spec.sink_logits)[0].flatten(
        0, 1
    )


def line_per_layer(
    axes: Axes, layers: Sequence[Figures], curve: tuple[str, str], **labels: Any
) -> None:
    """Draw a line per layer, darker for later layers. `curve`: the names of its figures across and
    up; `labels`: as `Axes.set` takes them."""
    for index, layer in enumerate(layers):
        opacity = 0.15 + 0.7 * index / max(1, len(layers) - 1)
        across, up = (layer[name] for name in curve)
        axes.plot(across, up, color=(0.1, 0.35, 0.7, opacity), linewidth=0.9)
    axes.set(**labels)


def spread(last: int) -> list[int]:
    """Return the ranks from 1 to `last` at which a curve is stored, evenly spaced on a logarithmic axis."""
    return sorted({round(last ** (place / (POINTS - 1))) for place in range(POINTS)})


def rounded(values: Tensor, places: int = 5) -> list[float]:
    return [round(value, places) for value in values.double().tolist()]


@dataclass(frozen=True, kw_only=True)
class KeySpectrum(Observation):
    """Measure the singular values of a layer's keys before and after the rotation, and of its values (ShadowKV,
    arXiv 2410.21465).

    All KV heads of a layer are one matrix with a row per token, as ShadowKV factorises them: keys of nearly low
    rank can be stored as two thin factors. Reported are the error at a rank of `share` of the channels, and the
    rank that holds `energy`, a share of the squared singular values.
    """

    title = "Singular values of keys and values, relative to the largest"
    columns: ClassVar[Mapping[str, str]] = {
        "rank_before": "rank for the energy, keys before",
        "rank_after": "keys after",
        "rank_values": "values",
        "error_before": "error at the share, keys before",
        "error_after": "keys after",
        "error_values": "values",
    }
    panels = len(KINDS)

    share: float = 0.15625
    energy: float = 0.99

    def of_layer(self, x: AttnInput, spec: LayerSpec) -> Figures:
        figures: dict[str, Any] = {}
        for kind, rows in zip(KINDS, (unrotate(x.k, x.cos, x.sin), x.k, x.v), strict=True):
            matrix = rows[0].transpose(0, 1).flatten(1)  # [N G*D]
            spectrum = torch.linalg.svdvals(matrix.double())
            squares = spectrum.square()
            squares /= squares.sum()
            ranks = spread(len(spectrum))
            rank = max(1, round(self.share * len(spectrum)))
            lost = squares[rank:].sum()  # error of the best factors of that rank
            figures |= {
                f"rank_{kind}": int((squares.cumsum(0) < self.energy).sum()) + 1,
                f"error_{kind}": round(lost.sqrt().item(), 5),
                kind: rounded(spectrum[[rank - 1 for rank in ranks]] / spectrum[0]),
            }
        return figures | {"ranks": ranks, "channels": len(spectrum)}

    def paint(self, panels: Sequence[Axes], layers: Sequence[Figures]) -> None:
        axis = {"xscale": "log", "yscale": "log", "ylim": (1e-4, 1.2)}
        axis |= {"xlabel": "number of the singular value (line: the rank kept)"}
        for axes, (kind, title) in zip(panels, KINDS.items(), strict=True):
            line_per_layer(axes, layers, ("ranks", kind), title=title, **axis)
            axes.axvline(self.share * layers[0]["channels"], color=LINE, linewidth=0.9)
        panels[0].set_ylabel("relative to the largest; a line per layer, darker: later")


@dataclass(frozen=True, kw_only=True)
class ChunkCosines(Observation):
    """Measure how similar the mean of a chunk of neighbouring keys is to each of them (ShadowKV, arXiv 2410.21465).

    A chunk whose least similar key has a cosine to its mean `below` a bound is an outlier: its mean says little
    about it. ShadowKV scores chunks by their means and keeps the outliers exactly.
    """

    title = "Least cosine of a chunk's keys to their mean"
    columns: ClassVar[Mapping[str, str]] = {
        "mean": "mean cosine, rotated keys",
        "least": "median of the least",
        "outliers": "outliers (share)",
        "mean_before": "mean cosine before the rotation",
        "least_before": "median of the least",
        "outliers_before": "outliers (share)",
    }

    chunk: int = 8
    below: float = 0.5

    def of_layer(self, x: AttnInput, spec: LayerSpec) -> Figures:
        before = unrotate(x.k, x.cos, x.sin)
        return self._figures(x.k, "") | self._figures(before, "_before")

    def _figures(self, keys: Tensor, suffix: str) -> dict[str, Any]:
        whole = keys.shape[2] // self.chunk  # an incomplete chunk is left out
        rows = keys[0, :, : whole * self.chunk].float().unflatten(1, (whole, self.chunk))
        cosines = torch.cosine_similarity(rows, rows.mean(2, keepdim=True), dim=-1)  # [G C c]
        least = cosines.amin(-1).flatten()
        outliers = least < self.below
        histogram = least.cpu().histc(BINS, -1, 1)
        return {
            f"mean{suffix}": round(cosines.mean().item(), 5),
            f"least{suffix}": round(least.median().item(), 5),
            f"outliers{suffix}": round(outliers.float().mean().item(), 5),
            f"histogram{suffix}": rounded(histogram / len(least)),
        }

    def paint(self, panels: Sequence[Axes], layers: Sequence[Figures]) -> None:
        axis = {"xlabel": f"least cosine of a chunk of {self.chunk} to its mean", "ylabel": "layer"}
        extent = (-1, 1, len(layers) - 0.5, -0.5)
        titles = {"": "rotated keys", "_before": KINDS["before"]}
        for axes, (suffix, title) in zip(panels, titles.items(), strict=True):
            shares = [layer[f"histogram{suffix}"] for layer in layers]
            image = axes.imshow(shares, aspect="auto", cmap="Blues", extent=extent, vmin=0)
            axes.axvline(self.below, color=LINE, linewidth=0.9)
            axes.set(title=title, xticks=[-1, -0.5, 0, 0.5, 1], **axis)
            axes.figure.colorbar(image, ax=axes, label="share of the chunks")


@dataclass(frozen=True, kw_only=True)
class AttentionMass(Observation):
    """Measure how few tokens hold how much of the attention weight (PQCache, arXiv 2407.12820, figure 5).

    For the prompt's last `queries`, per query head: the weights in falling order, and how much the largest shares
    of the tokens hold together.
    """

    title = "Attention weight on the tokens with the largest weights"
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
        # [N], over heads and queries
        falling = weights.sort(-1, descending=True).values.mean((0, 1))
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
        axis |= {"title": "falling weights; a line per layer, darker: later"}
        line_per_layer(curves, layers, ("ranks", "falling"), **axis)
        axis = {
            "xlabel": "tokens with the largest weights (%)",
            "ylabel": "attention weight on them (%)",
        }
        paint_shares(shares, layers, MASS_SHARES, xscale="log", **axis)


@dataclass(frozen=True, kw_only=True)
class HeavyHitters(Observation):
    """Measure how sparse attention is per layer, and how unevenly it accumulates on tokens (H2O, arXiv 2306.14048).

    A weight counts as zero if it is below `zero` of its row's largest. A token's accumulated weight is its column
    sum over all queries, the score by which H2O keeps heavy hitters.
    """

    title = "Attention sparsity, and the weight that heavy hitters accumulate"
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
        small = seen = 0
        for first in range(0, tokens, AT_ONCE):
            weights = causal_weights(x, spec, first, min(first + AT_ONCE, tokens))
            visible = torch.ones_like(weights, dtype=torch.bool).tril(first)
            bound = self.zero * weights.amax(-1, keepdim=True)
            small += int(((weights < bound) & visible).sum())
            seen += int(visible.sum())
            received += weights.sum(1)
        shares = received.sort(-1, descending=True).values / received.sum(-1, keepdim=True)
        return {"sparsity": round(small / seen, 5), **mass_of_top(shares.mean(0), HITTER_SHARES)}

    def paint(self, panels: Sequence[Axes], layers: Sequence[Figures]) -> None:
        bars, curves = panels
        sparsity = [100 * layer["sparsity"] for layer in layers]
        bars.bar(range(len(layers)), sparsity, color="#1a59b3")
        bars.set(
            xlabel="layer",
            ylabel=f"weights below {self.zero:g} of their row's largest (%)",
            ylim=(0, 100),
        )
        axis = {
            "xlabel": "tokens with the most weight (%)",
            "ylabel": "accumulated weight on them (%)",
        }
        paint_shares(curves, layers, HITTER_SHARES, title="a line per layer, darker: later", **axis)


def mass_of_top(falling: Tensor, shares: Sequence[float]) -> dict[str, float]:
    """Return, for each share of the tokens, the sum of so many of the largest weights. `falling`
    [N]: weights that add up to 1, in falling order. Each share has at least one token."""
    counts = [max(1, int(share * len(falling))) for share in shares]
    tops = falling.double().cumsum(0)[[count - 1 for count in counts]]
    return {f"top_{share:g}": top for share, top in zip(shares, rounded(tops), strict=True)}


def paint_shares(
    axes: Axes, layers: Sequence[Figures], shares: Sequence[float], **labels: Any
) -> None:
    across = [100 * share for share in shares]
    curves = [
        {"across": across, "up": [100 * layer[f"top_{share:g}"] for share in shares]}
        for layer in layers
    ]
    line_per_layer(axes, curves, ("across", "up"), ylim=(0, 100), **labels)
