"""How near the mean of a chunk of neighbouring keys is to each of them (ShadowKV, arXiv 2410.21465).

A chunk whose least similar key is far from its mean is an outlier: its mean says little about it. ShadowKV scores
chunks by their means and keeps the outliers exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from harness.observations.observation import Layer, Observation, rounded
from kernels.rope import unrotate
from methods.base import AttnInput, LayerSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 40  # of a cosine from -1 to 1


@dataclass(frozen=True, kw_only=True)
class ChunkCosines(Observation):
    title: ClassVar[str] = "Least cosine of a chunk's keys to their mean"
    options: ClassVar[Mapping[str, str]] = {
        "chunk": "tokens per chunk",
        "below": "a chunk is an outlier if its least cosine is smaller",
    }
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

    def of_layer(self, x: AttnInput, spec: LayerSpec) -> Layer:
        before = unrotate(x.k, x.cos, x.sin)
        return self._figures(x.k, "") | self._figures(before, "_before")

    def _figures(self, keys: Tensor, suffix: str) -> dict[str, object]:
        cosines = to_chunk_mean(keys[0].float(), self.chunk)  # [G C c]
        least = cosines.amin(-1).flatten()
        return {
            f"mean{suffix}": round(cosines.mean().item(), 5),
            f"least{suffix}": round(least.median().item(), 5),
            f"outliers{suffix}": round((least < self.below).float().mean().item(), 5),
            f"histogram{suffix}": rounded(least.cpu().histc(BINS, -1, 1) / len(least)),
        }

    def draw(self, layers: Sequence[Layer]) -> Figure:
        from harness.reports.pictures.figures import plain, side_by_side

        figure, panels = side_by_side(2)
        for axes, suffix, label in zip(
            panels, ("", "_before"), ("rotated keys", "keys before the rotation"), strict=True
        ):
            shares = [layer[f"histogram{suffix}"] for layer in layers]
            image = axes.imshow(shares, aspect="auto", cmap="Blues", extent=(-1, 1, len(layers) - 0.5, -0.5), vmin=0)
            axes.axvline(self.below, color="#bb5500", linewidth=0.9)
            axes.set_xticks([-1, -0.5, 0, 0.5, 1])
            axes.set(title=label, xlabel=f"least cosine of a chunk of {self.chunk} to its mean", ylabel="layer")
            figure.colorbar(image, ax=axes, label="share of the chunks")
            plain(axes)
        return figure


def to_chunk_mean(keys: Tensor, chunk: int) -> Tensor:
    """keys [G N D] -> the cosine of each key to the mean of its chunk [G C c]; an incomplete chunk is left out"""
    whole = keys.shape[1] // chunk
    chunks = keys[:, : whole * chunk].unflatten(1, (whole, chunk))
    return torch.cosine_similarity(chunks, chunks.mean(2, keepdim=True), dim=-1)
