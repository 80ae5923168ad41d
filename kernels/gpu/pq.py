"""Weighs product-quantised keys: one kernel makes a table of q . centroid, a second looks it up by code."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.choose import log_sum_exp
from kernels.gpu.common import padded, product, unfit, unfit_floats, unfit_group
from kernels.ragged import RAGGED, Ragged

_CODES = (torch.uint8, torch.int16, torch.int32, torch.int64)
_BLOCK = 256  # tokens
_CLUSTERS = 128  # clusters at once, at most
_MOST_CHANNELS = 128  # channels of a sub-vector that are taken at once


def pq_weights(q: Tensor, centroids: Tensor, codes: Tensor, scale: float) -> Tensor:
    """Compute the softmax weights of coded keys, as kernels/reference.py defines it. Scores are never written: codes
    are small, so looking them up twice is cheaper."""
    (batch, groups), count = centroids.shape[:2], codes.shape[2]
    heads = q.shape[1] // groups
    out = q.new_empty((batch, groups, count), dtype=torch.float32)
    if count:
        table = _table_of(q, centroids)
        lses = q.new_empty((batch, groups, heads, triton.cdiv(count, _BLOCK)), dtype=torch.float32)
        _run(table, codes, heads, scale, lses=lses)
        _run(table, codes, heads, scale, lse=log_sum_exp(lses, 1.0), weights=out)
    return out


def pq_weights_refuses(q: Tensor, centroids: Tensor, codes: Tensor, scale: float) -> str | None:
    if isinstance(codes, Ragged):
        return RAGGED
    if codes.dtype not in _CODES:
        return f"takes codes of whole numbers, got {codes.dtype}"
    return unfit_floats(q, centroids) or unfit(codes) or unfit_group(q.shape[1] // centroids.shape[1])


def _table_of(q: Tensor, centroids: Tensor) -> Tensor:
    """Return the table [B G m C g] in fp32, with g padded to a power of two so that a lookup is one aligned read."""
    batch, groups, parts, clusters, width = centroids.shape
    heads = q.shape[1] // groups
    block = min(_CLUSTERS, padded(clusters))
    table = q.new_empty((batch, groups, parts, clusters, padded(heads, 1)), dtype=torch.float32)
    _table[(batch * groups * parts, triton.cdiv(clusters, block))](
        q.contiguous(), centroids.contiguous(), table, parts, clusters, width, min(_MOST_CHANNELS, padded(width)),
        heads, padded(heads), table.shape[4], block, num_warps=4,
    )  # fmt: skip
    return table


def _run(
    table: Tensor, codes: Tensor, heads: int, scale: float, lses: Tensor | None = None, lse: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:  # fmt: skip
    batch, groups, parts, clusters, fold = table.shape
    count = codes.shape[2]
    _look_up[(triton.cdiv(count, _BLOCK), batch * groups)](
        table, codes, lses, lse, weights, scale, *codes.stride(), count, groups, parts, clusters, heads, fold, _BLOCK,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _table(
    q, centroids, table, PARTS: tl.constexpr, CLUSTERS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    HEADS: tl.constexpr, FOLD: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply a block of one sub-vector's centroids with the group's query heads; store KEPT columns."""
    this = tl.program_id(0).to(tl.int64)
    cluster, head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD)
    at = (this * CLUSTERS + cluster)[:, None]
    of_query = (this // PARTS * HEADS + head) * PARTS + this % PARTS
    products = tl.zeros([BLOCK, FOLD], tl.float32)
    for start in range(0, WIDTH, STEP):
        channel = start + tl.arange(0, STEP)
        there, mine = (cluster < CLUSTERS)[:, None] & (channel < WIDTH), (head < HEADS)[:, None] & (channel < WIDTH)
        centroid = tl.load(centroids + at * WIDTH + channel, mask=there, other=0.0)
        query = tl.load(q + of_query[:, None] * WIDTH + channel, mask=mine, other=0.0)
        products += product(centroid, tl.trans(query))
    tl.store(table + at * KEPT + head, products, mask=(cluster < CLUSTERS)[:, None] & (head < KEPT))


@triton.jit(do_not_specialize=["count"])
def _look_up(
    table, codes, lses, lse, weights, scale, cb: tl.int64, cg: tl.int64, ct: tl.int64, cp: tl.int64, count,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, CLUSTERS: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute each head's log-sum-exp of a block of tokens or, given that of whole rows, the weights."""
    block, this = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token, head = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD)
    mine, live = head < HEADS, token < count
    at = codes + this // GROUPS * cb + this % GROUPS * cg + token * ct
    scores = tl.zeros([FOLD, BLOCK], tl.float32)
    for part in range(PARTS):
        code = tl.load(at + part * cp, mask=live, other=0).to(tl.int32)
        scores += tl.load(table + (this * PARTS + part) * CLUSTERS * FOLD + (code * FOLD + head[:, None]))
    scores = tl.where(live, scores * scale, float("-inf"))
    of_head = this * HEADS + head
    if lses is not None:
        top = tl.max(scores, 1)
        total = top + tl.log(tl.sum(tl.exp(scores - top[:, None]), 1))
        tl.store(lses + of_head * tl.num_programs(0) + block, total, mask=mine)
    else:
        whole = tl.load(lse + of_head, mask=mine, other=float("inf"))  # padding heads weigh nothing
        scores = tl.exp(scores - whole[:, None])
        tl.store(weights + this * count + token, tl.sum(scores, 0), mask=live)
