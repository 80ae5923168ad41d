"""Measures keys before and after their rotation: how low their rank is, and how similar neighbouring keys are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from torch import Tensor

from harness.attention_statistics.observation import LINE, Figures, Observation, line_per_layer, rounded, spread
from kernels.rope import unrotate
from methods.base import AttnInput, LayerSpec

KINDS = {"before": "keys before the rotation", "after": "keys after the rotation", "values": "values"}
BINS = 40  # bins of a cosine from -1 to 1


@dataclass(frozen=True, kw_only=True)
class KeySpectrum(Observation):
    """Measure the singular values of a layer's keys before and after the rotation, and of its values (ShadowKV,
    arXiv 2410.21465).

    All KV heads of a layer are one matrix with a row per token, as ShadowKV factorises them: keys of nearly low
    rank can be stored as two thin factors. Reported are the error at a rank of `share` of the channels, and the
    rank that holds `energy`, a share of the squared singular values.
    """

    title: ClassVar[str] = "Singular values of keys and values, relative to the largest"
    columns: ClassVar[Mapping[str, str]] = {
        "rank_before": "rank for the energy, keys before",
        "rank_after": "keys after",
        "rank_values": "values",
        "error_before": "error at the share, keys before",
        "error_after": "keys after",
        "error_values": "values",
    }
    panels: ClassVar[int] = len(KINDS)

    share: float = 0.15625
    energy: float = 0.99

    def of_layer(self, x: AttnInput, spec: LayerSpec) -> Figures:
        figures: dict[str, Any] = {}
        for kind, rows in zip(KINDS, (unrotate(x.k, x.cos, x.sin), x.k, x.v), strict=True):
            spectrum = torch.linalg.svdvals(rows[0].transpose(0, 1).flatten(1).double())  # of [N G*D]
            squares, ranks = spectrum.square() / spectrum.square().sum(), spread(len(spectrum))
            lost = squares[max(1, round(self.share * len(spectrum))) :].sum()  # error of the best factors of that rank
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
            ranks, spectra = ([layer[key] for layer in layers] for key in ("ranks", kind))
            line_per_layer(axes, ranks, spectra, title=title, **axis)
            axes.axvline(self.share * layers[0]["channels"], color=LINE, linewidth=0.9)
        panels[0].set_ylabel("relative to the largest; a line per layer, darker: later")


@dataclass(frozen=True, kw_only=True)
class ChunkCosines(Observation):
    """Measure how similar the mean of a chunk of neighbouring keys is to each of them (ShadowKV, arXiv 2410.21465).

    A chunk whose least similar key has a cosine to its mean `below` a bound is an outlier: its mean says little
    about it. ShadowKV scores chunks by their means and keeps the outliers exactly.
    """

    title: ClassVar[str] = "Least cosine of a chunk's keys to their mean"
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
        cosines = to_chunk_mean(keys[0].float(), self.chunk)  # [G C c]
        least = cosines.amin(-1).flatten()
        return {
            f"mean{suffix}": round(cosines.mean().item(), 5),
            f"least{suffix}": round(least.median().item(), 5),
            f"outliers{suffix}": round((least < self.below).float().mean().item(), 5),
            f"histogram{suffix}": rounded(least.cpu().histc(BINS, -1, 1) / len(least)),
        }

    def paint(self, panels: Sequence[Axes], layers: Sequence[Figures]) -> None:
        axis = {"xlabel": f"least cosine of a chunk of {self.chunk} to its mean", "ylabel": "layer"}
        for axes, suffix, title in zip(panels, ("", "_before"), ("rotated keys", KINDS["before"]), strict=True):
            shares = [layer[f"histogram{suffix}"] for layer in layers]
            image = axes.imshow(shares, aspect="auto", cmap="Blues", extent=(-1, 1, len(layers) - 0.5, -0.5), vmin=0)
            axes.axvline(self.below, color=LINE, linewidth=0.9)
            axes.set(title=title, xticks=[-1, -0.5, 0, 0.5, 1], **axis)
            axes.figure.colorbar(image, ax=axes, label="share of the chunks")


def to_chunk_mean(keys: Tensor, chunk: int) -> Tensor:
    """Return the cosine of each key to the mean of its chunk, keys [G N D] -> [G C c]; an incomplete chunk is left
    out."""
    whole = keys.shape[1] // chunk
    chunks = keys[:, : whole * chunk].unflatten(1, (whole, chunk))
    return torch.cosine_similarity(chunks, chunks.mean(2, keepdim=True), dim=-1)
