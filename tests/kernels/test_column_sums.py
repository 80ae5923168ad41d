"""Column sums against a loop over queries, in one block and in many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import column_sums as module
from kernels import ops

SHAPES = [(1, 4, 4, 64, 33, 33), (2, 6, 2, 96, 51, 17), (1, 5, 1, 128, 40, 1), (1, 2, 2, 16, 1, 1)]


def _loop(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    (batch, heads, new, _), (groups, stored) = q.shape, k.shape[1:3]
    out, sums = torch.zeros_like(q, dtype=torch.float64), torch.zeros(batch, heads, stored, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // (heads // groups)].double(), v[b, h // (heads // groups)].double()
            for t in range(new):
                seen = stored - new + t + 1
                weights = ((keys[:seen] @ q[b, h, t].double()) * scale).softmax(0)
                sums[b, h, :seen] += weights
                out[b, h, t] = weights @ values[:seen]
    return out, sums


@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["blocks", "whole"])
@pytest.mark.parametrize("shape", SHAPES)
def test_column_sums_equal_a_loop(shape: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WEIGHTS_AT_ONCE", at_once)
    monkeypatch.setattr(module, "_LEAST_QUERIES", 7)
    batch, heads, groups, dim, stored, new = shape
    q = 3 * torch.randn(batch, new, heads, dim).transpose(1, 2)
    k, v = torch.randn(2, batch, groups, stored + 3, dim)[:, :, :, :stored]
    wanted_out, wanted_sums = _loop(q, k, v, 0.1)
    out, sums = ops.prefill_attention_with_column_sums(q, k, v, 0.1)
    assert_close(out.double(), wanted_out, atol=2e-5, rtol=0)
    assert_close(sums.double(), wanted_sums, atol=2e-5, rtol=0)
    assert_close(ops.column_sums(q, k, 0.1), sums)


@pytest.mark.bf16
def test_sums_are_single_precision_whatever_the_inputs() -> None:
    """The weights may be rounded as the product rounds them; in bfloat16 their sum would stand still at 256."""
    q, k = torch.randn(1, 2, 600, 32).bfloat16(), torch.randn(1, 1, 600, 32).bfloat16()
    sums = ops.column_sums(q, k, 0.05)
    assert sums.dtype == torch.float32
    assert_close(sums.sum(-1), torch.full((1, 2), 600.0), atol=0, rtol=5e-4)
