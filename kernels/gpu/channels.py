"""Computes scores from a few channels of the keys, summed over the query heads (SparQ)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.choose import log_sum_exp
from kernels.gpu.common import DTYPES, padded, product, unfit, unfit_group
from kernels.ragged import RAGGED, Ragged

_BLOCK = 128  # tokens
_MOST_CHANNELS = 64  # channels that are taken at once


def channel_sums(q: Tensor, x: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the scores of a few channels over the group, as kernels/reference.py defines it, without copying channels or
    storing scores."""
    batch, groups, heads, width = q.shape
    count = x.shape[3]
    blocks = triton.cdiv(count, _BLOCK)
    sums = q.new_empty((batch, groups, count), dtype=torch.float32)
    lses = q.new_empty((batch, groups, heads, blocks), dtype=torch.float32)
    _channels[(blocks, batch * groups)](
        q.contiguous(), x, channels.contiguous(), sums, lses, *x.stride()[:3], count, groups, heads, padded(heads),
        width, min(_MOST_CHANNELS, padded(width)), _BLOCK, num_warps=4,
    )  # fmt: skip
    return sums, log_sum_exp(lses, 1.0)


def channel_sums_refuses(q: Tensor, x: Tensor, channels: Tensor) -> str | None:
    if isinstance(x, Ragged):
        return RAGGED
    if x.dtype not in DTYPES or q.dtype not in DTYPES:
        return f"takes float32, bfloat16 and float16, got {q.dtype} and {x.dtype}"
    if x.stride(3) != 1:
        return "needs the tokens of a channel side by side"
    if x.shape[3] == 0:
        return "leaves empty inputs to torch"
    return unfit(q, x, channels) or unfit_group(q.shape[2])


@triton.jit(do_not_specialize=["count"])
def _channels(
    q, x, channels, sums, lses, xb: tl.int64, xg: tl.int64, xc: tl.int64, count, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute scores of a block of tokens: their sum over the heads, and each head's log-sum-exp."""
    block, this = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys = x + this // GROUPS * xb + this % GROUPS * xg
    token, head = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD)
    mine, live = head < HEADS, token < count
    scores = tl.zeros([FOLD, BLOCK], tl.float32)
    for start in range(0, WIDTH, STEP):
        place = start + tl.arange(0, STEP)
        channel = tl.load(channels + this * WIDTH + place, mask=place < WIDTH, other=0).to(tl.int64)
        at, real = keys + channel[:, None] * xc + token, (place < WIDTH)[:, None]
        if (block + 1) * BLOCK <= count:  # a full block: without a mask, loads are vectorised
            tile = tl.load(at, mask=real, other=0.0)
        else:
            tile = tl.load(at, mask=real & live, other=0.0)
        of_query = (this * HEADS + head)[:, None] * WIDTH + place
        query = tl.load(q + of_query, mask=mine[:, None] & (place < WIDTH), other=0.0)
        scores += product(query.to(tile.dtype), tile)
    of_head = this * HEADS + head
    tl.store(sums + this * count + token, tl.sum(scores, 0), mask=live)  # rows beyond HEADS are zero
    scores = tl.where(live, scores, float("-inf"))
    top = tl.max(scores, 1)
    lse = top + tl.log(tl.sum(tl.exp(scores - top[:, None]), 1))
    tl.store(lses + of_head * tl.num_programs(0) + block, lse, mask=mine)
