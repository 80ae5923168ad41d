"""Weighs product-quantised keys: one kernel makes a table of q . centroid, a second looks it up by
code."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.choose import log_sum_exp
from kernels.gpu.common import head_rows, located, padded, product, unfit, unfit_floats, unfit_group, unfit_shape
from kernels.ragged import Ragged, first_of

_CODES = (torch.uint8, torch.int16, torch.int32, torch.int64)
_BLOCK = 256  # tokens
_CLUSTERS = 128  # clusters at once, at most
_MOST_CHANNELS = 128  # channels of a sub-vector that are taken at once


def pq_weights(q: Tensor, centroids: Tensor | Ragged, codes: Tensor | Ragged, scale: float) -> Tensor | Ragged:
    """Compute the softmax weights [B G S] of product-quantised keys, summed over a group's query
    heads, as kernels/reference.py defines it. q [B H 1 D], centroids [B G m C d'], codes [B G S m].
    Scores are never written: codes are small, so looking them up twice is cheaper."""
    (batch, groups), count = centroids.shape[:2], codes.shape[2]
    heads = q.shape[1] // groups
    out = q.new_empty((batch, groups, count), dtype=torch.float32)
    if count:
        table = _table_of(q, centroids)
        lses = q.new_empty((batch, groups, heads, triton.cdiv(count, _BLOCK)), dtype=torch.float32)
        _run(table, codes, heads, scale, lses=lses)
        _run(table, codes, heads, scale, lse=log_sum_exp(lses, 1.0), weights=out)
    return Ragged.filled_up(out, codes.sizes) if isinstance(codes, Ragged) else out


def pq_weights_refuses(q: Tensor, centroids: Tensor | Ragged, codes: Tensor | Ragged, scale: float) -> str | None:
    if isinstance(centroids, Ragged) and not centroids.dense:
        return "needs the centroids of a sequence without gaps"
    if codes.dtype not in _CODES:
        return f"takes codes of whole numbers, got {codes.dtype}"
    batch, groups, parts, _, width = centroids.shape
    sharing = q.shape[1] // groups
    return (
        unfit_shape(q, batch, sharing * groups, 1, parts * width)
        or unfit_shape(codes, batch, groups, None, parts)
        or unfit_floats(q, first_of(centroids))
        or unfit(first_of(codes))
        or unfit_group(sharing)
    )


def _table_of(q: Tensor, centroids: Tensor | Ragged) -> Tensor:
    """Return the products of all centroids [B G m C d'] with the queries q [B H 1 D], as a table
    [B G m C g] in fp32. g, the query heads of a group, is padded to a power of two so that looking
    up a code is one aligned read."""
    batch, groups, parts, clusters, width = centroids.shape
    heads = q.shape[1] // groups
    block = min(_CLUSTERS, padded(clusters))
    table = q.new_empty((batch, groups, parts, clusters, padded(heads, 1)), dtype=torch.float32)
    sizes = centroids.counts if isinstance(centroids, Ragged) else None
    first, places, aligned = located(centroids)
    _table[(batch * groups * parts, triton.cdiv(clusters, block))](
        q.contiguous(), first.contiguous(), places, sizes, table, groups, parts, clusters, width,
        min(_MOST_CHANNELS, padded(width)), heads, padded(heads), table.shape[4], block, aligned, num_warps=4,
    )  # fmt: skip
    return table


def _run(
    table: Tensor, codes: Tensor | Ragged, heads: int, scale: float, lses: Tensor | None = None,
    lse: Tensor | None = None, weights: Tensor | None = None,
) -> None:  # fmt: skip
    batch, groups, parts, clusters, fold = table.shape
    count, counts = codes.shape[2], codes.counts if isinstance(codes, Ragged) else None
    first, places, aligned = located(codes)
    _look_up[(triton.cdiv(count, _BLOCK), batch * groups)](
        table, first, places, counts, lses, lse, weights, scale, *first.stride(), count, groups, parts, clusters, heads,
        fold, _BLOCK, aligned, num_warps=4,
    )  # fmt: skip


@triton.jit
def _table(
    q, centroids, places, sizes, table, GROUPS: tl.constexpr, PARTS: tl.constexpr, CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of the centroids of one sub-vector with a group's query heads, and write
    KEPT columns (heads, some of them padding) to `table`.

    For several sequences, `places` says where the centroids of each lie, and `sizes` how many a
    sub-vector has."""
    this = tl.program_id(0).to(tl.int64)
    cluster, head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD)
    at, existing = (this * CLUSTERS + cluster)[:, None], cluster < CLUSTERS
    rows = centroids + at * WIDTH
    if places is not None:
        sequence = this // PARTS // GROUPS
        group, step = head_rows(centroids, places, sequence, this // PARTS % GROUPS, 0, 0, 0, ALIGNED)
        rows = group + this % PARTS * step + cluster[:, None] * WIDTH
        existing = cluster < tl.load(sizes + sequence)
    of_query = (this // PARTS * HEADS + head) * PARTS + this % PARTS
    products = tl.zeros([BLOCK, FOLD], tl.float32)
    for start in range(0, WIDTH, STEP):
        channel = start + tl.arange(0, STEP)
        there, mine = existing[:, None] & (channel < WIDTH), (head < HEADS)[:, None] & (channel < WIDTH)
        centroid = tl.load(rows + channel, mask=there, other=0.0)
        query = tl.load(q + of_query[:, None] * WIDTH + channel, mask=mine, other=0.0)
        products += product(centroid, tl.trans(query))
    tl.store(table + at * KEPT + head, products, mask=(cluster < CLUSTERS)[:, None] & (head < KEPT))


@triton.jit(do_not_specialize=["count"])
def _look_up(
    table, codes, places, counts, lses, lse, weights, scale, cb: tl.int64, cg: tl.int64, ct: tl.int64, cp: tl.int64,
    count, GROUPS: tl.constexpr, PARTS: tl.constexpr, CLUSTERS: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum the table's entries of a block of tokens by their codes. If `lses` is given, write each
    head's log-sum-exp of the block; else write the weights, using `lse`, the log-sum-exp of whole
    rows.

    For several sequences, `counts` says how many tokens each has; a block with none of them has a
    log-sum-exp of minus infinity."""
    block, this = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, head = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD)
    mine, live = head < HEADS, token < count
    if counts is not None:
        live = token < tl.load(counts + this // GROUPS)
    first, step = head_rows(codes, places, this // GROUPS, this % GROUPS, cb, cg, ct, ALIGNED)
    at = first + token * step
    scores = tl.zeros([FOLD, BLOCK], tl.float32)
    for part in range(PARTS):
        code = tl.load(at + part * cp, mask=live, other=0).to(tl.int32)
        scores += tl.load(table + (this * PARTS + part) * CLUSTERS * FOLD + (code * FOLD + head[:, None]))
    scores = tl.where(live, scores * scale, float("-inf"))
    of_head = this * HEADS + head
    if lses is not None:
        top = tl.max(scores, 1)
        if counts is not None:
            top = tl.where(top == float("-inf"), 0.0, top)
        total = top + tl.log(tl.sum(tl.exp(scores - top[:, None]), 1))
        tl.store(lses + of_head * tl.num_programs(0) + block, total, mask=mine)
    else:
        whole = tl.load(lse + of_head, mask=mine, other=float("inf"))  # padding heads weigh nothing
        scores = tl.exp(scores - whole[:, None])
        tl.store(weights + this * count + token, tl.sum(scores, 0), mask=live)
