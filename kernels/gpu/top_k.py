"""Finds the largest of each row: one kernel holds a whole row and finds the k-th largest bit by bit.

torch.topk launches some twenty kernels for a long row. A row longer than a program holds is cut, and a further launch
chooses among the best of its pieces, which are cut again as long as that leaves fewer; a k of which every piece is full
is left to torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import DTYPES, padded, unfit
from kernels.ragged import RAGGED, Each, Ragged

_HELD = 32768  # entries in the registers of a program
_PLACED = 4096  # entries that are placed at once
_LEAST = tl.constexpr(-(2**31))


def top_k(scores: Tensor, count: int) -> Tensor:
    """Find the indices of the largest scores, as kernels/reference.py defines it; of equal ones the first in the
    row."""
    rows = (scores if scores.stride(-1) == 1 else scores.contiguous()).flatten(0, -2)
    if not (count and len(rows)):
        return torch.empty((*scores.shape[:-1], count), dtype=torch.int64, device=scores.device)
    first, *further = _cuts(scores.shape[-1], count)
    out, keys = _select(rows, None, count, first)
    for pieces in further:
        out, keys = _select(keys, out, count, pieces)
    return out.view(*scores.shape[:-1], count)


def top_k_refuses(scores: Tensor, count: int) -> str | None:
    if isinstance(scores, Ragged) or isinstance(count, Each):
        return RAGGED
    if scores.dtype not in DTYPES or scores.dim() < 2:
        return f"takes rows of float32, bfloat16 and float16, got {scores.dtype} {list(scores.shape)}"
    if count > scores.shape[-1]:
        return "leaves the error for too large a count to torch"
    if not _cuts(scores.shape[-1], count):
        return f"cannot narrow {scores.shape[-1]} down to {count} in pieces of {_HELD}"
    return unfit(scores)


def _cuts(size: int, count: int) -> list[int]:
    """Return into how many pieces each launch cuts what the one before it left; none where that would not end."""
    cuts = [triton.cdiv(size, _HELD)]
    while cuts[-1] > 1:
        left = cuts[-1] * count
        if left >= size:
            return []
        size = left
        cuts.append(triton.cdiv(size, _HELD))
    return cuts


def _select(x: Tensor, names: Tensor | None, count: int, pieces: int) -> tuple[Tensor, Tensor]:
    """Return the indices, or the `names` [N S], of the best of each piece of rows x [N S], and with several pieces
    their keys; with one nobody reads those, and the tensor is empty."""
    rows, size = x.shape
    out = torch.empty((rows, pieces * count), dtype=torch.int64, device=x.device)
    keys = torch.empty((rows, pieces * count if pieces > 1 else 0), dtype=torch.int32, device=x.device)
    wide = padded(triton.cdiv(size, pieces))
    _best[(rows, pieces)](
        x,
        names,
        out,
        keys if pieces > 1 else None,
        x.stride(0),
        size,
        count,
        wide,
        min(wide, _PLACED),
        num_warps=min(32, max(1, wide // 256)),
    )
    return out, keys


@triton.jit
def _keys(x, at, live):
    """Return integers in the order of the numbers; those of an earlier launch are integers already."""
    value = tl.load(x + at, mask=live, other=0)
    if value.dtype != tl.int32:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
        value = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(live, value, _LEAST)


@triton.jit(do_not_specialize=["size", "count"])
def _best(x, names, out, keys, xt: tl.int64, size, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Find the `count` best of a piece of a row."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
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
    to = (row * pieces + piece) * count
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
