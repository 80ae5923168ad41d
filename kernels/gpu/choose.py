"""Turns logits into weights: log-sum-exp of each row, then the weights of a group; and margins to
the largest logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    DTYPES,
    Numbers,
    finite,
    known,
    lengths_of,
    load,
    load_logits,
    load_wide,
    number_of,
    padded,
    program_at,
    unfit,
    unfit_shape,
    wide_rows,
)
from kernels.per_sequence import PerSequence
from kernels.ragged import RAGGED, Ragged, filled, too_few, with_sizes

_PIECE = 4096  # entries of a row; a longer row is summed in pieces
_BLOCK = tl.constexpr(1024)
_PARTS = 256  # log-sum-exps of a row that are joined at once


def log_sum_exp(logits: Tensor, scale: float = 1.0, counts: Numbers | None = None) -> Tensor:
    """Return the log-sum-exp of each piece of the rows of logits times `scale`, whose entries lie side
    by side. [B ... S] -> [B ... P] (fp32)

    counts: only so many leading entries of each sequence's rows exist (`each`); None: all."""
    rows, count = logits.flatten(0, -2), logits.shape[-1]
    pieces = triton.cdiv(count, _PIECE)
    out: Tensor = rows.new_empty((*logits.shape[:-1], pieces), dtype=torch.float32)
    if out.numel():
        piece = min(_PIECE, padded(count, 1))
        _log_sum_exp[(len(rows), pieces)](
            rows,
            counts,
            out,
            scale,
            rows.stride(0),
            count,
            len(rows) // len(logits),
            piece,
            num_warps=8 if piece == _PIECE else 4,
        )
    return out


def whole_log_sum_exp(logits: Tensor) -> Tensor:
    """Return the log-sum-exp of each row of logits. [... S] -> [...] (fp32)"""
    while logits.shape[-1] > 1:
        logits = log_sum_exp(logits.contiguous())
    return logits.squeeze(-1)


def group_weights(logits: Tensor | Ragged, scale: float, reduce: str) -> Tensor | Ragged:
    """Turn logits [B G g S] into one weight per KV head and token, [B G S], as kernels/reference.py
    defines it: a softmax in each query head, then the sum or the largest over the group."""
    x = filled(logits)
    x = (x if x.stride(3) == 1 else x.contiguous()).flatten(0, 2).unflatten(0, x.shape[:3])
    lses = log_sum_exp(x, scale, lengths_of(logits))
    return with_sizes(weights(x, lses, scale, reduce), logits)


def weights(
    logits: Tensor, lses: Tensor, scale: float, reduce: str, times: int = 1, bound: int = 0
) -> Tensor:
    """Turn logits [B G g S] times `scale`, of one query head in each row, into the weights of KV heads
    [B G S * times], each repeated `times` times. lses [B G g P]: the log-sum-exps of parts of the
    scaled rows. bound: how many entries of a row may be read, if more than S; a multiple of 16 lets
    the kernel load several at once. Logits that a sequence does not have give weights that mean
    nothing."""
    (batch, groups, group, count), pieces = logits.shape, lses.shape[3]
    out = wide_rows(logits, (batch, groups, count * times))
    if count:
        _weights[(triton.cdiv(count, _BLOCK), batch * groups)](
            logits,
            lses,
            out,
            scale,
            logits.flatten(0, 2).stride(0),  # a group of one head has no stride of its own
            max(bound, count),
            out.stride(1),
            pieces,
            group,
            min(_PARTS, padded(pieces, 1)),
            reduce == "sum",
            times,
            num_warps=4 if group <= 8 else 8,
        )
    return out


def group_weights_refuses(logits, *_):
    return _unfit(filled(logits))


def group_margins(
    logits: Tensor, tops: Tensor | None, candidates: int | PerSequence, reach: float, most: int | PerSequence,
    read: Tensor | None = None,
) -> tuple[Tensor | Ragged, Tensor]:  # fmt: skip
    """Measure how far the first `candidates` tokens lie below the largest logit of logits
    [B G g S], and how many tokens each sequence reads: [B G candidates] and [B], as
    kernels/reference.py defines it. A first kernel finds the margins and counts those within
    `reach` in each block, a second one adds the counts up."""
    (batch, groups, heads, count), device = logits.shape, logits.device
    of_each, wanted = known(candidates, device)
    limits, limit = known(most, device)
    tops = (logits.amax(-1, keepdim=True) if tops is None else tops).contiguous()
    blocks = triton.cdiv(wanted, _BLOCK)
    out = logits.new_empty((batch, groups, wanted), dtype=torch.float32)
    near = torch.empty((batch, groups, blocks), dtype=torch.int32, device=device)
    counts = torch.empty(batch, dtype=torch.int64, device=device)
    if wanted:
        _margins[(blocks, batch * groups)](
            logits.contiguous(), tops, of_each, out, near, reach, count, wanted, tops.shape[3], groups,
            heads, padded(tops.shape[3], 1),
        )  # fmt: skip
    _mean[(batch,)](near, limits, counts, read, limit, groups, groups * blocks)
    return with_sizes(out, candidates), counts


def group_margins_refuses(logits, tops, candidates, reach, most, read=None):
    if isinstance(logits, Ragged):
        return RAGGED
    if too_few(logits, candidates):
        return "leaves more candidates than a row has to torch"
    sides = unfit_shape(tops, *logits.shape[:3], None) or unfit_shape(read, len(logits))
    return sides or _unfit(logits)


def _unfit(logits: Tensor) -> str | None:
    if logits.dtype not in DTYPES:
        return f"takes float32, bfloat16 and float16, got {logits.dtype}"
    return unfit(logits) or ("leaves empty rows to torch" if logits.shape[-1] == 0 else None)


@triton.jit
def _log_sum_exp(
    x, counts, out, scale, apart: tl.int64, count, ROWS: tl.constexpr, PIECE: tl.constexpr
):
    """Compute the log-sum-exp of one piece of a row of x times `scale`. For several sequences, with
    ROWS rows each, `counts` may say how many entries of a row exist."""
    row, piece = program_at(0), tl.program_id(1)
    count = number_of(counts, row // ROWS, count)
    at = piece * PIECE + tl.arange(0, PIECE)
    value = load_logits(x + row * apart + at, at < count) * scale
    top = tl.max(value, 0)
    total = tl.sum(tl.exp(value - finite(top)), 0)
    tl.store(out + row * tl.num_programs(1) + piece, top + tl.log(total))


@triton.jit
def row_log_sum_exp(values):
    """Return the log-sum-exp of each row of a tile, minus infinity if all of its numbers are."""
    top = tl.max(values, 1)
    return top + tl.log(tl.sum(tl.exp(values - finite(top)[:, None]), 1))


@triton.jit
def joined(lses, row, live, pieces, first, end, PIECES: tl.constexpr):
    """Return the log-sum-exps of whole rows of a matrix, given those of their `pieces` parts in
    `lses`, of which those from `first` up to `end` are left out. row: the numbers of the rows;
    where `live` is false, nothing is read."""
    piece = tl.arange(0, PIECES)
    top = tl.full([row.shape[0], PIECES], float("-inf"), tl.float32)
    total = tl.zeros([row.shape[0], PIECES], tl.float32)
    for start in range(0, pieces, PIECES):
        at = start + piece
        there = live[:, None] & (at < pieces) & ((at < first) | (at >= end))
        part = load_logits(lses + row[:, None] * pieces + at, there)
        highest = tl.maximum(top, part)
        shift = finite(highest)
        total = total * tl.exp(top - shift) + tl.exp(part - shift)
        top = highest
    return row_log_sum_exp(top + tl.log(total))


@triton.jit(do_not_specialize=["pieces"])
def _weights(
    x, lses, out, scale, apart: tl.int64, bound, room, pieces, HEADS: tl.constexpr, PIECES: tl.constexpr,
    SUM: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Combine the softmax weights of a group's query heads, for a block of tokens: their sum if
    SUM, else the largest. Each result is written TIMES times in a row. `lses` holds the log-sum-exps
    of the `pieces` parts of each row of x. Rows of x lie `apart` entries apart, those of `out` `room`."""
    WIDE: tl.constexpr = padded(TIMES, 1)
    this, head = program_at(1), tl.arange(0, padded(HEADS, 1))
    row, mine = this * HEADS + head, head < HEADS
    at = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    value = load_logits(x + row[:, None] * apart + at, mine[:, None] & (at < bound))
    lse = joined(lses, row, mine, pieces, 0, 0, PIECES)
    weight = tl.where(mine[:, None], tl.exp(value * scale - lse[:, None]), 0.0)
    combined = tl.sum(weight, 0) if SUM else tl.max(weight, 0)  # no weight is smaller than 0
    time = tl.arange(0, WIDE)
    to = at[:, None] * TIMES + time
    there = (to < room) & (time < TIMES)
    tl.store(out + this * room + to, tl.broadcast_to(combined[:, None], [_BLOCK, WIDE]), mask=there)


@triton.jit(do_not_specialize=["count", "candidates", "pieces"])
def _margins(
    x, tops, of_each, out, near, reach, count, candidates, pieces, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Compute how far each of a block of candidate tokens lies below the largest logit of its row
    in x, at the query head of the group where it comes closest, and write to `near` how many lie
    within `reach`. The largest of a head's `pieces` entries in `tops` is the largest logit of its
    row. For several sequences, `of_each` may hold the number of candidates of each."""
    this, piece = program_at(1), tl.arange(0, PIECES)
    at = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    live = at < number_of(of_each, this // GROUPS, candidates)
    margin = tl.full([_BLOCK], float("-inf"), tl.float32)
    for head in range(HEADS):
        row = this * HEADS + head
        top = tl.max(load_logits(tops + row * pieces + piece, piece < pieces), 0)
        margin = tl.maximum(margin, load_wide(x + row * count + at, live) - top)
    tl.store(out + this * candidates + at, margin, mask=live)
    close = tl.sum((live & (margin >= -reach)).to(tl.int32), 0)
    tl.store(near + this * tl.num_programs(0) + tl.program_id(0), close)


@triton.jit(do_not_specialize=["most", "numbers"])
def _mean(near, limits, out, read, most, GROUPS: tl.constexpr, numbers):
    """Add up the `numbers` counts of one sequence in `near`, and divide the sum by the number of
    its heads. Write the result to `out`, limited from 1 to the sequence's entry in `limits`, or to
    `most`. If `read` is given, add the result to its entry there."""
    this = program_at(0)
    total = tl.zeros([_BLOCK], tl.int32)
    for start in range(0, numbers, _BLOCK):
        place = start + tl.arange(0, _BLOCK)
        total += load(near + this * numbers + place, place < numbers)
    most = number_of(limits, this, most)
    count = tl.minimum(tl.maximum(tl.sum(total, 0) // GROUPS, 1), most).to(tl.int64)
    tl.store(out + this, count)
    if read is not None:
        tl.store(read + this, tl.load(read + this) + count)
