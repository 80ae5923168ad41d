"""Says by a model's config which of its layers hold keys and values, and which keep a state instead or
beside them: linear attention, a state space or a short convolution, whose memory does not grow with
the text.

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


def layer_kinds(config: PreTrainedConfig) -> LayerKinds:
    """Return which layers of a model hold keys and values, and which keep a state, by its config."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
    attending = {i: kind for i, kind in enumerate(kinds) if kind not in WITHOUT_KEYS}
    return LayerKinds(
        tuple(attending),
        tuple(window if kind in WINDOWED else None for kind in attending.values()),
        tuple(i for i, kind in enumerate(kinds) if kind in STATEFUL),
    )
