"""Tests attention of a prompt's later chunk, by torch's own operation and by our torch code within a window, over so
many keys that it runs in blocks of queries. Neither makes anything as large as its mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import reference, sdpa
from kernels.windowed import windowed_attention
from tests.allocations import Allocations
from tests.kernels.op_cases import random, stored

NEW, STORED = 700, 6000


def chunk(heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return random(1, 1, heads, NEW, 16), stored(2, 1, heads // 2, STORED, 16), stored(3, 1, heads // 2, STORED, 16)


def test_a_chunk_builds_no_mask() -> None:
    args = chunk()
    with torch.inference_mode(), Allocations() as counted:
        got = sdpa.prefill_attention(*args, 0.25)
    assert_close(got, reference.prefill_attention(*args, 0.25), atol=1e-5, rtol=1e-4)
    assert counted.peak < NEW * STORED  # bytes of the whole mask


def test_flash_attention_is_told_where_the_mask_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "can_use_flash_attention", lambda params: True)
    args = chunk()
    assert_close(sdpa.prefill_attention(*args, 0.25), reference.prefill_attention(*args, 0.25), atol=1e-5, rtol=1e-4)


def test_a_window_takes_bounded_memory() -> None:
    """Many heads and keys make the blocks of queries shorter."""
    args = chunk(heads=8)
    with torch.inference_mode(), Allocations() as counted:
        got, _ = windowed_attention(*args, 0.25, STORED - NEW, STORED)
    assert_close(got, reference.prefill_attention(*args, 0.25), atol=1e-5, rtol=1e-4)
    assert counted.peak < 3 * 256 * 8 * STORED * 4  # bytes of three blocks of weights of 256 queries
