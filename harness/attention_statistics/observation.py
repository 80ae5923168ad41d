"""Defines an observation: figures of each layer, computed from its attention input on one prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from harness.reports.pictures.figures import plain, side_by_side
from kernels.sink_logits import softmax
from methods.base import AttnInput, LayerSpec

POINTS = 60
LINE = "#bb5500"  # colour of a threshold
Figures = Mapping[str, Any]  # figures of one layer: plain numbers and lists


class Observation(ABC):
    """Compute figures of each layer and draw them. Subclasses are frozen dataclasses; their fields are options of
    the command line."""

    title: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]  # figure -> its heading in the table that is printed
    panels: ClassVar[int] = 2

    @abstractmethod
    def of_layer(self, x: AttnInput, spec: LayerSpec) -> Figures:
        """Return the figures of one layer. x: a whole prompt, one sequence."""

    @abstractmethod
    def paint(self, panels: Sequence[Axes], layers: Sequence[Figures]) -> None:
        """Draw the figures of all layers into as many axes as the observation has panels."""

    def draw(self, layers: Sequence[Figures]) -> Figure:
        figure, panels = side_by_side(self.panels)
        self.paint(panels, layers)
        for axes in panels:
            plain(axes)
        return figure


def causal_weights(x: AttnInput, spec: LayerSpec, first: int, last: int) -> Tensor:
    """Return the attention weights [H T N] in fp32 of queries `first` up to `last` of a prompt, with later tokens
    at 0."""
    groups, tokens = x.k.shape[1], x.k.shape[2]
    q = x.q[0, :, first:last].unflatten(0, (groups, -1)).float()  # [G g T D]
    logits = q @ x.k[0].float().unsqueeze(1).transpose(-1, -2) * spec.scale
    positions = logits.new_tensor(range(tokens))
    hidden = positions > positions[first:last].unsqueeze(1)
    return softmax(logits.masked_fill(hidden, float("-inf"))[None], spec.sink_logits)[0].flatten(0, 1)


def line_per_layer(axes: Axes, x: Sequence[Sequence[float]], y: Sequence[Sequence[float]], **labels: Any) -> None:
    """Draw a line per layer, darker for later layers. `labels`: as `Axes.set` takes them."""
    for index, (across, up) in enumerate(zip(x, y, strict=True)):
        axes.plot(across, up, color=(0.1, 0.35, 0.7, 0.15 + 0.7 * index / max(1, len(x) - 1)), linewidth=0.9)
    axes.set(**labels)


def spread(last: int) -> list[int]:
    """Return the ranks from 1 to `last` at which a curve is stored, evenly spaced on a logarithmic axis."""
    return sorted({round(last ** (place / (POINTS - 1))) for place in range(POINTS)})


def rounded(values: Tensor, places: int = 5) -> list[float]:
    return [round(value, places) for value in values.double().tolist()]
