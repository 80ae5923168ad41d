"""What a token of a whole model costs, from a model with some of its layers.

A step is attention and all else: weights that are read, above all. Each layer's attention is clocked. The rest is
divided between the layers and the head by the bytes of their weights. Layers that a method reads whole (`dense_layers`,
the first two of Quest) are here already, and the whole model has no more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from transformers import PreTrainedModel

from harness.bench.common.measure import estimate, ratios
from methods.base import AttnInput, KVLayer, Method


class AttentionClock:
    """Notes what every call of a layer's `decode` takes, on a device that computes while it is called: a CPU."""

    def __init__(self, layers: Sequence[KVLayer]) -> None:
        self.seconds: list[list[float]] = [[] for _ in layers]
        for layer, noted in zip(layers, self.seconds, strict=True):
            # by a weak reference: a layer that held itself would outlive its row, with gigabytes of keys and values
            vars(layer)["decode"] = partial(_clocked, ref(layer), noted)

    def taken(self) -> list[float] | None:
        """Return the mean of each layer's calls after the first, and forget them; None where no layer is clocked, or
        steps make no calls."""
        means = [fmean(noted[1:]) if len(noted) > 1 else None for noted in self.seconds]
        for noted in self.seconds:
            noted.clear()
        return None if not means or None in means else [mean for mean in means if mean is not None]


def _clocked(layer: ref[KVLayer], noted: list[float], x: AttnInput) -> Tensor:
    alive = layer()
    assert alive is not None, "it is its own attribute that is called"
    began = perf_counter()
    out = type(alive).decode(alive, x)
    noted.append(perf_counter() - began)
    return out


class WeightBytes(NamedTuple):
    """Counts the bytes of a model's weights that a step reads."""

    of_layers: int
    beside: int  # of the head and what else is in no layer

    @property
    def total(self) -> int:
        return self.of_layers + self.beside


def weights(model: PreTrainedModel) -> WeightBytes:
    """Return the bytes of weights that a step reads; of the embedding it reads a row, unless that is the head as
    well."""
    total = sum(x.nbytes for x in model.parameters())
    table, head = (next(m.parameters()) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    in_layers = sum(x.nbytes for x in model.get_decoder().layers.parameters())
    return WeightBytes(in_layers, total - in_layers - (0 if table is head else table.nbytes))


class Clocked(NamedTuple):
    """Holds the seconds of a step under `method`, and those of each layer's attention: None where none was clocked."""

    method: Method
    step_s: float
    attention_s: Sequence[float] | None


class WholeModel(NamedTuple):
    """Scales a step of a model with some of its layers to all `layers` of them."""

    layers: int
    weights: WeightBytes

    def parts_s(self, clocked: Clocked) -> tuple[float, float]:
        """Return the seconds of a step's attention, and of all else. A layer that is not here is as those are that the
        method does not read whole, in the mean. Where a method asks ahead, the last layer asks for none, so that no
        other is like it."""
        attention_s = clocked.attention_s
        assert attention_s is not None
        whole_layers: Sequence[int] = getattr(clocked.method, "dense_layers", ())
        chosen = [s for layer, s in enumerate(attention_s) if layer not in whole_layers]
        if clocked.method.asks_ahead and len(chosen) > 1:
            chosen = chosen[:-1]
        missing = self.layers - len(attention_s)
        rest = clocked.step_s - sum(attention_s)
        of_layers = rest * self.weights.of_layers / self.weights.total
        return (
            sum(attention_s) + missing * fmean(chosen or attention_s),
            rest + missing * of_layers / len(attention_s),
        )

    def beside(self, full: Sequence[Clocked], own: Sequence[Clocked]) -> dict[str, Any]:
        """Return for a row a step of all layers, what weights take of it, and Full's beside it. full, own: turns
        that ran one after the other, so that each is held against its neighbour."""
        if any(turn.attention_s is None for turn in (*full, *own)):
            return {"weights_share": None, "all_layers": {}}
        parts, full_parts = ([self.parts_s(turn) for turn in turns] for turns in (own, full))
        steps_s, full_s = (list(map(sum, of_turns)) for of_turns in (parts, full_parts))
        speedup = None if own[0].method == full[0].method else ratios(full_s, steps_s)
        weights_share = median(rest / (attention + rest) for attention, rest in parts)
        scaled = {"layers": self.layers, "tpot_s": estimate(steps_s), "speedup": speedup}
        return {"weights_share": weights_share, "all_layers": scaled}
