"""Multiplies queries with the rows of an index: page bounds, landmarks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import padded, product, unfit_floats, unfit_group
from kernels.ragged import RAGGED, Ragged

_BLOCK = 64  # rows
_MOST_CHANNELS = 128  # channels of a row that are taken at once


def row_scores(q: Tensor, x: Tensor) -> Tensor:
    """Multiply every query of a group with every row of an index, as kernels/reference.py defines it."""
    batch, groups, heads, width = q.shape
    count = x.shape[2]
    out = q.new_empty((batch, groups, heads, count), dtype=torch.float32)
    if out.numel():
        _scores[(triton.cdiv(count, _BLOCK), batch * groups)](
            q.contiguous(), x, out, *x.stride()[:3], count, groups, heads, padded(heads), width,
            min(_MOST_CHANNELS, padded(width)), _BLOCK, num_warps=4,
        )  # fmt: skip
    return out


def row_scores_refuses(q: Tensor, x: Tensor) -> str | None:
    if isinstance(x, Ragged):
        return RAGGED
    if x.stride(3) != 1:
        return "needs the channels of a row side by side"
    return unfit_floats(q, x) or unfit_group(q.shape[2])


@triton.jit(do_not_specialize=["count"])
def _scores(
    q, x, out, xb: tl.int64, xg: tl.int64, xt: tl.int64, count, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    FOLD: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply a group's queries with a block of rows."""
    this = tl.program_id(1).to(tl.int64)
    rows = x + this // GROUPS * xb + this % GROUPS * xg
    row, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD)
    scores = tl.zeros([FOLD, BLOCK], tl.float32)
    for start in range(0, WIDTH, STEP):
        channel = start + tl.arange(0, STEP)
        mine = (head < HEADS)[:, None] & (channel < WIDTH)
        query = tl.load(q + (this * HEADS + head)[:, None] * WIDTH + channel, mask=mine, other=0.0)
        there = (row < count)[:, None] & (channel < WIDTH)
        tile = tl.load(rows + row[:, None] * xt + channel, mask=there, other=0.0)
        scores += product(query, tl.trans(tile))
    to = out + (this * HEADS + head)[:, None] * count + row
    tl.store(to, scores, mask=(head < HEADS)[:, None] & (row < count))
