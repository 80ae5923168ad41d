"""Values with fewer channels than keys, and values that are channels of keys and stored with them once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from harness.engine.footprint import footprint
from methods.base import CacheState, KVLayer, Method
from methods.kivi import Kivi
from methods.tiers.tier import DEVICE
from tests.methods.synthetic import Sequences, Shape, rope
from tests.methods.test_contract import NAMES, small

SHAPE, WIDTH, SEALED, LENGTH = Shape(6, 2, 64, batch=2), 48, 85, 92
DRIVEN = [name for name in NAMES if name != "kvpress" and not small(name).calibration_tokens]
DRIVEN = [name for name in DRIVEN if not isinstance(small(name), Kivi) and name != "kvzip"]


def drive(method: Method, text: Sequences, place: str, **of_values: object) -> tuple[list[Tensor], list[KVLayer]]:
    """Two turns, in two layers. -> the outputs of the second turn and of the steps after each, and the layers"""
    budget = 0.4 if method.uses_budget else None
    specs = [replace(spec, rotary_dim=SHAPE.dim - WIDTH, **of_values) for spec in text.specs]  # type: ignore[arg-type]
    layers = method.start(specs, CacheState(text.request(budget, place)))
    text.seal(layers, 0, SEALED - 10)
    outs = text.decode(layers, SEALED - 10)
    for layer in layers:
        layer.reopen()
    outs += text.prefill(layers, SEALED - 9, SEALED)
    for layer in layers:
        layer.seal()
    for position in range(SEALED, LENGTH):
        outs += text.decode(layers, position)
    return outs, layers


@pytest.mark.filterwarnings("ignore:.* fell back on ")
@pytest.mark.parametrize(
    ("name", "in_keys"),
    [(name, False) for name in DRIVEN]
    + [(name, True) for name in DRIVEN if small(name).no_latents is None and name != "quest"],
)
def test_values_may_be_narrower_than_keys_or_lie_in_them(name: str, in_keys: bool) -> None:
    """What comes out is what values as wide as keys give: with zeros in place of the missing channels, or the keys."""
    method = small(name)
    if in_keys and name == "vattention":  # as it chooses there
        method = replace(method, select_per="kv_head")  # type: ignore[call-arg]
    own, wide = (Sequences(SHAPE, LENGTH, layers=2) for _ in range(2))
    for text in (own, wide):  # what is rotated is no part of a value
        text.rope = rope(SHAPE.dim - WIDTH)
        text.cos, text.sin = text.rope(torch.arange(LENGTH))
    for layer in range(2):
        if in_keys:
            wide.v[layer] = own.k(layer)
        else:
            wide.v[layer][..., WIDTH:] = 0
    own.v = wide.v[..., -WIDTH:] if in_keys else wide.v[..., :WIDTH]
    channels = slice(-WIDTH, None) if in_keys else slice(WIDTH)
    for place in ("device", *(["host"] if method.offloads else [])):
        outs, layers = drive(method, own, place, value_dim=WIDTH, values_in_keys=in_keys)
        wanted, _ = drive(method, wide, place)
        for out, whole in zip(outs, wanted, strict=True):
            assert_close(out, whole[..., channels], rtol=1e-4, atol=1e-5)
        if name == "full":
            rows = 64 if in_keys else 64 + WIDTH
            assert footprint(layers)[DEVICE] == 2 * 2 * 2 * LENGTH * rows * torch.float32.itemsize
