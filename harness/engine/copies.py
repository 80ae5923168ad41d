"""Copies a cache, so that several continuations begin with what it holds.

`copy.deepcopy` alone would copy what caches share, too, such as methods and threads, and let the
copied policies refer to the layers of the first cache."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn

from harness.engine.footprint import PLAIN, held_by
from methods.base import LayerSpec, Method, Request
from methods.base.state import Checks
from methods.layers import Layer
from methods.tiers.rows import Place
from methods.tiers.transfer import TransferEngine

_SHARED = (LayerSpec, Request, Method, TransferEngine, Checks, Place, nn.Module)


# copies of tensors could not be written to outside of inference mode
@torch.inference_mode(mode=False)
def copied_into(fresh: Any, cache: Any, memo: dict[int, Any]) -> None:
    """Give `fresh`, a cache without attributes, a copy of all that `cache` holds. Rows that are on
    their way are waited for. `memo`: that of `copy.deepcopy`."""
    memo[id(cache)] = fresh
    visited = set[int]()
    for held in vars(cache).values():
        _share(held, memo, visited)
    new = [layer for layer in cache.layers if id(layer) not in memo]
    weak = [proxy(layer) for layer in new]  # the one by which all policies of a layer refer to it
    for layer, reference in zip(new, weak, strict=True):
        own = memo[id(layer)] = object.__new__(type(layer))
        memo[id(reference)] = proxy(own)
    for layer in new:
        vars(memo[id(layer)]).update(deepcopy(vars(layer), memo))
    for layer in new:
        if isinstance(layer, Layer):
            memo[id(layer)].link([layer], {id(other): memo[id(other)] for other in cache.layers})
    vars(fresh).update(deepcopy(vars(cache), memo))


def _share(value: Any, memo: dict[int, Any], visited: set[int]) -> None:
    """Note in `memo` whatever is reachable from `value` and does not belong to one cache only."""
    if isinstance(value, _SHARED):
        memo[id(value)] = value
    elif not isinstance(value, (*PLAIN, Tensor)) and id(value) not in visited:
        visited.add(id(value))
        for inside in list(held_by(value, ())):
            _share(inside, memo, visited)
