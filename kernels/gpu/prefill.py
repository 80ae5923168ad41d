"""Computes prefill attention, whole or within a window, and its column sums: a pass over rows, then
one over columns.

The first pass stores each query's log-sum-exp. Weights are not stored, so memory is linear in the
tokens; logits are computed twice, as in FlashAttention's backward pass (arXiv 2205.14135)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import ops
from kernels.gpu import decode
from kernels.gpu.choose import whole_log_sum_exp
from kernels.gpu.common import (
    finite,
    head_rows,
    load,
    located,
    padded,
    product,
    program_at,
    split,
    stages,
    unfit_floats,
    unfit_group,
    unfit_heads,
    unfit_shape,
)
from kernels.gpu.scores import row_scores
from kernels.ragged import filled
from kernels.reference import Segment
from kernels.windowed import room_by_token

EVERY = 1 << 30  # a window that holds every key
_FEW = 256  # so few queries do not fill a device, so the keys are cut as well


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last T of S tokens, q [B H T D], k, v [B G S D] -> [B H T D],
    as kernels/reference.py defines it. The result lies in memory as [B T H D], which the output
    projection wants."""
    if q.shape[2] == 1:
        return decode.segment_attention(q, [Segment(k, v)], scale)
    return windowed_attention(q, k, v, scale, k.shape[2] - q.shape[2], EVERY)[0]


def prefill_attention_refuses(q, k, v, scale):
    one = unfit_group(q.shape[1] // k.shape[1]) if q.shape[2] == 1 else None  # by the decode kernel
    return column_sums_refuses(q, k, scale) or windowed_attention_refuses(q, k, v) or one


def column_sums(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Sum the attention that each key receives from the queries, q [B H T D], k [B G S D] ->
    [B H S], as kernels/windowed.py defines it."""
    new, stored = q.shape[2], k.shape[2]
    (rows, fold), programs = _folded(q, k), q.shape[0] * k.shape[1]
    programs = programs if fold else q.shape[0] * q.shape[1] * triton.cdiv(new, rows)
    pieces, length = split(stored, programs, 128) if new <= _FEW else (1, stored)
    lse = q.new_empty((*q.shape[:3], pieces), dtype=torch.float32)
    _run_rows(q, k, None, None, lse, scale, stored - new, EVERY, length, (rows, fold))
    return _run_columns(
        q, k, whole_log_sum_exp(lse), scale, stored - new, EVERY, rows if fold else None, fold
    )


def column_sums_refuses(q, k, scale):
    if q.shape[2] > k.shape[2]:
        return f"takes no more queries than keys, got {q.shape[2]} and {k.shape[2]}"
    return _unfit(q, k)


def prefill_attention_with_column_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention [B H T D] and the attention that each key receives, summed over
    queries, [B H S], as kernels/windowed.py defines them."""
    if q.shape[2] == 1:
        return _one_query(q, k, v, scale)
    # torch's FlashAttention is faster, where it is
    first = k.shape[2] - q.shape[2]
    out, lse = ops.windowed_attention(q, k, v, scale, first, k.shape[2])
    return out, _run_columns(q, k, lse.contiguous(), scale, first, EVERY)


prefill_attention_with_column_sums_refuses = prefill_attention_refuses


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int
) -> tuple[Tensor, Tensor]:
    """Compute attention in which query t sees the last `window` keys up to key `first` + t, and its
    log-sum-exp, as kernels/windowed.py defines it. -> [B H T D], which lies in memory as [B T H D],
    and [B H T]"""
    out = room_by_token(q)
    lse = q.new_empty((*q.shape[:3], 1), dtype=torch.float32)
    _run_rows(q, k, v, out, lse, scale, first, window, k.shape[2], (_rows_at_once(q), 0))
    return out, lse.squeeze(3)


def windowed_attention_refuses(q, k, v, *_):
    return _unfit(q, k, v)


def windowed_sums(
    q: Tensor, k: Tensor, lse: Tensor, scale: float, first: int, window: int
) -> Tensor:
    return _run_columns(q, k, lse.contiguous(), scale, first, window)


def windowed_sums_refuses(q, k, lse, *_):
    return _unfit(q, k) or unfit_shape(lse, *q.shape[:3]) or unfit_floats(lse)


def _one_query(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `prefill_attention_with_column_sums` for a single query per sequence by the decode
    kernel, which cuts the keys into pieces: one query would leave most of the device idle
    otherwise."""
    out, lse = decode.segment_attention_with_lse(q, [Segment(k, v)], scale)
    logits = filled(row_scores(q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k))
    return out, logits.view(*q.shape[:2], -1).mul_(scale).sub_(lse.unsqueeze(-1)).exp_()


def _unfit(q: Tensor, k: Tensor, *v: Tensor) -> str | None:
    """Return why no kernel can attend from q to keys k and values v, which may be left out, or
    None."""
    if q.shape[1] % k.shape[1]:
        return f"takes whole groups of heads, got {q.shape[1]} query heads of {k.shape[1]} KV heads"
    sides = [
        unfit_shape(k, q.shape[0], None, None, q.shape[3]),
        *(unfit_shape(x, *k.shape) for x in v),
    ]
    return next(filter(None, sides), None) or unfit_heads(q, k, *v)


def _stages(q: Tensor) -> int:
    """Return how many tiles a loop holds at once (Triton's num_stages). Of fp32 heads with more than 64
    channels it is one, because some cards have only 99 KB of shared memory for a program."""
    return 1 if q.element_size() == 4 and q.shape[3] > 64 else stages(q)


def _rows_at_once(q: Tensor) -> int:
    return (
        128
        if q.shape[3] * q.element_size() <= 256 and q.element_size() == 2 and q.shape[2] > 64
        else 64
    )


def _folded(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return how many rows of queries a program takes at once, and a power of two. If this is 0,
    the rows are of one query head. Otherwise they are the queries of all query heads of a KV head,
    so that keys are read once for the group, and the power of two says how many rows each query
    head gets."""
    fold = padded(q.shape[2], 1)
    rows = padded(fold * padded(q.shape[1] // k.shape[1], 1))
    most = 128 if q.element_size() == 2 and q.shape[3] <= 128 else 64
    return (rows, fold) if rows <= most else (_rows_at_once(q), 0)


def _run_rows(
    q: Tensor, k: Tensor, v: Tensor | None, out: Tensor | None, lse: Tensor, scale: float, first: int, window: int,
    length: int, tile: tuple[int, int],
) -> None:  # fmt: skip
    """Write each query's log-sum-exp into lse [B H T pieces], one for each piece of `length` keys,
    and if v is given its attention into `out`. Query t sees the last `window` keys up to key
    `first` + t. tile: rows of queries that a program takes, and what `_folded` says behind them, for
    a call without v and window."""
    (batch, heads, new, dim), (rows, fold) = q.shape, tile
    grid = (1, batch * k.shape[1]) if fold else (triton.cdiv(new, rows), batch * heads)
    _rows[(*grid, lse.shape[3])](
        located(q),
        located(k),
        None if v is None else located(v),
        None if out is None else located(out),
        lse,
        scale,
        new,
        k.shape[2],
        first,
        window,
        length,
        lse.shape[3],
        heads,
        heads // k.shape[1],
        dim,
        rows,
        fold,
        num_warps=max(4, rows // 16),
        num_stages=_stages(q),
    )


def _run_columns(
    q: Tensor, k: Tensor, lse: Tensor, scale: float, first: int, window: int, rows: int | None = None, fold: int = 0
) -> Tensor:  # fmt: skip
    """Return the attention that each key receives from all queries that see it, [B H S], given lse,
    the log-sum-exp of each query. Query t sees the last `window` keys up to key `first` + t. `rows`
    and `fold`: as `_folded` returns them, for a call without window."""
    batch, heads, new, dim = q.shape
    stored, narrow = k.shape[2], q.element_size() == 2
    keys = 128 if narrow else 64
    sums = q.new_empty((batch, heads, stored), dtype=torch.float32)
    _columns[(triton.cdiv(stored, keys), batch * (k.shape[1] if fold else heads))](
        located(q), located(k), lse, sums, scale, new, stored, first, window, heads, heads // k.shape[1], dim,
        rows or (64 if narrow else 32), keys, fold, num_warps=keys // 16, num_stages=_stages(q),
    )  # fmt: skip
    return sums


@triton.jit
def _queries_of(
    this, start, new, SHARE: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr
):  # fmt: skip
    """Return, for each of ROWS rows of queries, its query head (counted through the sequences), its
    place among the head's queries, and whether there is such a query. Without FOLD the rows are the
    queries of query head `this` from `start` on. With FOLD they are all queries of the query heads
    of KV head `this`, FOLD rows for each."""
    row = start + tl.arange(0, ROWS)
    if FOLD:
        head, place = row // FOLD, row % FOLD
        live = (head < SHARE) & (place < new)
        head += this * SHARE
    else:
        head, place, live = this, row, row < new
    return head, place, live


@triton.jit(do_not_specialize=["new", "stored", "first", "window", "length", "pieces"])
def _rows(
    q, k, v, out, lse, scale, new, stored, first, window, length, pieces, HEADS: tl.constexpr, SHARE: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Attend from a block of queries of one head, or with FOLD of all query heads of a KV head, to
    one piece of the keys that they see: write each query's log-sum-exp to `lse`, and with v its
    attention to `out`. Queries and keys are multiplied PARTS parts of the head one after the other:
    a whole fp32 head, as two numbers of tf32 each, does not fit into registers."""
    NARROW: tl.constexpr = q.x.dtype.element_ty.primitive_bitwidth == 16
    WIDE: tl.constexpr = padded(DIM)
    KEYS: tl.constexpr = 64 if NARROW else 32
    PARTS: tl.constexpr = 1 if NARROW else max(1, WIDE // 32)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    this = program_at(1)
    piece = tl.program_id(2)
    head, row, live = _queries_of(this, block * ROWS, new, SHARE, ROWS, FOLD)
    group, dim = this if FOLD else this // SHARE, tl.arange(0, WIDE)
    batch = group // (HEADS // SHARE)
    keys, key_step = head_rows(k, batch, group % (HEADS // SHARE))
    if v is not None:
        values, value_step = head_rows(v, batch, group % (HEADS // SHARE))
    queries, query_step = head_rows(q, batch, 0)
    queries += (head % HEADS * q.group + row * query_step)[:, None]
    # a load within the loop would be loaded ahead, into shared memory that others need
    if PARTS == 1:
        query = load(queries + dim, live[:, None] & (dim < DIM))
    position = first + row
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    begin = tl.maximum(piece * length, first + block * ROWS - window + 1)
    last = new if FOLD else tl.minimum((block + 1) * ROWS, new)
    end = tl.minimum(tl.minimum((piece + 1) * length, stored), first + last)
    for start in range(begin, end, KEYS):
        token = start + tl.arange(0, KEYS)
        scores = tl.zeros([ROWS, KEYS], tl.float32)
        for part in tl.static_range(PARTS):
            some = part * (WIDE // PARTS) + tl.arange(0, WIDE // PARTS)
            if PARTS > 1:
                query = load(queries + some, live[:, None] & (some < DIM))
            key = load(
                keys + token[:, None] * key_step + some, (token < end)[:, None] & (some < DIM)
            )
            scores += product(query, tl.trans(key))
        seen = (token <= position[:, None]) & (token < end)
        if not FOLD:
            seen &= token > position[:, None] - window
        logits = tl.where(seen, scores * scale, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        # minus infinity: nothing seen in this piece yet
        shift = finite(highest)
        shrink, weights = tl.exp(top - shift), tl.exp(logits - shift[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if v is not None:
            real = (token < end)[:, None] & (dim < DIM)
            value = load(values + token[:, None] * value_step + dim, real)
            mixed = mixed * shrink[:, None] + product(weights.to(value.dtype), value)
        top = highest
    to = (head * new + row) * pieces + piece
    tl.store(lse + to, top + tl.log(total), mask=live)
    if v is not None:
        outs, out_step = head_rows(out, batch, 0)
        tl.store(
            outs + (head % HEADS * out.group + row * out_step)[:, None] + dim,
            mixed / tl.where(total > 0, total, 1.0)[:, None],
            mask=live[:, None] & (dim < DIM),
        )


@triton.jit(do_not_specialize=["new", "stored", "first", "window"])
def _columns(
    q, k, lse, sums, scale, new, stored, first, window, HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Sum the softmax weights that a block of one head's keys receives from all queries that see
    any of them; with FOLD, from the queries of each query head of a KV head."""
    this = program_at(1)
    shared: tl.constexpr = ROWS // FOLD if FOLD else 1  # heads of a block of queries
    token, dim = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, padded(DIM))
    there = (token < stored)[:, None] & (dim < DIM)
    group = this if FOLD else this // SHARE
    batch = group // (HEADS // SHARE)
    keys, key_step = head_rows(k, batch, group % (HEADS // SHARE))
    key = load(keys + token[:, None] * key_step + dim, there)
    queries, query_step = head_rows(q, batch, 0)
    received = tl.zeros([KEYS, shared], tl.float32)
    begin = 0 if FOLD else tl.maximum(tl.program_id(0) * KEYS - first, 0)
    end = ROWS if FOLD else tl.minimum(new, (tl.program_id(0) + 1) * KEYS - 1 - first + window)
    for start in range(begin, end, ROWS):
        head, row, live = _queries_of(this, start, new, SHARE, ROWS, FOLD)
        real = live[:, None] & (dim < DIM)
        at = queries + (head % HEADS * q.group + row * query_step)[:, None]
        query = load(at + dim, real)
        whole = load(lse + head * new + row, live)
        logits = product(key, tl.trans(query)) * scale - whole
        seen = token[:, None] <= tl.where(live, first + row, -1)
        if not FOLD:
            seen &= token[:, None] > first + row - window
        weights = tl.where(seen, tl.exp(logits), 0.0)
        received += tl.sum(tl.reshape(weights, [KEYS, shared, ROWS // shared]), 2)
    place = tl.arange(0, shared)
    to = (this * SHARE if FOLD else this) + place
    real = (token < stored)[:, None] & (place < SHARE)
    tl.store(sums + to * stored + token[:, None], received, mask=real)
