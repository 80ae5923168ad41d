"""Tells whether the weights of a model have changed: they may be loaded, converted or moved in
place, and adapters are attached and switched on and off."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

PIECE = 256  # bytes whose sum is weighted together


def parts(model: nn.Module) -> list[Any]:
    """Return which objects hold the model's weights, where they lie and in which dtype, and which
    adapters are on. If two such lists are equal, no weight was replaced, converted or moved in
    between; the contents are not read."""
    found: list[Any] = []
    for name, module in model.named_modules():
        own = [x for x in module._parameters.values() if x is not None]
        found += [(name, id(x), x.dtype, x.device) for x in own]
        if "base_layer" in module._modules:  # an adapter of peft around another module
            switches = ("active_adapters", "disable_adapters", "scaling")
            found.append((name, [str(getattr(module, switch, None)) for switch in switches]))
    return found


def checksum(model: nn.Module, more: Iterable[Tensor] = ()) -> str:
    """Return a hash of all weights of the model, which are read once for it, of which adapters are
    on, and of the tensors `more`. Any number that changes gives another one; numbers that change
    places do, too, unless they stay within the same `PIECE` bytes. Weights that a device holds elsewhere (meta tensors)
    count by their shape."""
    held = model.state_dict() | {str(number): x for number, x in enumerate(more)}
    sums = [(name, str(x.dtype), list(x.shape), _sum(x)) for name, x in held.items()]
    adapters = [part for part in parts(model) if len(part) == 2]
    return hashlib.sha256(json.dumps([sums, adapters]).encode()).hexdigest()


def _sum(x: Tensor) -> int:
    """Return the weighted sum of a tensor's bits, taken as integers of 64 bits."""
    if x.is_meta:
        return 0
    data = x.detach().contiguous().flatten().view(torch.uint8)
    if data.numel() % PIECE or data.storage_offset() % 8:
        data = nn.functional.pad(data, (0, -data.numel() % PIECE))
    count = data.numel() // PIECE
    sums = data.view(torch.int64).view(count, PIECE // 8).sum(1)
    return int((sums * torch.arange(1, 2 * count, 2, device=x.device)).sum())
