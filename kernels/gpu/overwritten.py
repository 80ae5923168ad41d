"""Chooses which row of a full cache the next token takes, in two kernels: the least weight of each
block of rows, and the least of all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import common
from kernels.gpu.common import lengths_of, load, number_of, padded, program_at
from kernels.overwritten import END, LEFT, NEWEST, READ
from kernels.ragged import Ragged, filled

_BLOCK, _MOST_BLOCKS = 128, 1024  # rows of a block; blocks that one program compares
_AT_ONCE = tl.constexpr(16)  # heads
_COLUMNS = tl.constexpr((NEWEST, LEFT, READ, END))


def pick_overwritten(
    logits: Tensor | Ragged, lse: Tensor, scale: float, places: Tensor, row: Tensor, counts: Tensor
) -> None:
    """Choose the row that the next token takes, as kernels/overwritten.py defines it: logits
    [B G g S], lse [B H], places [B S], row [B], counts [B 4]."""
    scores = filled(logits)
    batch, groups, heads, count = scores.shape
    block = padded(triton.cdiv(count, _MOST_BLOCKS), _BLOCK)
    blocks = triton.cdiv(count, block)
    weights = lse.new_empty((batch, blocks))
    latest, rows = (row.new_empty((batch, blocks)) for _ in range(2))
    _least[(blocks, batch)](
        scores.contiguous(), lse.contiguous(), lengths_of(logits), places, row, weights, latest, rows, scale,
        places.stride(0), count, groups * heads, block,
    )  # fmt: skip
    _go_on[(batch,)](
        weights, latest, rows, places, row, counts, places.stride(0), blocks, padded(blocks)
    )


def pick_overwritten_refuses(logits, lse, scale, places, row, counts):
    batch, groups, heads, count = logits.shape
    if {places.dtype, row.dtype, counts.dtype} != {torch.int64} or places.stride(1) != 1:
        return "takes rows, their places and counts as int64, side by side"
    if not (counts.is_contiguous() and row.is_contiguous()) or places.shape[1] < count:
        return f"takes places of {count} rows, got {list(places.shape)}, and contiguous counts"
    sides = (
        common.unfit_shape(lse, batch, groups * heads)
        or common.unfit_shape(places, batch, None)
        or common.unfit_shape(row, batch)
        or common.unfit_shape(counts, batch, 4)
    )
    return sides or common.unfit_floats(filled(logits), lse) or common.unfit(places, row, counts)


@triton.jit(do_not_specialize=["count"])
def _least(
    logits, lse, sizes, places, row, weights, latest, rows, scale, apart: tl.int64, count, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the least of the weights of a block of rows, summed over all heads, the latest place of a
    token that has it, and its row. The newest token's row does not count."""
    sequence = program_at(1)
    size = number_of(sizes, sequence, count)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, HEADS, _AT_ONCE):
        head = start + tl.arange(0, _AT_ONCE)
        mine, of_head = head < HEADS, sequence * HEADS + head
        there = mine[:, None] & (number < size)
        score = tl.load(logits + of_head[:, None] * count + number, mask=there, other=0.0)
        weight = tl.exp(score * scale - load(lse + of_head, mine)[:, None])
        total += tl.sum(tl.where(there, weight, 0.0), 0)
    goes = (number < size) & (number != tl.load(row + sequence))
    total = tl.where(goes, total, float("inf"))
    least = tl.min(total, 0)
    place = tl.load(places + sequence * apart + number, mask=goes, other=-1)
    place = tl.where(total == least, place, -1)
    last = tl.max(place, 0)
    to = sequence * tl.num_programs(0) + tl.program_id(0)
    tl.store(weights + to, least)
    tl.store(latest + to, last)
    tl.store(rows + to, tl.max(tl.where(goes & (place == last), number, 0), 0).to(tl.int64))


@triton.jit(do_not_specialize=["blocks"])
def _go_on(
    weights, latest, rows, places, row, counts, apart: tl.int64, blocks, BLOCKS: tl.constexpr
):
    """Note which row the newest token of a sequence has taken, count what was read, and choose the
    row of the next token among those of all blocks."""
    sequence = program_at(0)
    block = tl.arange(0, BLOCKS)
    there, at = block < blocks, sequence * blocks + block
    weight = tl.load(weights + at, mask=there, other=float("inf"))
    place = tl.load(latest + at, mask=there, other=-1)
    place = tl.where(weight == tl.min(weight, 0), place, -1)
    chosen = tl.where(there & (place == tl.max(place, 0)), load(rows + at, there), 0)
    own, first = tl.load(row + sequence), counts + sequence * 4
    taken = places + sequence * apart + own
    newest = tl.load(first + _COLUMNS[0]) + 1
    gone = (tl.load(taken) < tl.load(first + _COLUMNS[3])).to(tl.int64)
    left = tl.load(first + _COLUMNS[1]) - gone
    tl.store(first + _COLUMNS[0], newest)
    tl.store(first + _COLUMNS[1], left)
    tl.store(first + _COLUMNS[2], tl.load(first + _COLUMNS[2]) + left)
    tl.store(taken, newest)
    tl.store(row + sequence, tl.max(chosen, 0))
