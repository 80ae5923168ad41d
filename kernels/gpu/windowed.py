"""Attention within a window, and what each key receives: the passes of prefill.py with a lower limit."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.common import unfit_floats, unfit_heads
from kernels.gpu.prefill import run_columns, run_rows


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int) -> tuple[Tensor, Tensor]:
    """As in kernels/windowed.py. The result lies in memory as [B T H D]."""
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])).transpose(1, 2)
    lse = q.new_empty((*q.shape[:3], 1), dtype=torch.float32)
    run_rows(q, k, v, out, lse, scale, first, window)
    return out, lse.squeeze(3)


def windowed_attention_refuses(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int) -> str | None:
    return unfit_heads(q, k, v)


def windowed_sums(q: Tensor, k: Tensor, lse: Tensor, scale: float, first: int, window: int) -> Tensor:
    return run_columns(q, k, lse.contiguous(), scale, first, window)


def windowed_sums_refuses(q: Tensor, k: Tensor, lse: Tensor, scale: float, first: int, window: int) -> str | None:
    return unfit_heads(q, k) or unfit_floats(lse)
