"""Measures what a method holds, moves and reads, beside what its formula says."""

from __future__ import annotations

from typing import Any

import torch

from harness.checks.trial import Trial
from harness.engine.footprint import footprint
from harness.engine.trace import Tracer
from methods.base import Budget, Cost, LayerWorkload
from methods.tiers.tier import DEVICE

RESERVE = 3  # tokens that there is room for after the prompt


@torch.inference_mode()
def measured(
    trial: Trial, length: int, budget: Budget, placement: str = DEVICE, codec: Any = None
) -> tuple[Cost, Cost, bool]:
    """Return the cost of all layers after the first step that follows a prompt of `length` tokens,
    as it is measured and by the method's formula, and whether query heads choose for themselves, so
    that the formula can only estimate what a step moves and reads. Bytes that no layer and no
    operation tells of are not read, as far as is measured."""
    ids, method, itemsize = trial.prompt(length), trial.method, trial.model.dtype.itemsize
    with trial.attach(budget, placement=placement, codec=codec) as kv:
        cache = kv.cache(capacity=length + RESERVE)
        output = kv.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.seal()
        before, tracer = cache.traffic.total_bytes, Tracer(ids.device)
        with tracer.step(cache):
            kv.model(output.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
        held = footprint(cache.layers)
        moved = cache.traffic.settle().total_bytes - before
        layers: list[Any] = cache.method_layers
        generated = sum(
            layer.attended.generated
            * layer.spec.row_channels
            * itemsize
            * layer.heads
            * (1 + layer.spec.borrowers)
            for layer in layers
        )
        read = round((tracer.bytes_read(cache) or generated) - generated)
        real = Cost(held.pop(DEVICE), moved, held, read)
        said = Cost()
        for spec in kv.specs:
            tokens, prunes = budget.tokens(length, spec.index), budget.prunes(spec.index)
            said += method.cost(
                LayerWorkload(spec, length, tokens, placement, itemsize, RESERVE, codec, prunes)
            ).read_by(1 + spec.borrowers)
        by_query_head = any(layer.union_excess() is not None for layer in layers)
    return real, said, by_query_head
