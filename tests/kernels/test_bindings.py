"""Descriptions of what compiled functions take, and the checks made from them (kernels/cpu/ffi/bindings.py)."""

from __future__ import annotations

from collections.abc import Iterator
from struct import unpack
from typing import Any

import pytest
import torch

from kernels import ops
from kernels.cpu.ffi.bindings import FieldGroup, Struct, elements, floats, int64s, integer, real
from kernels.dispatch import use_backend
from kernels.reference import Segment


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
        {"x": torch.zeros(2, 3, 4).half()}, {"x": torch.zeros(2, 3, 4, device="meta")},
        {"x": torch.zeros(2, 4, 3).transpose(1, 2)}, {"x": torch.zeros(3, 4)},
        {"weights_weight": torch.zeros(3, 4).bfloat16()}, {"weights_weight": torch.zeros(4, 3).T},
        {"weights_bias": torch.zeros(4)}, {"rows_read": torch.zeros(5, dtype=torch.int32)}, {"out": torch.zeros(6)},
        {"rows": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(other))):
        Example.pack(**fields(**other))


# Regions beside a busy process: a thread that lost its core is left out for a while (kernels/cpu/team.cpp).


MS = 1_000_000  # ns


@pytest.fixture
def team() -> Iterator[object]:
    """The state of this process, forgotten afterwards; two threads, so that there is one to lose."""
    library = pytest.importorskip("kernels.cpu.ffi.library")
    try:
        found = library.team()
    except ImportError as error:
        pytest.skip(str(error))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    found.kv_team_forget()
    yield found
    found.kv_team_forget()
    torch.set_num_threads(threads)


def test_a_thread_that_lost_its_core_is_left_out_and_tried_again(team) -> None:
    team.kv_team_report(2, 10 * MS, 1000 * MS)
    assert team.kv_team_size(1001 * MS) == 1
    assert team.kv_team_size(1019 * MS) == 1
    assert team.kv_team_size(1021 * MS) == 2


@pytest.mark.parametrize("tokens", [1, 700, 5000])
def test_the_number_of_threads_changes_no_bit(team, tokens: int) -> None:
    q, k, v = torch.randn(2, 6, 1, 64), torch.randn(2, 3, tokens, 64), torch.randn(2, 3, tokens, 64)
    segments = (Segment(k, v), Segment(k, v, torch.randint(tokens, (2, 3, 40))))

    def attended(threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        with use_backend("cpu"):
            return ops.segment_attention(q, segments, 0.125)

    assert torch.equal(attended(1), attended(2))
    assert torch.equal(attended(1), attended(3))
