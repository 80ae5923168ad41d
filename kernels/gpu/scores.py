"""Multiplies queries with the rows of an index: page bounds, landmarks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.choose import row_log_sum_exp, weights
from kernels.gpu.common import (
    head_rows,
    located,
    padded,
    product,
    stages,
    unfit_floats,
    unfit_group,
    unfit_numbers,
    unfit_shape,
    wide_rows,
)
from kernels.ragged import Ragged, filled, first_of

_BLOCK = 64  # rows
_MOST_CHANNELS = 128  # channels of a row that are taken at once


def row_scores(q: Tensor, x: Tensor | Ragged) -> Tensor | Ragged:
    """Multiply the g query heads of each group (those that share a KV head) with every row of an
    index, as kernels/reference.py defines it. q [B G g C], x [B G S C] -> [B G g S]"""
    return _run(q, x, by_sign=False, live=None)


def live_scores(q: Tensor, x: Tensor | Ragged, live: Tensor) -> Tensor:
    """Multiply queries with the first `live` rows of each sequence in an index, as `row_scores`
    does; the others, which are not read, get minus infinity. kernels/reference.py defines it. ->
    [B G g S]"""
    return filled(_run(q, x, by_sign=False, live=live))


def page_scores(q: Tensor, bounds: Tensor | Ragged) -> Tensor | Ragged:
    """Bound the product of each query q [B G g D] with the keys of each page, whose largest and
    smallest values are bounds [B G P 2D], as kernels/pages.py defines it. -> [B G g P]"""
    return _run(q, bounds, by_sign=True, live=None)


def row_weights(
    q: Tensor, x: Tensor | Ragged, scale: float, reduce: str, live: Tensor | None = None
) -> Tensor | Ragged:
    """Compute the softmax weights of an index's rows for each group of query heads, as
    kernels/reference.py defines it, in two kernels: products with log-sum-exps of blocks, and
    weights. q [B G g C], x [B G S C] -> [B G S]"""
    batch, groups, heads, _ = q.shape
    logits = wide_rows(q, (batch * groups * heads, x.shape[2]))
    lses = logits.new_empty((len(logits), triton.cdiv(x.shape[2], _BLOCK)))
    _launch(q, x, logits, by_sign=False, live=live, lses=lses, scale=scale)
    counts = x.counts if isinstance(x, Ragged) and live is None else None
    out = weights(logits, lses, counts, (batch, groups), logits.stride(0), scale, reduce)
    return Ragged.filled_up(out, x.sizes) if isinstance(x, Ragged) and live is None else out


def _run(q: Tensor, x: Tensor | Ragged, by_sign: bool, live: Tensor | None) -> Tensor | Ragged:
    out = q.new_empty((*q.shape[:3], x.shape[2]), dtype=torch.float32)
    _launch(q, x, out, by_sign, live)
    return Ragged.filled_up(out, x.sizes, 3) if isinstance(x, Ragged) else out


def _launch(
    q: Tensor, x: Tensor | Ragged, out: Tensor, by_sign: bool, live: Tensor | None, lses: Tensor | None = None,
    scale: float = 1.0,
) -> None:  # fmt: skip
    """Write the products to `out`, whose last dimension holds those of one query head, and the
    log-sum-exp of each block of them times `scale` to `lses` [B*G*g blocks], if it is given."""
    (batch, groups, heads, channels), count = q.shape, x.shape[2]
    width = 2 * channels if by_sign else channels
    counts = x.counts if isinstance(x, Ragged) else None
    first, places, aligned = located(x)
    if out.numel():
        _scores[(triton.cdiv(count, _BLOCK), batch * groups)](
            q.contiguous(), first, places, counts, live, out, lses, scale, *first.stride()[:3], out.stride(-2), count,
            int(live is not None and len(live) > 1), groups, heads, padded(heads), width,
            min(_MOST_CHANNELS, padded(width)), _BLOCK, aligned, by_sign, num_warps=4,
            num_stages=stages(first),
        )  # fmt: skip


def row_scores_refuses(q: Tensor, x: Tensor | Ragged) -> str | None:
    return _unfit(q, x, q.shape[3])


def page_scores_refuses(q: Tensor, bounds: Tensor | Ragged) -> str | None:
    return _unfit(q, bounds, 2 * q.shape[3])


def live_scores_refuses(q: Tensor, x: Tensor | Ragged, live: Tensor) -> str | None:
    return unfit_numbers(live, len(q)) or _unfit(q, x, q.shape[3])


def row_weights_refuses(
    q: Tensor, x: Tensor | Ragged, scale: float, reduce: str, live: Tensor | None = None
) -> str | None:
    return unfit_numbers(live, len(q)) or _unfit(q, x, q.shape[3])


def _unfit(q: Tensor, x: Tensor | Ragged, width: int) -> str | None:
    first = first_of(x)
    if first.stride(3) != 1:
        return "needs the channels of a row side by side"
    sides = unfit_shape(x, *q.shape[:2], None, None if isinstance(x, Ragged) else width)
    return sides or unfit_floats(q, first) or unfit_group(q.shape[2])


@triton.jit(do_not_specialize=["count"])
def _scores(
    q, x, places, counts, live, out, lses, scale, xb: tl.int64, xg: tl.int64, xt: tl.int64, width: tl.int64, count,
    EACH: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, BY_SIGN: tl.constexpr,
):  # fmt: skip
    """Multiply a group's queries with a block of rows of x. For several sequences, `counts` says
    how many rows each has. `live`: only so many rows count, the others get minus infinity; it holds
    one number for each sequence if EACH is 1, one for all if it is 0. BY_SIGN: the first half of a
    row is multiplied with the positive parts of a query, the second half with the negative ones.
    If `lses` is given, the log-sum-exp of the block's scores times `scale` is written there. Rows
    of `out` lie `width` entries apart."""
    this = tl.program_id(1).to(tl.int64)
    rows, apart = head_rows(x, places, this // GROUPS, this % GROUPS, xb, xg, xt, ALIGNED)
    room = count
    if counts is not None:
        count = tl.load(counts + this // GROUPS).to(tl.int32)
    if live is not None:
        count = tl.minimum(count, tl.load(live + this // GROUPS * EACH).to(tl.int32))
    row, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD)
    scores = tl.zeros([FOLD, BLOCK], tl.float32)
    for start in range(0, WIDTH, STEP):
        channel = start + tl.arange(0, STEP)
        mine = (head < HEADS)[:, None] & (channel < WIDTH)
        if BY_SIGN:
            half: tl.constexpr = WIDTH // 2
            query = tl.load(q + (this * HEADS + head)[:, None] * half + channel % half, mask=mine, other=0.0)
            meets = (query > 0) == (channel < half)
            query = tl.where(meets, query, tl.zeros_like(query))
        else:
            query = tl.load(q + (this * HEADS + head)[:, None] * WIDTH + channel, mask=mine, other=0.0)
        there = (row < count)[:, None] & (channel < WIDTH)
        tile = tl.load(rows + row[:, None] * apart + channel, mask=there, other=0.0)
        scores += product(query, tl.trans(tile))
    if lses is not None:
        lse = row_log_sum_exp(tl.where(row < count, scores * scale, float("-inf")))
        tl.store(lses + (this * HEADS + head) * tl.num_programs(0) + tl.program_id(0), lse, mask=head < HEADS)
    to = out + (this * HEADS + head)[:, None] * width + row
    if live is not None:
        tl.store(to, tl.where(row < count, scores, float("-inf")), mask=(head < HEADS)[:, None] & (row < room))
    else:
        tl.store(to, scores, mask=(head < HEADS)[:, None] & (row < count))
