"""Says by a model's config alone how large its states are (harness/models/layer_kinds.py), and what a
prompt takes in the modules that keep them.

Without weights, the model reads tokens into transformers' own cache. All tensors then lie on torch's
meta device, where they have a shape and a dtype and no contents, so that their bytes can be added up."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.models.layer_kinds import layer_kinds
from harness.models.state_modules import state_modules

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOKENS = 8  # that are read; no state is larger after more
LONG = 512  # tokens by which two prompts differ, of which each is longer than a chunk of any family


class StateSizes(NamedTuple):
    """Hold how many numbers the states of one sequence have, and what makes them."""

    in_dtype: int = 0  # of the run
    in_fp32: int = 0  # whatever the dtype of the run
    # what a module holds at a time for each token of a prompt: the bytes in 16 bits and in fp32
    reading: tuple[int, int] = (0, 0)

    def nbytes(self, element_bytes: int) -> int:
        """Return their bytes in a run whose dtype takes `element_bytes` per number."""
        return self.in_dtype * element_bytes + self.in_fp32 * 4

    def reading_bytes(self, element_bytes: int) -> int:
        """Return the most bytes that a module with a state holds at a time for each token of a
        prompt."""
        return self.reading[element_bytes == 4]


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
    states = [
        state
        for layer in stateful
        for parts in (cache.layers[layer].conv_states, cache.layers[layer].recurrent_states)
        for state in parts.values()
        if state is not None
    ]
    counts = dict.fromkeys((model.dtype, torch.float32), 0)
    for state in states:
        counts[state.dtype] += state.numel()
    reading = _reading(model, torch.bfloat16), _reading(model, torch.float32)
    return StateSizes(counts[model.dtype], counts[torch.float32], reading)


def _reading(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Return the most bytes that the first module with a state holds at a time for each token of a
    prompt."""
    import torch
    from transformers import DynamicCache

    found = state_modules(model)[0]
    module, peaks = deepcopy(found.module).to(dtype), []
    for tokens in (LONG, 2 * LONG):
        shape = 1, tokens, model.config.hidden_size
        hidden = torch.empty(shape, dtype=dtype, device="meta")
        with torch.no_grad(), _alive() as counted:
            module(hidden, **{found.cache: DynamicCache(config=model.config)})
        peaks.append(counted.peak)
    return (peaks[1] - peaks[0]) // LONG


def _alive() -> Any:
    """Return a context that counts the most bytes (`peak`) of the tensors that are made inside and
    alive at a time."""
    from weakref import WeakSet, finalize

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Alive(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.peak = 0
            self.known: WeakSet[torch.UntypedStorage] = WeakSet()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in tree_iter(out):
                if isinstance(x, torch.Tensor):
                    self.count(x.untyped_storage())
            return out

        def count(self, storage: torch.UntypedStorage) -> None:
            if storage in self.known:
                return
            self.known.add(storage)
            self.now += (size := storage.nbytes())
            self.peak = max(self.peak, self.now)
            finalize(storage, self.free, size)

        def free(self, size: int) -> None:
            self.now -= size

    return Alive()
