"""Regions beside a busy process: a thread that lost its core is left out for a while (kernels/cpu/team.cpp)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import ops
from kernels.dispatch import use_backend
from kernels.reference import Segment

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
