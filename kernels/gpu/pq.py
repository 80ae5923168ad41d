"""Weighs product-quantised keys: one kernel makes a table of q . centroid, a second looks it up by
code.

To choose the best of keys with two codes each, no weight of a token is computed: all tokens of a
cell, which is a pair of codes, weigh the same, and there are many fewer cells than tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.choose import row_log_sum_exp, whole_log_sum_exp
from kernels.gpu.common import (
    Rows,
    finite,
    head_rows,
    known,
    lengths_of,
    load,
    load_wide,
    located,
    number_of,
    padded,
    product,
    program_at,
    unfit,
    unfit_floats,
    unfit_group,
    unfit_shape,
)
from kernels.gpu.top_k import MOST, fill, kth_largest, pieces_of, placed, tiles_of
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, first_of, too_few, with_sizes

_CODES = (torch.uint8, torch.int16, torch.int32, torch.int64)
_BLOCK = tl.constexpr(256)  # tokens
_CLUSTERS = 128  # clusters at once, at most
_MOST_CHANNELS = 128  # channels of a sub-vector that are taken at once
# clusters of a sub-vector, at most, where tokens are chosen by cells: a program holds all cells
_CELLS = 64
_SHARING = 16  # query heads of a KV head, likewise


def pq_weights(
    q: Tensor, centroids: Tensor | Ragged, codes: Tensor | Ragged, scale: float
) -> Tensor | Ragged:
    """Compute the softmax weights [B G S] of product-quantised keys, summed over a group's query
    heads, as kernels/reference.py defines it. q [B H 1 D], centroids [B G m C d'], codes [B G S m].
    Scores are never written: codes are small, so looking them up twice is cheaper."""
    (batch, groups), count = centroids.shape[:2], codes.shape[2]
    out = q.new_empty((batch, groups, count), dtype=torch.float32)
    if count:
        table, heads = _table_of(q, centroids), q.shape[1] // groups
        lses = q.new_empty((batch, groups, heads, triton.cdiv(count, _BLOCK)), dtype=torch.float32)
        _run(table, codes, heads, scale, lses=lses)
        _run(table, codes, heads, scale, lse=whole_log_sum_exp(lses), weights=out)
    return with_sizes(out, codes)


def pq_weights_refuses(q, centroids, codes, *_):
    if isinstance(centroids, Ragged) and not centroids.dense:
        return "needs the centroids of a sequence without gaps"
    if codes.dtype not in _CODES:
        return f"takes codes of whole numbers, got {codes.dtype}"
    (batch, groups, parts), width = centroids.shape[:3], centroids.shape[4]
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
    _table[(batch * groups * parts, triton.cdiv(clusters, block))](
        q.contiguous(), _parts(centroids), lengths_of(centroids), table, groups, parts, clusters, width,
        min(_MOST_CHANNELS, padded(width)), heads, block,
    )  # fmt: skip
    return table


def _parts(centroids: Tensor | Ragged) -> Rows:
    """Return where the centroids [B G m C d'] lie: the rows of a head are its parts."""
    return located(centroids if isinstance(centroids, Ragged) else centroids.contiguous())


def _run(
    table: Tensor, codes: Tensor | Ragged, heads: int, scale: float, lses: Tensor | None = None,
    lse: Tensor | None = None, weights: Tensor | None = None,
) -> None:  # fmt: skip
    batch, groups, parts, clusters, _ = table.shape
    count = codes.shape[2]
    _look_up[(triton.cdiv(count, _BLOCK), batch * groups)](
        table,
        located(codes),
        lengths_of(codes),
        lses,
        lse,
        weights,
        scale,
        first_of(codes).stride(3),
        count,
        groups,
        parts,
        clusters,
        heads,
    )


def pq_best(
    q: Tensor, centroids: Tensor | Ragged, codes: Tensor | Ragged, held: Tensor | Ragged, scale: float,
    count: int | PerSequence,
) -> Tensor | Ragged:  # fmt: skip
    """Find the `count` tokens with the largest weights of product-quantised keys, in ascending
    order, as kernels/reference.py defines it; among equal weights the first tokens. q [B H 1 D],
    centroids [B G 2 C d'], codes [B G S 2], held [B G C*C] -> [B G count]"""
    batch, groups, _, clusters, width = centroids.shape
    counts, most = known(count, q.device)
    out = torch.empty((batch, groups, most), dtype=torch.int64, device=q.device)
    if out.numel():
        rows, tokens = batch * groups, codes.shape[2]
        pieces, tile = pieces_of(rows, tokens)
        cells = padded(clusters)
        kinds = torch.empty((rows, cells, cells), dtype=torch.int8, device=q.device)
        needs = torch.empty(rows, dtype=torch.int32, device=q.device)
        numbers = torch.empty((rows, pieces, 2), dtype=torch.int32, device=q.device)
        of_cells: Tensor | Ragged = (
            held if isinstance(held, Ragged) else held.contiguous().unsqueeze(3)
        )
        _cells[(rows,)](
            q.contiguous(), _parts(centroids), lengths_of(centroids), located(of_cells), counts, kinds, needs, scale,
            most, groups, clusters, width, q.shape[1] // groups, num_warps=max(8, padded(width) // 8),
        )  # fmt: skip
        common = (
            located(codes),
            lengths_of(codes),
            kinds,
            numbers,
            tokens,
            groups,
            cells,
            tile,
        )
        _count_kinds[(rows, pieces)](*common, num_warps=tile // 512)
        _place_kinds[(rows, pieces)](
            *common, out, needs, counts, most, padded(pieces, 1), num_warps=tile // 512
        )
    return with_sizes(out, count)


def pq_best_refuses(q, centroids, codes, held, scale, count):
    batch, groups, parts, clusters, width = centroids.shape
    sharing = q.shape[1] // groups
    if parts != 2 or clusters > _CELLS or width > _MOST_CHANNELS or sharing > _SHARING:
        return (
            f"takes 2 parts of up to {_MOST_CHANNELS} channels, {_CELLS} centroids and {_SHARING} query heads of a KV "
            f"head, got {parts} of {width}, {clusters} and {sharing}"
        )
    if (
        codes.dtype != torch.uint8
        or first_of(codes).stride()[2:] != (2, 1)
        or codes.shape[2] > MOST.value
    ):
        return f"takes up to {MOST.value} tokens whose two codes are bytes side by side"
    if too_few(codes, count, 2):
        return "leaves the error for too large a count to torch"
    cells = None if isinstance(held, Ragged) else clusters**2
    if held.dtype != torch.int32 or isinstance(held, Ragged) != isinstance(centroids, Ragged):
        return (
            f"takes int32 numbers of tokens, as many sequences apart as centroids, got {held.dtype}"
        )
    return unfit_shape(held, batch, groups, cells) or pq_weights_refuses(q, centroids, codes)


@triton.jit
def _table(
    q, centroids, sizes, table, GROUPS: tl.constexpr, PARTS: tl.constexpr, CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply a block of the centroids of one sub-vector with a group's query heads, and write these
    columns, and some of padding, to `table`. For several sequences, `sizes` says how many centroids
    a sub-vector has."""
    KEPT: tl.constexpr = padded(HEADS, 1)
    this = program_at(0)
    sequence, cluster = this // PARTS // GROUPS, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = tl.arange(0, padded(HEADS))
    first, step = head_rows(centroids, sequence, this // PARTS % GROUPS)
    rows = first + this % PARTS * step + cluster[:, None] * WIDTH
    existing = cluster < number_of(sizes, sequence, CLUSTERS)
    of_query = (this // PARTS * HEADS + head) * PARTS + this % PARTS
    products = tl.zeros([BLOCK, head.shape[0]], tl.float32)
    for start in range(0, WIDTH, STEP):
        channel = start + tl.arange(0, STEP)
        there = existing[:, None] & (channel < WIDTH)
        mine = (head < HEADS)[:, None] & (channel < WIDTH)
        centroid = load(rows + channel, there)
        query = load(q + of_query[:, None] * WIDTH + channel, mine)
        products += product(centroid, tl.trans(query))
    at = (this * CLUSTERS + cluster)[:, None]
    tl.store(table + at * KEPT + head, products, mask=(cluster < CLUSTERS)[:, None] & (head < KEPT))


@triton.jit(do_not_specialize=["count"])
def _look_up(
    table, codes, counts, lses, lse, weights, scale, cp: tl.int64, count, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    CLUSTERS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Sum the table's entries of a block of tokens by their codes. If `lses` is given, write each
    head's log-sum-exp of the block; else write the weights, using `lse`, the log-sum-exp of whole
    rows.

    For several sequences, `counts` says how many tokens each has; a block with none of them has a
    log-sum-exp of minus infinity."""
    FOLD: tl.constexpr = padded(HEADS, 1)
    block, this = tl.program_id(0), program_at(1)
    token, head = block * _BLOCK + tl.arange(0, _BLOCK), tl.arange(0, FOLD)
    mine, live = head < HEADS, token < number_of(counts, this // GROUPS, count)
    first, step = head_rows(codes, this // GROUPS, this % GROUPS)
    at = first + token * step
    scores = tl.zeros([FOLD, _BLOCK], tl.float32)
    for part in range(PARTS):
        code = load(at + part * cp, live).to(tl.int32)
        scores += tl.load(
            table + (this * PARTS + part) * CLUSTERS * FOLD + (code * FOLD + head[:, None])
        )
    scores = tl.where(live, scores * scale, float("-inf"))
    of_head = this * HEADS + head
    if lses is not None:
        total = row_log_sum_exp(scores)
        tl.store(lses + of_head * tl.num_programs(0) + block, total, mask=mine)
    else:
        whole = tl.load(lse + of_head, mask=mine, other=float("inf"))  # padding heads weigh nothing
        scores = tl.exp(scores - whole[:, None])
        tl.store(weights + this * count + token, tl.sum(scores, 0), mask=live)


@triton.jit
def _centroids(rows, clusters, WIDTH, cluster, channel):
    """Load the centroids of one part of the keys of a KV head as a tile [C d'] in fp32."""
    there = (cluster < clusters)[:, None] & (channel < WIDTH)
    return load_wide(rows + cluster[:, None] * WIDTH + channel, there)


@triton.jit(do_not_specialize=["count"])
def _cells(
    q, centroids, sizes, held, counts, kinds, needs, scale, count, GROUPS: tl.constexpr, CLUSTERS: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Weigh the cells of a KV head: all pairs of a centroid of one part and one of the other. Write
    the kind of each: 2 if its tokens are among the `count` best, 1 if some of them are, those that
    come first; and to `needs` how many of all cells of kind 1.

    Cell (i, j) has `held` [B G C*C] tokens at i * C + j, and its kind at [i, j]."""
    CELLS: tl.constexpr = padded(CLUSTERS)
    this = program_at(0)
    sequence, group = this // GROUPS, this % GROUPS
    clusters, count = number_of(sizes, sequence, CLUSTERS), number_of(counts, sequence, count)
    cluster, channel = tl.arange(0, CELLS), tl.arange(0, padded(WIDTH))
    rows, step = head_rows(centroids, sequence, group)
    one = _centroids(rows, clusters, WIDTH, cluster, channel)
    other = _centroids(rows + step, clusters, WIDTH, cluster, channel)
    tokens, _ = head_rows(held, sequence, group)
    there = (cluster < clusters)[:, None] & (cluster < clusters)
    tokens = load(tokens + cluster[:, None] * clusters + cluster, there)
    weights = tl.zeros([CELLS, CELLS], tl.float32)
    for head in range(HEADS):
        query = q + (this * HEADS + head) * (2 * WIDTH) + channel
        left = load_wide(query, channel < WIDTH)
        right = load_wide(query + WIDTH, channel < WIDTH)
        scores = (tl.sum(one * left, 1)[:, None] + tl.sum(other * right, 1)) * scale
        scores = tl.where(tokens > 0, scores, float("-inf"))
        weight = tl.exp(scores - finite(tl.max(scores)))
        weights += weight / tl.maximum(tl.sum(weight * tokens), 1e-30)
    keys = weights.to(tl.int32, bitcast=True)  # in the order of the weights, which are not negative
    least = kth_largest(keys, tokens, count)
    kind = 2 * (keys > least).to(tl.int8) + (keys == least).to(tl.int8)
    tl.store(kinds + this * (CELLS * CELLS) + cluster[:, None] * CELLS + cluster, kind)
    tl.store(needs + this, count - tl.sum(tl.where(keys > least, tokens, 0)))


@triton.jit
def _kinds(codes, kinds, this, at, live, GROUPS: tl.constexpr, CELLS: tl.constexpr):
    """Return the kinds of the cells to which the tokens `at` of a KV head belong; 0 where `live` is
    false."""
    first, _ = head_rows(codes, this // GROUPS, this % GROUPS)
    pair = load(first.to(tl.pointer_type(tl.int16)) + at, live).to(tl.int32)
    cell = (pair & 255) * CELLS + ((pair >> 8) & 255)
    return load(kinds + this * (CELLS * CELLS) + cell, live)


@triton.jit
def _count_kinds(
    codes, lengths, kinds, numbers, length, GROUPS: tl.constexpr, CELLS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Count the tokens of one piece of a KV head whose cells are of kind 2, and of kind 1."""
    this, piece, pieces = program_at(0), tl.program_id(1), tl.num_programs(1)
    length = number_of(lengths, this // GROUPS, length)
    both = tl.zeros([TILE], tl.int32)  # kind 1 from bit 16 on
    start, end = tiles_of(length, piece, pieces, TILE)
    for tile in range(start, end):
        at = tile * TILE + tl.arange(0, TILE)
        kind = _kinds(codes, kinds, this, at, at < length, GROUPS, CELLS)
        both += (kind == 2).to(tl.int32) + ((kind == 1).to(tl.int32) << 16)
    to = numbers + (this * pieces + piece) * 2
    tl.store(to, tl.sum(both & 0xFFFF, 0))
    tl.store(to + 1, tl.sum(both >> 16, 0))


@triton.jit(do_not_specialize=["room"])
def _place_kinds(
    codes, lengths, kinds, numbers, length, GROUPS: tl.constexpr, CELLS: tl.constexpr, TILE: tl.constexpr, out,
    needs, counts, room, PIECES: tl.constexpr,
):  # fmt: skip
    """Write the chosen tokens of one piece of a KV head at the places that the earlier pieces
    leave."""
    this, piece, pieces = program_at(0), tl.program_id(1), tl.num_programs(1)
    length = number_of(lengths, this // GROUPS, length)
    each = tl.arange(0, PIECES)
    before = numbers + (this * pieces + each) * 2
    larger = tl.sum(load(before, each < piece), 0)
    equal, need = tl.sum(load(before + 1, each < piece), 0), tl.load(needs + this)
    start, end = tiles_of(length, piece, pieces, TILE)
    for tile in range(start, end):
        at = tile * TILE + tl.arange(0, TILE)
        kind = _kinds(codes, kinds, this, at, at < length, GROUPS, CELLS)
        place, taken, larger, equal = placed(kind == 2, kind == 1, larger, equal, need)
        tl.store(out + this * room + place, at.to(tl.int64), mask=taken)
    if lengths is not None or counts is not None:
        chosen = tl.minimum(number_of(counts, this // GROUPS, room), length)
        fill(out + this * room, chosen, room, piece, pieces, TILE)
