"""Computes scores from a few channels of the keys: summed over the query heads (SparQ), or as
softmax weights (RocketKV).

A few channels are too few for tensor cores, whose tiles they would not fill: each key is read once
and multiplied with the numbers of all query heads of its group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.choose import row_log_sum_exp, weights
from kernels.gpu.common import (
    DTYPES,
    head_rows,
    lengths_of,
    load,
    located,
    number_of,
    padded,
    program_at,
    unfit_group,
    unfit_host,
    unfit_shape,
    wide_rows,
)
from kernels.ragged import Ragged, first_of, with_sizes

_BLOCK = tl.constexpr(1024)  # tokens
_STEP = 16  # channels that are loaded at once
_HEADS = tl.constexpr(8)  # query heads that are multiplied at once


def channel_sums(q: Tensor, x: Tensor | Ragged, channels: Tensor) -> tuple[Tensor | Ragged, Tensor]:
    """Multiply queries q [B G g r] and keys x [B G D S] only in r chosen channels [B G r], as
    kernels/reference.py defines it. Return the products summed over the group, [B G S], and for
    each head the log-sum-exps of its products over each of P blocks of tokens, [B G g P]. No
    channel is copied, and no product of a single head is stored."""
    sums = wide_rows(q, (*q.shape[:2], x.shape[3]))
    lses = _run(q, x, channels, 1.0, sums, summed=True)
    return with_sizes(sums, x), lses


def channel_weights(
    q: Tensor, x: Tensor | Ragged, channels: Tensor, scale: float, reduce: str, times: int
) -> Tensor | Ragged:
    """Compute the softmax weights of tokens or pages for each group of query heads from a few
    channels, each weight repeated `times` times, as kernels/reference.py defines it. q [B G g r], x
    [B G D S], channels [B G r] -> [B G S * times]"""
    logits = wide_rows(q, (*q.shape[:3], x.shape[3]))
    lses = _run(q, x, channels, scale, logits, summed=False)
    out = weights(logits, lses, scale, reduce, times, bound=logits.stride(2))
    return Ragged.filled_up(out, x.sizes * times) if isinstance(x, Ragged) else out


def channel_weights_refuses(q, x, channels, *_):
    first = first_of(x)
    if x.dtype not in DTYPES or q.dtype not in DTYPES:
        return f"takes float32, bfloat16 and float16, got {q.dtype} and {x.dtype}"
    if first.stride(3) != 1:
        return "needs the tokens of a channel side by side"
    if x.shape[3] == 0:
        return "leaves empty inputs to torch"
    sides = unfit_shape(x, *q.shape[:2], None, None) or unfit_shape(
        channels, *q.shape[:2], q.shape[3]
    )
    return sides or unfit_host(first, q, channels) or unfit_group(q.shape[2])


channel_sums_refuses = channel_weights_refuses


def _run(
    q: Tensor, x: Tensor | Ragged, channels: Tensor, scale: float, out: Tensor, summed: bool
) -> Tensor:
    """Write products to `out`, or their sum over a group's heads if `summed`. Return the log-sum-exps
    of each head's products times `scale`, [B G g P] of the P blocks of tokens."""
    (batch, groups, heads, width), blocks = q.shape, triton.cdiv(x.shape[3], _BLOCK)
    lses = q.new_empty((batch, groups, heads, blocks), dtype=torch.float32)
    # registers and shared memory are few
    step = _STEP if heads <= 4 and x.dtype.itemsize == 2 else _STEP // 2
    _channels[(blocks, batch * groups)](
        q.contiguous(),
        located(x),
        lengths_of(x),
        channels.contiguous(),
        out,
        lses,
        scale,
        out.stride(-2),
        x.shape[3],
        groups,
        heads,
        width,
        summed,
        min(step, padded(width, 1)),
    )
    return lses


@triton.jit
def _products(
    q, keys, step, channels, token, live, row, mine, WIDTH: tl.constexpr, WHOLE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Multiply the queries in `row` of q [N WIDTH] with a block of tokens of the keys, in WIDTH
    channels, of which STEP are loaded at once. WHOLE: all tokens of the block exist, so that they
    are loaded without a mask of each, several by one instruction. Tiles of keys have a first
    dimension of 1, so that they keep the layout in which they were loaded. -> [heads tokens]"""
    total = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    for start in tl.range(0, WIDTH, STEP, num_stages=2):  # the next are on their way
        for place in tl.static_range(STEP):
            real = (WIDTH % STEP == 0) | (start + place < WIDTH)
            at = keys + load(channels + start + place, real) * step + token[None, :]
            value = load(at, real if WHOLE else live[None, :] & real)
            query = load(q + row[:, None] * WIDTH + start + place, mine[:, None] & real)
            total += query.to(value.dtype).to(tl.float32) * value.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["count"])
def _channels(
    q, x, counts, channels, out, lses, scale, apart: tl.int64, count, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, SUM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute the scores of a block of tokens from a few channels. Write them to `out`, or their
    sum over the group's heads if SUM; and to `lses` each head's log-sum-exp of the scores times
    `scale`. Rows of `out` lie `apart` entries apart.

    For several sequences, `counts` says how many tokens each has; a block with none of them has a
    log-sum-exp of minus infinity."""
    FOLD: tl.constexpr = min(_HEADS, padded(HEADS, 1))
    block, this = tl.program_id(0), program_at(1)
    keys, step = head_rows(x, this // GROUPS, this % GROUPS)
    count = number_of(counts, this // GROUPS, count)
    token, channels = block * _BLOCK + tl.arange(0, _BLOCK), channels + this * WIDTH
    live, summed = token < count, tl.zeros([_BLOCK], tl.float32)
    for first in range(0, HEADS, FOLD):
        head = first + tl.arange(0, FOLD)
        row, mine = this * HEADS + head, head < HEADS
        scores = tl.zeros([FOLD, _BLOCK], tl.float32)
        if (block + 1) * _BLOCK <= count:
            scores = _products(q, keys, step, channels, token, live, row, mine, WIDTH, True, STEP)
        elif block * _BLOCK < count:
            scores = _products(q, keys, step, channels, token, live, row, mine, WIDTH, False, STEP)
        if SUM:
            summed += tl.sum(scores, 0)  # rows beyond HEADS are zero
        else:
            tl.store(
                out + row[:, None] * apart + token, scores, mask=mine[:, None] & (token < apart)
            )
        lse = row_log_sum_exp(tl.where(live, scores * scale, float("-inf")))
        tl.store(lses + row * tl.num_programs(0) + block, lse, mask=mine)
    if SUM:
        tl.store(out + this * apart + token, summed, mask=token < apart)
