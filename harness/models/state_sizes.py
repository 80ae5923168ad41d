"""Says by a model's config alone how large its states are (harness/models/layer_kinds.py): without
weights, it reads a few tokens into transformers' own cache, whose tensors then have a shape and a dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from harness.models.layer_kinds import layer_kinds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 8  # that are read; no state is larger after more


class StateSizes(NamedTuple):
    """Hold how many numbers the states of one sequence have."""

    in_dtype: int = 0  # of the run
    in_fp32: int = 0  # whatever the dtype of the run

    def nbytes(self, element_bytes: int) -> int:
        """Return their bytes in a run whose dtype takes `element_bytes` per number."""
        return self.in_dtype * element_bytes + self.in_fp32 * 4


NO_STATES = StateSizes()


def state_sizes(model: PreTrainedModel) -> StateSizes:
    """Return the sizes of the states of `model`, which lies on the meta device in 16 bits."""
    import torch
    from transformers import DynamicCache

    stateful = layer_kinds(model.config).stateful
    if not stateful:
        return NO_STATES
    cache: Any = DynamicCache(config=model.config)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    layers = [cache.layers[i] for i in stateful]
    states = [
        state
        for layer in layers
        for parts in (layer.conv_states, layer.recurrent_states)
        for state in parts.values()
        if state is not None
    ]
    counts = {dtype: 0 for dtype in (model.dtype, torch.float32)}
    for state in states:
        counts[state.dtype] += state.numel()
    return StateSizes(*counts.values())
