"""Computes scores from a few channels of the keys, summed over the query heads (SparQ)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import common
from kernels.gpu.choose import log_sum_exp
from kernels.gpu.common import DTYPES, head_rows, located, padded, product, unfit, unfit_group, unfit_shape
from kernels.ragged import Ragged, first_of

_BLOCK = 128  # tokens
_MOST_CHANNELS = 64  # channels that are taken at once


def channel_sums(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> tuple[Tensor | Ragged, Tensor]:
    """Multiply queries q [B G g r] and keys x [B G D S] in r chosen channels [B G r] alone. Return
    the sum over the group, [B G S], and each head's log-sum-exp, [B G g], as kernels/reference.py
    defines it. Channels are not copied, scores not stored."""
    (batch, groups, heads, _), count = q.shape, x.shape[3]
    sums = q.new_empty((batch, groups, count), dtype=torch.float32)
    lses = q.new_empty((batch, groups, heads, triton.cdiv(count, _BLOCK)), dtype=torch.float32)
    _run(q, x, channels, sums=sums, lses=lses)
    return Ragged.filled_up(sums, x.sizes) if isinstance(x, Ragged) else sums, log_sum_exp(lses, 1.0)


def channel_scores(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> Tensor | Ragged:
    """Multiply queries q [B G g r] and keys x [B G D S] in r chosen channels [B G r] alone, without
    copying these, as kernels/reference.py defines it. -> [B G g S]"""
    scores = q.new_empty((*q.shape[:3], x.shape[3]), dtype=torch.float32)
    _run(q, x, channels, scores=scores)
    return Ragged.filled_up(scores, x.sizes, 3) if isinstance(x, Ragged) else scores


def channel_scores_refuses(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> str | None:
    return channel_sums_refuses(q, x, channels)


def channel_sums_refuses(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> str | None:
    first = first_of(x)
    if x.dtype not in DTYPES or q.dtype not in DTYPES:
        return f"takes float32, bfloat16 and float16, got {q.dtype} and {x.dtype}"
    if first.stride(3) != 1:
        return "needs the tokens of a channel side by side"
    if x.shape[3] == 0:
        return "leaves empty inputs to torch"
    if first.device.type == "cpu" and not (common.INTERPRETED or first.is_pinned() or not first.numel()):
        return "reads host memory that is pinned"
    near = (q, channels) if first.device.type == "cpu" else (q, first, channels)
    return (
        unfit_shape(x, *q.shape[:2], None, None)
        or unfit_shape(channels, *q.shape[:2], q.shape[3])
        or unfit(*near)
        or unfit_group(q.shape[2])
    )


def _run(
    q: Tensor, x: Tensor | Ragged, channels: Tensor, sums: Tensor | None = None, lses: Tensor | None = None,
    scores: Tensor | None = None,
) -> None:  # fmt: skip
    (batch, groups, heads, width), count = q.shape, x.shape[3]
    counts = x.counts if isinstance(x, Ragged) else None
    first, places, aligned = located(x)
    _channels[(triton.cdiv(count, _BLOCK), batch * groups)](
        q.contiguous(), first, places, counts, channels.contiguous(), sums, lses, scores, *first.stride()[:3], count,
        groups, heads, padded(heads), width, min(_MOST_CHANNELS, padded(width)), _BLOCK, aligned, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _channels(
    q, x, places, counts, channels, sums, lses, stored, xb: tl.int64, xg: tl.int64, xc: tl.int64, count,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a block of tokens from a few channels. If `stored` is given, write them
    there, else write their sum over the group's heads to `sums` and each head's log-sum-exp to
    `lses`.

    For several sequences, `counts` says how many tokens each has; a block with none of them has a
    log-sum-exp of minus infinity."""
    block, this = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys, step = head_rows(x, places, this // GROUPS, this % GROUPS, xb, xg, xc, ALIGNED)
    room = count
    if counts is not None:
        count = tl.load(counts + this // GROUPS).to(tl.int32)
    token, head = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD)
    mine, live = head < HEADS, token < count
    scores = tl.zeros([FOLD, BLOCK], tl.float32)
    for start in range(0, WIDTH, STEP):
        place = start + tl.arange(0, STEP)
        channel = tl.load(channels + this * WIDTH + place, mask=place < WIDTH, other=0).to(tl.int64)
        at, real = keys + channel[:, None] * step + token, (place < WIDTH)[:, None]
        if (block + 1) * BLOCK <= count:  # a full block: without a mask, loads are vectorised
            tile = tl.load(at, mask=real, other=0.0)
        else:
            tile = tl.load(at, mask=real & live, other=0.0)
        of_query = (this * HEADS + head)[:, None] * WIDTH + place
        query = tl.load(q + of_query, mask=mine[:, None] & (place < WIDTH), other=0.0)
        scores += product(query.to(tile.dtype), tile)
    of_head = this * HEADS + head
    if stored is not None:
        tl.store(stored + of_head[:, None] * room + token, scores, mask=mine[:, None] & live)
    else:
        tl.store(sums + this * room + token, tl.sum(scores, 0), mask=live)  # rows beyond HEADS are zero
        scores = tl.where(live, scores, float("-inf"))
        top = tl.max(scores, 1)
        if counts is not None:
            top = tl.where(top == float("-inf"), 0.0, top)
        lse = top + tl.log(tl.sum(tl.exp(scores - top[:, None]), 1))
        tl.store(lses + of_head * tl.num_programs(0) + block, lse, mask=mine)
