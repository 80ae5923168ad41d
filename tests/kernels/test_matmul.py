"""Where torch has no fast product in bf16, matrices are multiplied in fp32, and blocks of any size by compiled code."""

from __future__ import annotations

import pytest
import torch

from kernels import block, matmul

SLOW = pytest.mark.parametrize("slow", [False, True])


@SLOW
def test_product_is_rounded_once(monkeypatch, slow):
    monkeypatch.setattr(matmul, "multiplies_bfloat16", lambda: not slow)
    a, b = torch.randn(2, 40, 64).bfloat16(), torch.randn(64, 24).bfloat16()
    exact, given = a.double() @ b.double(), matmul.matmul(a, b)
    assert given.dtype is torch.bfloat16
    torch.testing.assert_close(given.double(), exact, rtol=2**-8, atol=1e-3)
    assert matmul.matmul(a.float(), b.float()).dtype is torch.float32


@SLOW
def test_wide_blocks(monkeypatch, slow):
    monkeypatch.setattr(block, "multiplies_bfloat16", lambda: not slow)
    inner = block.MOST_INNER + 32
    assert block.fits_compiled((64, 64), inner, torch.bfloat16) is slow
    assert not block.fits_compiled((64, 64), inner, torch.float32)
