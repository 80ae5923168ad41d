"""Finds the largest of each row: one kernel holds a whole row and finds the k-th largest bit by
bit.

torch.topk launches some twenty kernels for a long row. A row longer than a program can hold is cut,
and a further launch chooses among the best of its pieces, which are cut again as long as that
leaves fewer; if k fills every piece, torch does it.

If sequences differ, the longest row and the largest k decide how many pieces there are, and how
much room each has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import DTYPES, padded, unfit
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, too_few

_HELD = 32768  # entries in the registers of a program
_PLACED = 4096  # entries that are placed at once
_LEAST = tl.constexpr(-(2**31))


def top_k(scores: Tensor | Ragged, count: int | PerSequence) -> Tensor | Ragged:
    """Find the indices of the `count` largest scores of each row, as kernels/reference.py defines
    it; among equal scores the first in the row. [... S] -> [... count]"""
    whole, sizes = (scores.whole, scores.counts) if isinstance(scores, Ragged) else (scores, None)
    counts, most = (count.on(whole.device), count.most) if isinstance(count, PerSequence) else (None, count)
    rows = (whole if whole.stride(-1) == 1 else whole.contiguous()).flatten(0, -2)
    out = torch.empty((len(rows), most), dtype=torch.int64, device=whole.device)
    if out.numel():
        lists = len(rows) // len(whole)
        first, *further = _cuts(whole.shape[-1], most)
        out, keys = _select(rows, None, most, first, lists, sizes, counts)
        for pieces in further:
            out, keys = _select(keys, out, most, pieces, lists, None, counts)
    out = out.view(*whole.shape[:-1], most)
    return Ragged.filled_up(out, count, out.dim() - 1) if isinstance(count, PerSequence) else out


def top_k_refuses(scores: Tensor | Ragged, count: int | PerSequence) -> str | None:
    if isinstance(scores, Ragged) and scores.dim != len(scores.shape) - 1:
        return "takes scores that differ in their last dimension"
    if scores.dtype not in DTYPES or len(scores.shape) < 2:
        return f"takes rows of float32, bfloat16 and float16, got {scores.dtype} {list(scores.shape)}"
    if too_few(scores, count):
        return "leaves the error for too large a count to torch"
    size, most = scores.shape[-1], count.most if isinstance(count, PerSequence) else count
    if not _cuts(size, most):
        return f"cannot narrow {size} down to {most} in pieces of {_HELD}"
    return unfit(scores.whole if isinstance(scores, Ragged) else scores)


def _cuts(size: int, count: int) -> list[int]:
    """Return the number of pieces into which each launch cuts the rows: those of the first launch
    have `size` entries, those of later ones the `count` best of each piece before. An empty list
    means that this would not end with one piece."""
    cuts = [triton.cdiv(size, _HELD)]
    while cuts[-1] > 1:
        left = cuts[-1] * count
        if left >= size:
            return []
        size = left
        cuts.append(triton.cdiv(size, _HELD))
    return cuts


def _select(
    x: Tensor, names: Tensor | None, count: int, pieces: int, lists: int, sizes: Tensor | None, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Find the `count` best entries of each of `pieces` pieces of the rows x [N S]. Return their
    indices, or with `names` [N S] what stands there at these indices; and their keys (integers in
    the order of the scores), for the next launch. With one piece there is no next launch, and the
    tensor of keys is empty.

    A sequence has `lists` rows; for several sequences, `sizes` [B] may say how long they are, and
    `counts` [B] how many are wanted. Places beyond a sequence's count hold zeros, which are valid
    rows but no results, with the least of keys."""
    rows, size = x.shape
    out = torch.empty((rows, pieces * count), dtype=torch.int64, device=x.device)
    keys = torch.empty((rows, pieces * count if pieces > 1 else 0), dtype=torch.int32, device=x.device)
    wide = padded(triton.cdiv(size, pieces))
    _best[(rows, pieces)](
        x,
        names,
        out,
        keys if pieces > 1 else None,
        sizes,
        counts,
        x.stride(0),
        size,
        count,
        lists,
        wide,
        min(wide, _PLACED),
        num_warps=min(32, max(1, wide // 256)),
    )
    return out, keys


@triton.jit
def _keys(x, at, live):
    """Load numbers from x and return them as integers in the same order, so that they can be
    compared bit by bit; where `live` is false, the least integer. The results of an earlier launch
    are such integers already."""
    value = tl.load(x + at, mask=live, other=0)
    if value.dtype != tl.int32:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        value = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(live, value, _LEAST)


@triton.jit(do_not_specialize=["size", "count"])
def _best(
    x, names, out, keys, sizes, counts, xt: tl.int64, size, count, LISTS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Find the `count` largest entries of one piece of a row of x, or as many as the sequence's
    entry in `counts` says, and write their indices, followed by zeros. The smallest of them is
    found bit by bit, then all that are larger are written."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    room = count
    if sizes is not None:
        size = tl.load(sizes + row // LISTS).to(tl.int32)
    if counts is not None:
        count = tl.load(counts + row // LISTS).to(tl.int32)
    first = (piece.to(tl.int64) * size // pieces).to(tl.int32)  # the product may exceed 2^31, though the place does not
    end = ((piece + 1).to(tl.int64) * size // pieces).to(tl.int32)
    x += row * xt
    whole = first + tl.arange(0, BLOCK)
    held = _keys(x, whole, whole < end)
    smallest = tl.full([], _LEAST, tl.int32)
    bit = smallest  # the highest bit
    while bit != 0:  # from the top bit down: do enough entries have it too?
        tried = smallest ^ bit
        enough = tl.sum((held >= tried).to(tl.int32), 0)
        smallest = tl.where(enough >= count, tried, smallest)
        bit = tl.where(enough == count, 0, (bit >> 1) & 0x7FFFFFFF)
    larger = tl.sum((held > smallest).to(tl.int32), 0)
    seen = tl.full([], 0, tl.int32)  # how many larger ones so far and, above bit 16, how many equal ones
    to = (row * pieces + piece) * room
    for start in range(first, end, STEP):  # read again, because keeping them would spill registers
        at = start + tl.arange(0, STEP)
        live = at < end
        key = _keys(x, at, live)
        is_larger, is_equal = key > smallest, (key == smallest) & live
        counted = is_larger.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        upto = seen + tl.cumsum(counted, 0)
        seen += tl.sum(counted, 0)
        place = tl.where(is_larger, upto & 0xFFFF, larger + ((upto >> 16) & 0xFFFF)) - 1
        taken = is_larger | (is_equal & (place < count))
        tl.store(out + to + place, at if names is None else tl.load(names + row * size + at, mask=taken), mask=taken)
        if keys is not None:
            tl.store(keys + to + place, key, mask=taken)
    if sizes is not None or counts is not None:
        for start in range(tl.minimum(count, end - first), room, STEP):
            at = start + tl.arange(0, STEP)
            tl.store(out + to + at, tl.zeros([STEP], tl.int64), mask=at < room)
            if keys is not None:
                tl.store(keys + to + at, tl.full([STEP], _LEAST, tl.int32), mask=at < room)
