"""Descriptions of what compiled functions take, and the checks made from them (kernels/cpu/ffi/bindings.py)."""

from __future__ import annotations

from struct import unpack
from typing import Any

import pytest
import torch

from kernels.cpu.ffi.bindings import FieldGroup, Struct, elements, floats, int64s, integer, real


class Example(Struct):
    x = elements(strides="batch row")
    weights = FieldGroup("Pair", {"weight": elements("rows * width"), "bias": elements("rows", optional=True)})
    rows_read = int64s("count")
    out = floats("count", written=True)
    rows = width = count = integer()
    scale = real()


def fields(**other: Any) -> dict[str, Any]:
    return {
        "x": torch.zeros(2, 3, 4), "weights_weight": torch.zeros(3, 4), "weights_bias": None,
        "rows_read": torch.zeros(5, dtype=torch.int64), "out": torch.zeros(5), "rows": 3, "width": 4, "count": 5,
        "scale": 0.5, **other,
    }  # fmt: skip


def test_fields_are_packed_in_the_order_of_the_struct() -> None:
    given = fields(x=torch.zeros(2, 3, 4)[:, 1:])
    addresses = [given[name].data_ptr() for name in ("x", "weights_weight", "rows_read", "out")]
    packed = unpack("11qd", Example.pack(**given))
    assert packed == (0, addresses[0], 48, 16, addresses[1], 0, *addresses[2:], 3, 4, 5, 0.5)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(2, 3, 4).half()},
        {"x": torch.zeros(2, 3, 4, device="meta")},
        {"x": torch.zeros(2, 4, 3).transpose(1, 2)},
        {"x": torch.zeros(3, 4)},
        {"weights_weight": torch.zeros(3, 4).bfloat16()},
        {"weights_weight": torch.zeros(4, 3).T},
        {"weights_bias": torch.zeros(4)},
        {"rows_read": torch.zeros(5, dtype=torch.int32)},
        {"out": torch.zeros(6)},
        {"rows": 0},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(other))):
        Example.pack(**fields(**other))
