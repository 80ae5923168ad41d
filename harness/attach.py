"""`with attached(model, method, budget=0.2) as kv:` a model whose attention runs through a KV method.

with attached(model, PQCache(...), budget=0.2) as kv:
    cache = kv.cache(capacity=prompt.shape[1] + 64, auto_seal=True)
    model.generate(prompt, past_key_values=cache, max_new_tokens=64)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from harness.calibration import observer
from harness.hf import KVCache, layer_specs, routed
from methods.base import Method, Placement, Request
from methods.budget import Budget

_prepared: WeakKeyDictionary[PreTrainedModel, dict[Method, object]] = WeakKeyDictionary()


class Attachment:
    """Makes caches for the attached model."""

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        budget: float | Budget | None = None,
        placement: Placement = "device",
        calibration: Tensor | None = None,
        stale_by: int = 0,
    ) -> None:
        if placement == "host" and not method.offloads:
            raise ValueError(f"{type(method).__name__} keeps nothing on the host: use placement=device with it.")
        self.model = model
        self.method = method
        self.budget = _budget(budget) if method.uses_budget else None
        self.stale_by = stale_by
        self.placement: Placement = placement
        self.specs = layer_specs(model)
        self.prepared = self._prepare(calibration)

    def request(self, *, capacity: int, batch: int = 1) -> Request:
        return Request(
            batch=batch,
            capacity=capacity,
            dtype=self.model.dtype,
            device=self.model.device,
            budget=self.budget,
            stale_by=self.stale_by,
            placement=self.placement,
            prepared=self.prepared,
        )

    def cache(self, *, capacity: int, batch: int = 1, auto_seal: bool = False) -> KVCache:
        """A fresh cache for `batch` sequences of `capacity` tokens (prompt and new ones together) at most."""
        layers = self.method.start(self.specs, self.request(capacity=capacity, batch=batch))
        return KVCache(layers, capacity, auto_seal=auto_seal)

    def _prepare(self, calibration: Tensor | None) -> object:
        known = _prepared.setdefault(self.model, {})
        if self.method not in known:
            known[self.method] = self.method.prepare(self.specs, observer(self.model, self.specs, calibration))
        return known[self.method]


def _budget(asked: float | Budget | None) -> Budget | None:
    return Budget(asked) if isinstance(asked, (int, float)) else asked


@contextmanager
def attached(
    model: PreTrainedModel,
    method: Method,
    *,
    budget: float | Budget | None = None,
    placement: Placement = "device",
    calibration: Tensor | None = None,
    stale_by: int = 0,
) -> Iterator[Attachment]:
    """Attach `method` to `model` for the length of the block; the model is restored on leaving, whatever happens.

    `calibration`: token ids [1 S] of ordinary text, for methods that prepare themselves on some (InfiniGen).
    """
    attachment = Attachment(model, method, budget, placement, calibration, stale_by)
    with routed(model):
        yield attachment
