"""Descriptions of what compiled functions take, and the checks made from them (kernels/cpu/ffi/bindings.py)."""

from __future__ import annotations

import signal
from struct import unpack
from typing import Any

import pytest
import torch

from kernels.cpu.ffi.bindings import FieldGroup, Struct, elements, floats, int64s, integer, real
from tests.forks import Forked, script


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


EMPTY = """
import torch
from kernels import ops
from kernels.reference import Segment
q, none = torch.zeros(1, 4, 1, 64), torch.zeros(1, 2, 0, 64)
try:
    ops.segment_attention(q, [Segment(none, none)], 1.0)
except ValueError as error:
    print(error)
"""


def test_attention_over_nothing_is_an_error_and_ends_no_process() -> None:
    pytest.importorskip("kernels.cpu.decode")
    process = Forked(script, EMPTY)
    code = process.wait()
    assert code != -signal.SIGFPE, "a division by zero in C++"
    assert (code, process.err) == (0, "")
    assert "num_segments=0" in process.out
