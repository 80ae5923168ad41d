"""Multiplies queries with the rows of an index: page bounds, landmarks, keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import common
from kernels.gpu.choose import row_log_sum_exp, weights
from kernels.gpu.common import (
    each,
    head_rows,
    lengths_of,
    load,
    located,
    number_of,
    padded,
    product,
    program_at,
)
from kernels.partial import BESIDE
from kernels.ragged import RAGGED, Ragged, first_of, with_sizes

_AT_ONCE = 512  # bytes of a row that are taken at once
_NARROW = 64  # channels of rows of which a program takes more
_BESIDE = tl.constexpr(BESIDE)
# bytes of wider rows that a program takes: few, so that all multiprocessors end together
_TILE = 16384


def row_scores(q: Tensor, x: Tensor | Ragged) -> Tensor | Ragged:
    """Multiply the g query heads of each group (those that share a KV head) with every row of an
    index, as kernels/reference.py defines it. q [B G g C], x [B G S C], in memory row by row or
    channel by channel -> [B G g S]"""
    return _products(q, x)[0]


def live_scores(q: Tensor, x: Tensor | Ragged, live: Tensor) -> tuple[Tensor | Ragged, Tensor]:
    """Multiply queries with the first `live` rows of each sequence in an index, as `row_scores`
    does; the others get minus infinity. kernels/reference.py defines it. Return the scores
    [B G g S] and the largest score in each block of rows, [B G g blocks]."""
    return _products(q, x, live=live)


def row_scores_with_lse(q: Tensor, x: Tensor | Ragged, scale: float) -> tuple[Tensor, Tensor]:
    """Multiply queries with every row of an index, as `row_scores` does, and return besides the
    log-sum-exps of blocks of scaled scores, [B G g blocks]. kernels/reference.py defines it."""
    out = q.new_empty((*q.shape[:3], x.shape[2]), dtype=torch.float32)
    return out, _run(q, x, out, scale=scale)


def page_scores(q: Tensor, bounds: Tensor | Ragged) -> Tensor | Ragged:
    """Bound the product of each query q [B G g D] with the keys of each page, whose largest and
    smallest values are bounds [B G P 2D], as kernels/pages.py defines it. -> [B G g P]"""
    return _products(q, bounds, by_sign=True)[0]


def row_weights(
    q: Tensor, x: Tensor | Ragged, scale: float, reduce: str, live: Tensor | None = None
) -> Tensor | Ragged:
    """Compute the softmax weights of an index's rows for each group of query heads, as
    kernels/reference.py defines it, in two kernels: products with log-sum-exps of blocks, and
    weights. q [B G g C], x [B G S C] -> [B G S]"""
    logits = common.wide_rows(q, (*q.shape[:3], x.shape[2]))
    lses = _run(q, x, logits, live=live, scale=scale)
    return with_sizes(weights(logits, lses, scale, reduce, bound=logits.stride(2)), x)


def add_received(
    sums: Tensor, q: Tensor, k: Tensor | Ragged, lse: Tensor, scale: float, live: Tensor | None
) -> None:
    """Add to sums [B G C] the attention weights that queries q [B H 1 D] give the keys k [B G S D],
    as kernels/reference.py defines it, in one pass over the keys."""
    queries = q.view(*k.shape[:2], -1, q.shape[3])
    _run(queries, k, sums, live=live, scale=scale, whole=lse.contiguous())


def _products(
    q: Tensor, x: Tensor | Ragged, by_sign: bool = False, live: Tensor | None = None
) -> tuple[Tensor | Ragged, Tensor]:
    """Return the products [B G g S], and with `live` the largest of each block, as `_run` does."""
    out = q.new_empty((*q.shape[:3], x.shape[2]), dtype=torch.float32)
    tops = _run(q, x, out, by_sign, live)
    return with_sizes(out, x, 3), tops


def _run(
    q: Tensor, x: Tensor | Ragged, out: Tensor, by_sign: bool = False, live: Tensor | None = None,
    scale: float | None = None, whole: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the products to `out`, whose last dimension holds those of one query head. Return for
    each block of them, [B G g blocks], the largest one, or with a `scale` the log-sum-exp of all
    times `scale`. `whole` [B H]: as in the kernel."""
    (batch, groups, heads, channels), count = q.shape, x.shape[2]
    width, size = 2 * channels if by_sign else channels, x.dtype.itemsize
    by_channel = first_of(x).stride(3) != 1
    step = min(_AT_ONCE // size, padded(width))
    block, warps = _TILE // (step * size), size
    if step <= _NARROW:  # rows that are read entry by entry take many registers
        block, warps = 512 // size if by_channel or width == step else 64, 4
    blocks = triton.cdiv(count, block)
    of_blocks = q.new_empty((batch, groups, heads, blocks), dtype=torch.float32)
    if out.numel():
        _scores[(blocks, batch * groups)](
            q.contiguous(),
            located(x.mT if by_channel else x),
            lengths_of(x),
            each(live),
            out,
            of_blocks if scale is None and live is not None else None,
            of_blocks if scale is not None and whole is None else None,
            whole,
            scale,
            out.stride(-2),
            count,
            groups,
            heads,
            width,
            step,
            block,
            by_sign,
            by_channel,
            num_warps=warps,
            num_stages=common.stages(first_of(x)),
        )
    return of_blocks


def row_scores_refuses(q, x):
    return _unfit(q, x, q.shape[3])


def row_scores_with_lse_refuses(q, x, scale):
    return RAGGED if isinstance(x, Ragged) else _unfit(q, x, q.shape[3])


def page_scores_refuses(q, bounds):
    return _unfit(q, bounds, 2 * q.shape[3])


def live_scores_refuses(q, x, live):
    return common.unfit_numbers(live, len(q)) or _unfit(q, x, q.shape[3])


def add_received_refuses(sums, q, k, lse, scale, live):
    batch, heads, _, dim = q.shape
    if sums.dtype != torch.float32 or sums.shape[2] < k.shape[2] or not sums.is_contiguous():
        return f"takes sums of float32 for {k.shape[2]} tokens, got {sums.dtype} {list(sums.shape)}"
    sides = (
        common.unfit_shape(sums, *k.shape[:2], None)
        or common.unfit_shape(lse, batch, heads)
        or common.unfit_sharing(heads, k.shape[1])
    )
    return sides or live_scores_refuses(q.reshape(batch, k.shape[1], -1, dim), k, live)


def row_weights_refuses(q, x, scale, reduce, live=None):
    return live_scores_refuses(q, x, live)


def _unfit(q: Tensor, x: Tensor | Ragged, width: int) -> str | None:
    first = first_of(x)
    sizes = x.sizes if isinstance(x, Ragged) else (x.shape[2],)
    if first.stride(3) != 1 and (first.stride(2) != 1 or any(size % BESIDE for size in sizes)):
        return (
            f"needs the channels of a row side by side, or a multiple of {BESIDE} rows of a channel"
        )
    sides = common.unfit_shape(x, *q.shape[:2], None, None if isinstance(x, Ragged) else width)
    return sides or common.unfit_floats(q, first) or common.unfit_group(q.shape[2])


@triton.jit(do_not_specialize=["count"])
def _scores(
    q, x, counts, live, out, tops, lses, whole, scale, width: tl.int64, count, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, BY_SIGN: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Multiply a group's queries with a block of rows of x. For several sequences, `counts` says
    how many rows each has. `live`: only so many rows count, the others get minus infinity. If `tops`
    is given, each head's largest score in the block is written there; to `lses` the log-sum-exp of its scores
    times `scale`. Rows of `out` lie `width` entries apart. If `whole` is given, the log-sum-exps of
    each head's whole softmax, `out` has one row per group, to which weights are added.

    BY_SIGN: the first half of a row is multiplied with the positive parts of a query, the second
    half with the negative ones. BY_CHANNEL: the rows of a channel lie side by side, and channels
    are as far apart as rows else are. Of several sequences, one may have fewer channels than the others: its
    queries are zero in the last ones, which are not read."""
    this = program_at(1)
    rows, apart = head_rows(x, this // GROUPS, this % GROUPS)
    end = number_of(counts, this // GROUPS, count)
    count = tl.minimum(end, number_of(live, this // GROUPS, end))
    row, head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, padded(HEADS))
    of_head = this * HEADS + head
    scores = tl.zeros([head.shape[0], BLOCK], tl.float32)
    if tl.program_id(0) * BLOCK < count:
        for start in range(0, WIDTH, STEP):
            channel = start + tl.arange(0, STEP)
            mine = (head < HEADS)[:, None] & (channel < WIDTH)
            if BY_SIGN:
                half: tl.constexpr = WIDTH // 2
                query = load(q + of_head[:, None] * half + channel % half, mine)
                meets = (query > 0) == (channel < half)
                query = tl.where(meets, query, tl.zeros_like(query))
            else:
                query = load(q + of_head[:, None] * WIDTH + channel, mine)
            if BY_CHANNEL:
                read = channel < WIDTH
                if x.listed:
                    some = tl.max(tl.abs(query.to(tl.float32)), 0) > 0
                    read = channel < tl.max(tl.where(some, channel + 1, 0), 0)
                # whole vectors are loaded
                there = read[:, None] & (row // _BESIDE * _BESIDE < count)
                tile = load(rows + channel[:, None].to(tl.int64) * apart + row, there)
                scores += product(query, tile)
            else:
                there = (row < count)[:, None] & (channel < WIDTH)
                tile = load(rows + row[:, None] * apart + channel, there)
                scores += product(query, tl.trans(tile))
    if live is not None or lses is not None:
        scores = tl.where(row < count, scores, float("-inf"))
    of_block = of_head * tl.num_programs(0) + tl.program_id(0)
    if tops is not None:
        tl.store(tops + of_block, tl.max(scores, 1), mask=head < HEADS)
    if lses is not None:
        tl.store(lses + of_block, row_log_sum_exp(scores * scale), mask=head < HEADS)
    if whole is not None:
        lse, to = load(whole + of_head, head < HEADS), out + this * width + row
        weights = tl.where((head < HEADS)[:, None], tl.exp(scores * scale - lse[:, None]), 0.0)
        tl.store(to, load(to, row < count) + tl.sum(weights, 0), mask=row < count)
    else:
        to = out + of_head[:, None] * width + row
        tl.store(to, scores, mask=(head < HEADS)[:, None] & (row < end))
