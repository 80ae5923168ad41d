"""Says by a model's config which of its layers hold keys and values, and which keep a state instead or
beside them: linear attention, a state space or a short convolution, whose memory does not grow with
the text. Some layers borrow: they have queries of their own, and attend to the keys and values of an
earlier layer (Gemma 4 E2B).

A method serves layers with keys and values alone. A state is the model's own, as a sliding window is
(methods/layers/window.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# transformers' names for kinds of layers; a kind that is not named here attends to the whole text
SLIDING, WHOLE = "sliding_attention", "full_attention"
WINDOWED = {SLIDING, "hybrid_sliding"}
STATEFUL = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
WITHOUT_KEYS = {"linear_attention", "conv", "mlp", "moe"}


class LayerKinds(NamedTuple):
    """Name a model's layers by their place among all layers of the model, from 0."""

    attending: tuple[int, ...]  # layers with keys and values
    windows: tuple[int | None, ...]  # how many tokens each of these sees; None for all
    stateful: tuple[int, ...]  # layers with a state; some are in `attending` too (Falcon-H1)
    # (layer that borrows, place in `attending` of the layer that lends to it)
    borrowing: tuple[tuple[int, int], ...] = ()

    @property
    def sources(self) -> dict[int, int]:
        """Return, for each layer that attends, the place in `attending` of the layer whose keys and
        values it reads: its own, or that of the layer that lends to it."""
        return {layer: place for place, layer in enumerate(self.attending)} | dict(self.borrowing)

    @property
    def borrowers(self) -> tuple[int, ...]:
        """Return how many layers borrow from each of `attending`."""
        lenders = [lender for _, lender in self.borrowing]
        return tuple(map(lenders.count, range(len(self.attending))))


def layer_kinds(config: PreTrainedConfig) -> LayerKinds:
    """Return which layers of a model hold keys and values, and which keep a state, by its config."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    own = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    attending = {i: kind for i, kind in enumerate(kinds[:own]) if kind not in WITHOUT_KEYS}
    # the last layer of each kind lends to all that borrow; the probe sees whether it does
    lenders = {kind: place for place, kind in enumerate(attending.values())}
    return LayerKinds(
        tuple(attending),
        tuple(window if kind in WINDOWED else None for kind in attending.values()),
        tuple(i for i, kind in enumerate(kinds) if kind in STATEFUL),
        tuple((i, lenders[kinds[i]]) for i in range(own, len(kinds))),
    )
