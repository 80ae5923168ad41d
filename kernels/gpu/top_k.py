"""Finds the largest of each row, in one of two ways.

Where few are wanted of each row, a program holds a piece of a row and finds the k-th largest of it
two bits at a time; further launches choose among the best of all pieces.

Where more are wanted of a long row, four launches find the k-th largest of the row byte by byte:
each program counts how often each value of the next byte occurs in its piece of the row, and the
next launch adds up the counts of all pieces. A fifth writes the indices. Each piece then knows how
many entries the earlier ones write, so that programs never wait for one another.

Either way the indices come in ascending order. torch.topk launches some twenty kernels for a long
row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    DTYPES,
    Numbers,
    known,
    lengths_of,
    load,
    number_of,
    padded,
    program_at,
    unfit,
)
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, filled, too_few, with_sizes

# entries that a program holds, at least; eight times as many as are wanted of a piece
_PIECE = 1024
_HELD = 4096  # and at most
_ALONE = 16384  # entries that a program holds if that saves the launches of a search by bytes
_MOST_PIECES = 64  # of a row that is searched by bytes
_MOST_PROGRAMS = 1056  # that search by bytes, if there are fewer rows: each leaves 2 KB of counts

_LEAST = tl.constexpr(-(2**31))
_FIELD = tl.constexpr(21)  # bits of a number of entries
MOST = tl.constexpr(2**21 - 1)  # entries of a row that is searched two bits at a time
_BYTES = tl.constexpr(4)  # of a key
_BINS = tl.constexpr(256)  # values of a byte
_FEW = tl.constexpr(32)  # entries of a piece that are counted one by one
_NONE = tl.constexpr(2**31 - 1)


def top_k(scores: Tensor | Ragged, count: int | PerSequence) -> Tensor | Ragged:
    """Find the indices of the `count` largest scores of each row, as kernels/reference.py defines
    it; among equal scores the first in the row. [... S] -> [... count]"""
    whole, sizes = filled(scores), lengths_of(scores)
    counts, most = known(count, whole.device)
    rows = (whole if whole.stride(-1) == 1 else whole.contiguous()).flatten(0, -2)
    out = torch.empty((len(rows), most), dtype=torch.int64, device=whole.device)
    if out.numel():
        lists = len(rows) // len(whole)
        if cuts := _cuts(whole.shape[-1], most):
            out, keys = _select(rows, None, most, cuts[0], lists, sizes, counts)
            for pieces in cuts[1:]:
                out, keys = _select(keys, out, most, pieces, lists, None, counts)
        else:
            count_of, size = rows.shape
            pieces, tile = pieces_of(count_of, size)
            tables = rows.new_empty((2, count_of, pieces, _BINS.value), dtype=torch.int32)
            found = rows.new_empty((count_of, _BYTES.value, 2), dtype=torch.int32)
            larger = rows.new_empty((_BYTES.value, count_of, pieces), dtype=torch.int32)
            common = (
                sizes,
                counts,
                rows.stride(0),
                size,
                most,
                lists,
                padded(pieces, 1),
                tile,
            )
            grid, warps = (count_of, pieces), tile // 512
            for byte in range(_BYTES.value):
                _count[grid](rows, tables, found, larger, *common, byte, num_warps=warps)
            _place[grid](rows, tables, found, larger, out, *common, num_warps=warps)
    out = out.view(*whole.shape[:-1], most)
    return with_sizes(out, count, out.dim() - 1)


def top_k_refuses(scores, count):
    if isinstance(scores, Ragged) and scores.dim != len(scores.shape) - 1:
        return "takes scores that differ in their last dimension"
    if scores.dtype not in DTYPES or len(scores.shape) < 2:
        return (
            f"takes rows of float32, bfloat16 and float16, got {scores.dtype} {list(scores.shape)}"
        )
    if too_few(scores, count):
        return "leaves the error for too large a count to torch"
    return unfit(filled(scores))


def _cuts(size: int, count: int) -> list[int]:
    """Return the number of pieces into which each launch cuts the rows: those of the first launch
    have `size` entries, those of later ones the `count` best of each piece before. An empty list
    means that a search by bytes is faster."""
    held = max(_PIECE, triton.next_power_of_2(8 * count))
    if held > _HELD:
        return [1] if size <= _ALONE else []
    cuts = []
    while size > _HELD:
        cuts.append(triton.cdiv(size, held))
        size = cuts[-1] * count
    return [*cuts, 1]


def _select(
    x: Tensor,
    names: Tensor | None,
    count: int,
    pieces: int,
    lists: int,
    sizes: Numbers | None,
    counts: Numbers | None,
) -> tuple[Tensor, Tensor]:
    """Find the `count` best entries of each of `pieces` pieces of the rows x [N S]. Return their
    indices, or with `names` [N S] what stands there at these indices; and their keys (integers in
    the order of the scores), for the next launch. With one piece there is no next launch, and the
    tensor of keys is empty.

    A sequence has `lists` rows; for several sequences, `sizes` may say how long they are, and
    `counts` how many are wanted (`each`). Places beyond a sequence's count hold zeros, which are valid
    rows but no results, with the least of keys."""
    rows, size = x.shape
    out = torch.empty((rows, pieces * count), dtype=torch.int64, device=x.device)
    keys = torch.empty(
        (rows, pieces * count if pieces > 1 else 0), dtype=torch.int32, device=x.device
    )
    wide = padded(triton.cdiv(size, pieces))
    _best[(rows, pieces)](
        x, names, out, keys if pieces > 1 else None, sizes, counts, x.stride(0), size, count, lists, wide,
        min(wide, _HELD), num_warps=min(32, max(1, wide // 256)),
    )  # fmt: skip
    return out, keys


def pieces_of(rows: int, size: int) -> tuple[int, int]:
    """Return how to cut `rows` rows of `size` entries among programs: into how many pieces each, and
    how many entries a tile has. A piece has as many tiles as the row then needs (`tiles_of`)."""
    tile = 4096 if size > 65536 else 2048
    tiles = triton.cdiv(size, tile * min(_MOST_PIECES, max(1, _MOST_PROGRAMS // rows)))
    return triton.cdiv(size, tile * tiles), tile


@triton.jit
def tiles_of(size, piece, pieces, TILE: tl.constexpr):
    """Return the first tile of one of the `pieces` of a row of `size` entries, and the one behind its
    last. Rows that end early, as where captured steps round lengths up, are shared by all pieces."""
    tiles = tl.cdiv(tl.cdiv(size, TILE), pieces)
    return piece * tiles, (piece + 1) * tiles


@triton.jit
def _keys(x, at, live):
    """Load numbers from x and return them as integers in the same order, so that they can be
    compared bit by bit; where `live` is false, the least integer. The results of an earlier launch
    are such integers already."""
    value = load(x + at, live)
    if value.dtype != tl.int32:
        number = value.to(tl.float32) + 0.0  # both zeros are equal
        bits = number.to(tl.int32, bitcast=True)
        value = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(live, value, _LEAST)


@triton.jit
def kth_largest(keys, times, count):
    """Return the `count`-th largest of int32 `keys`, each of which counts `times` times, two bits
    a step. It may be a smaller number if exactly `count` keys are at least as large."""
    least = tl.full([], _LEAST, tl.int32)
    bit = tl.full([], 1 << 30, tl.int32)
    once = times.to(tl.int64)
    while bit != 0:
        low, middle, high = least ^ bit, least ^ (bit << 1), least ^ bit ^ (bit << 1)
        reached = tl.where(keys >= low, once, 0) + (tl.where(keys >= middle, once, 0) << _FIELD)
        reached = tl.sum(reached + (tl.where(keys >= high, once, 0) << (2 * _FIELD)))
        of_low = reached & MOST
        of_middle = (reached >> _FIELD) & MOST
        of_high = reached >> (2 * _FIELD)
        upper = tl.where(of_high >= count, high, middle)
        least = tl.where(of_middle >= count, upper, tl.where(of_low >= count, low, least))
        exact = (of_low == count) | (of_middle == count) | (of_high == count)
        bit = tl.where(exact, 0, bit >> 2)
    return least


@triton.jit
def placed(is_larger, is_equal, larger, equal, need):
    """Return where the chosen entries of a tile stand in the result, and which are chosen: the
    larger ones, and of the equal ones the first `need`. Before the tile there were `larger` and
    `equal` ones; return these numbers with the tile's own, too."""
    both = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    ties, total = equal + (before >> 16), tl.sum(both, 0)
    place = larger + (before & 0xFFFF) + tl.minimum(ties, need)
    return (
        place,
        is_larger | (is_equal & (ties < need)),
        larger + (total & 0xFFFF),
        equal + (total >> 16),
    )


@triton.jit
def fill(out, count, room, piece, pieces, STEP: tl.constexpr):
    """Write zeros behind the `count` results of a row with `room` places; each of the `pieces`
    programs of the row writes its share."""
    for start in range(count + piece * STEP, room, pieces * STEP):
        at = start + tl.arange(0, STEP)
        tl.store(out + at, tl.zeros([STEP], out.dtype.element_ty), mask=at < room)


@triton.jit(do_not_specialize=["size", "count"])
def _best(
    x, names, out, keys, sizes, counts, xt: tl.int64, size, count, LISTS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Find the `count` largest entries of one piece of a row of x, or as many as the sequence's
    entry in `counts` says, and write their indices, followed by zeros."""
    row, piece, pieces = program_at(0), tl.program_id(1), tl.num_programs(1)
    room = count
    size, count = number_of(sizes, row // LISTS, size), number_of(counts, row // LISTS, count)
    # the product may exceed 2^31, though the place does not
    first = (piece.to(tl.int64) * size // pieces).to(tl.int32)
    end = ((piece + 1).to(tl.int64) * size // pieces).to(tl.int32)
    x += row * xt
    whole = first + tl.arange(0, BLOCK)
    held = _keys(x, whole, whole < end)
    least = kth_largest(held, tl.full([BLOCK], 1, tl.int32), count)
    need = count - tl.sum((held > least).to(tl.int32), 0)
    larger, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    to = (row * pieces + piece) * room
    for start in range(first, end, STEP):  # read again, because keeping them would spill registers
        at = start + tl.arange(0, STEP)
        live = at < end
        key = _keys(x, at, live)
        place, taken, larger, equal = placed(
            key > least, (key == least) & live, larger, equal, need
        )
        tl.store(
            out + to + place,
            at if names is None else tl.load(names + row * size + at, mask=taken),
            mask=taken,
        )
        if keys is not None:
            tl.store(keys + to + place, key, mask=taken)
    if sizes is not None or counts is not None:
        for start in range(tl.minimum(count, end - first), room, STEP):
            at = start + tl.arange(0, STEP)
            tl.store(out + to + at, tl.zeros([STEP], tl.int64), mask=at < room)
            if keys is not None:
                tl.store(keys + to + at, tl.full([STEP], _LEAST, tl.int32), mask=at < room)


@triton.jit
def _found(tables, found, count, pieces, BYTE: tl.constexpr, PIECES: tl.constexpr):
    """Return of the `count`-th largest entry of a row the first BYTE + 1 bytes of its key, counted
    down from the largest; how many entries with these bytes are among the `count`; and `table`
    [PIECES 256], which says how often each value of the last of these bytes occurs in each piece,
    among entries that share the bytes before.

    `found` [4 2] holds the first two results for the bytes before the last."""
    each, value = tl.arange(0, PIECES), tl.arange(0, _BINS)
    table = load(tables + each[:, None] * _BINS + value, (each < pieces)[:, None])
    prefix, need = 0, count
    if BYTE > 0:
        prefix, need = tl.load(found + 2 * BYTE - 2), tl.load(found + 2 * BYTE - 1)
    upto = tl.cumsum(tl.sum(table, 0), 0)
    byte = tl.sum((upto < need).to(tl.int32), 0)
    return (prefix << 8) | byte, need - tl.max(tl.where(upto < need, upto, 0), 0), table


@triton.jit(do_not_specialize=["count"])
def _count(
    x, tables, found, larger, sizes, counts, xt: tl.int64, size, count, LISTS: tl.constexpr,
    PIECES: tl.constexpr, TILE: tl.constexpr, BYTE: tl.constexpr,
):  # fmt: skip
    """Count how often each value of byte number BYTE (0 is the highest) occurs in one piece of a
    row, among the entries that share the bytes before with the `count`-th largest. Before that,
    find the byte before: store it and all earlier ones to `found`, and to `larger` how many entries
    of the piece it shows to be larger.

    `tables` [2 rows pieces 256] has the counts of even and of odd bytes."""
    row, piece, pieces = program_at(0), tl.program_id(1), tl.num_programs(1)
    size, count = number_of(sizes, row // LISTS, size), number_of(counts, row // LISTS, count)
    value, rows = tl.arange(0, _BINS), tl.num_programs(0).to(tl.int64)
    own = ((row + BYTE % 2 * rows) * pieces + piece) * _BINS
    table, prefix, left = tl.zeros([_BINS], tl.int32), 0, 1
    found += row * (2 * _BYTES)
    if BYTE > 0:
        earlier = tables + (row + (BYTE - 1) % 2 * rows) * pieces * _BINS
        prefix, need, _ = _found(earlier, found, count, pieces, BYTE - 1, PIECES)
        before = tl.load(earlier + piece * _BINS + value)
        last = prefix & (_BINS - 1)
        tl.store(
            larger + ((BYTE - 1) * rows + row) * pieces + piece,
            tl.sum(tl.where(value < last, before, 0), 0),
        )
        left = tl.sum(tl.where(value == last, before, 0), 0)
        if piece == 0:
            tl.store(found + 2 * BYTE - 2, prefix)
            tl.store(found + 2 * BYTE - 1, need)
    if left > 0:
        start, end = tiles_of(size, piece, pieces, TILE)
        for tile in range(start, end):
            at = tile * TILE + tl.arange(0, TILE)
            live = at < size
            key = _keys(x + row * xt, at, live) ^ 0x7FFFFFFF
            if BYTE > 0:
                live &= ((key >> (32 - 8 * BYTE)) & ((1 << (8 * BYTE)) - 1)) == prefix
            this = (key >> (24 - 8 * BYTE)) & (_BINS - 1)
            # one by one: a histogram takes as long for entries that are masked
            if BYTE > 1 and left <= _FEW:
                places = tl.where(live, tl.arange(0, TILE) * _BINS + this, _NONE)
                place = tl.min(places, 0)
                while place != _NONE:
                    table += (value == (place & (_BINS - 1))).to(tl.int32)
                    place = tl.min(tl.where(places > place, places, _NONE), 0)
            else:
                table += tl.histogram(this, _BINS, mask=live)
    tl.store(tables + own + value, table)


@triton.jit(do_not_specialize=["count"])
def _place(
    x, tables, found, larger, out, sizes, counts, xt: tl.int64, size, count, LISTS: tl.constexpr,
    PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the indices of those entries of one piece of a row that are among the `count` largest,
    at the places that the earlier pieces leave."""
    row, piece, pieces = program_at(0), tl.program_id(1), tl.num_programs(1)
    room = count
    size, count = number_of(sizes, row // LISTS, size), number_of(counts, row // LISTS, count)
    rows = tl.num_programs(0).to(tl.int64)
    byte = tl.arange(0, _BYTES)[:, None]
    each = tl.arange(0, PIECES)
    last = tables + (row + (_BYTES - 1) % 2 * rows) * pieces * _BINS
    down, need, table = _found(last, found + row * (2 * _BYTES), count, pieces, _BYTES - 1, PIECES)
    known = load(larger + (byte * rows + row) * pieces + each, (byte < _BYTES - 1) & (each < piece))
    value, before = tl.arange(0, _BINS), (each < piece)[:, None]
    above = tl.sum(known) + tl.sum(tl.where(before & (value < (down & (_BINS - 1))), table, 0))
    equal = tl.sum(tl.where(before & (value == (down & (_BINS - 1))), table, 0))
    least = down ^ 0x7FFFFFFF
    start, end = tiles_of(size, piece, pieces, TILE)
    for tile in range(start, end):
        at = tile * TILE + tl.arange(0, TILE)
        live = at < size
        key = _keys(x + row * xt, at, live)
        place, taken, above, equal = placed(
            (key > least) & live, (key == least) & live, above, equal, need
        )
        tl.store(out + row * room + place, at.to(tl.int64), mask=taken)
    if sizes is not None or counts is not None:
        fill(out + row * room, tl.minimum(count, size), room, piece, pieces, TILE)
