"""Turns logits into weights: log-sum-exp of each row, then the weights of a group; and margins to
the largest logit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import DTYPES, padded, unfit, wide_rows
from kernels.per_sequence import PerSequence
from kernels.ragged import RAGGED, Ragged, filled, too_few

_PIECE = 4096  # entries of a row; a longer row is summed in pieces
_BLOCK = 1024
_PARTS = 256  # log-sum-exps of a row that are joined at once


def log_sum_exp(logits: Tensor, scale: float) -> Tensor:
    """Return the log-sum-exp of each row of logits times `scale`. [... S] -> [...] (fp32)"""
    parts = _of_pieces(logits.contiguous().flatten(0, -2), scale, None)
    return log_sum_exp(parts, 1.0).view(logits.shape[:-1]) if parts.shape[1] > 1 else parts.view(logits.shape[:-1])


def _of_pieces(rows: Tensor, scale: float, counts: Tensor | None) -> Tensor:
    """Return the log-sum-exp of each piece of the rows [N S], whose entries lie side by side, times
    `scale`. -> [N P] (fp32)

    counts [B]: only so many leading entries of each sequence's rows exist; None: all."""
    count = rows.shape[1]
    out: Tensor = rows.new_empty((len(rows), triton.cdiv(count, _PIECE)), dtype=torch.float32)
    if out.numel():
        piece = min(_PIECE, triton.next_power_of_2(count))
        of_each = 1 if counts is None else len(rows) // len(counts)
        _log_sum_exp[tuple(out.shape)](
            rows, counts, out, scale, rows.stride(0), count, of_each, piece, num_warps=8 if piece == _PIECE else 4
        )
    return out


def group_weights(logits: Tensor | Ragged, scale: float, reduce: str) -> Tensor | Ragged:
    """Turn logits [B G g S] into one weight per KV head and token, [B G S], as kernels/reference.py
    defines it: a softmax in each query head, then the sum or the largest over the group."""
    x, counts = filled(logits), logits.counts if isinstance(logits, Ragged) else None
    rows = (x if x.stride(3) == 1 else x.contiguous()).flatten(0, 2)
    out = weights(rows, _of_pieces(rows, scale, counts), counts, x.shape[:2], x.shape[3], scale, reduce)
    return Ragged.filled_up(out, logits.sizes) if isinstance(logits, Ragged) else out


def weights(
    rows: Tensor, lses: Tensor, counts: Tensor | None, heads: Sequence[int], bound: int, scale: float, reduce: str,
    times: int = 1,
) -> Tensor:  # fmt: skip
    """Turn rows of logits [N S] times `scale`, one for each query head, into the weights of KV heads
    [B G S * times], each repeated `times` times. heads: B and G. lses [N P]: the log-sum-exps of
    parts of the scaled rows. counts [B]: how many logits of each sequence exist; None: all. bound:
    how many entries of a row may be read; a multiple of 16 lets the kernel load several at once."""
    (batch, groups), count = heads, rows.shape[1]
    group, pieces = len(rows) // (batch * groups), lses.shape[1]
    out, fold = wide_rows(rows, (batch, groups, count * times)), padded(group, 1)
    if count:
        _weights[(triton.cdiv(count, _BLOCK), batch * groups)](
            rows, lses, counts, out, scale, rows.stride(0), bound, out.stride(1), count, pieces, groups, group, fold,
            min(_PARTS, padded(pieces, 1)), reduce == "sum", times, padded(times, 1), _BLOCK,
            num_warps=4 if fold <= 8 else 8,
        )  # fmt: skip
    return out


def group_weights_refuses(logits: Tensor | Ragged, scale: float, reduce: str) -> str | None:
    return _unfit(filled(logits))


def group_margins(logits: Tensor, candidates: int | PerSequence, reach: float) -> tuple[Tensor | Ragged, Tensor]:
    """Measure how far the first `candidates` tokens lie below the largest logit of logits
    [B G g S], and how many come within `reach`: [B G candidates] and [B G], as kernels/reference.py
    defines it. A first kernel finds the largest logit of each piece of a row, a second the
    margins."""
    batch, groups, heads, count = logits.shape
    most, of_each = (
        (candidates.most, candidates.on(logits.device)) if isinstance(candidates, PerSequence) else (candidates, None)
    )
    logits, pieces = logits.contiguous(), triton.cdiv(count, _PIECE)
    tops = logits.new_empty((batch * groups, pieces, heads), dtype=torch.float32)
    out = logits.new_empty((batch, groups, most), dtype=torch.float32)
    near = torch.empty((batch, groups), dtype=torch.int64, device=logits.device)
    side = min(_BLOCK, triton.next_power_of_2(count))
    _tops[(batch * groups, pieces, heads)](logits, tops, near, count, _PIECE, side, num_warps=4)
    if most:
        _margins[(triton.cdiv(most, _BLOCK), batch * groups)](
            logits, tops, of_each, out, near, reach, count, most, pieces, groups, heads, padded(pieces, 1), _BLOCK,
            num_warps=4,
        )  # fmt: skip
    return Ragged.filled_up(out, candidates) if isinstance(candidates, PerSequence) else out, near


def group_margins_refuses(logits: Tensor | Ragged, candidates: int | PerSequence, reach: float) -> str | None:
    if isinstance(logits, Ragged):
        return RAGGED
    return "leaves more candidates than a row has to torch" if too_few(logits, candidates) else _unfit(logits)


def _unfit(logits: Tensor) -> str | None:
    if logits.dtype not in DTYPES:
        return f"takes float32, bfloat16 and float16, got {logits.dtype}"
    return unfit(logits) or ("leaves empty rows to torch" if logits.shape[-1] == 0 else None)


@triton.jit
def _log_sum_exp(x, counts, out, scale, apart: tl.int64, count, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Compute the log-sum-exp of one piece of a row of x times `scale`. For several sequences, with
    ROWS rows each, `counts` may say how many entries of a row exist."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if counts is not None:
        count = tl.load(counts + row // ROWS).to(tl.int32)
    at = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(x + row * apart + at, mask=at < count, other=float("-inf")).to(tl.float32) * scale
    top = tl.max(value, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    tl.store(out + row * tl.num_programs(1) + piece, top + tl.log(tl.sum(tl.exp(value - shift), 0)))


@triton.jit
def row_log_sum_exp(values):
    """Return the log-sum-exp of each row of a tile, minus infinity if all of its numbers are."""
    top = tl.max(values, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top + tl.log(tl.sum(tl.exp(values - shift[:, None]), 1))


@triton.jit
def joined(lses, row, live, pieces, PIECES: tl.constexpr):
    """Return the log-sum-exps of whole rows of a matrix, given those of their `pieces` parts in
    `lses`. row: the numbers of the rows; where `live` is false, nothing is read."""
    piece = tl.arange(0, PIECES)
    top = tl.full([row.shape[0], PIECES], float("-inf"), tl.float32)
    total = tl.zeros([row.shape[0], PIECES], tl.float32)
    for start in range(0, pieces, PIECES):
        there = live[:, None] & (start + piece < pieces)
        part = tl.load(lses + row[:, None] * pieces + start + piece, mask=there, other=float("-inf"))
        highest = tl.maximum(top, part)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - shift) + tl.exp(part - shift)
        top = highest
    return row_log_sum_exp(top + tl.log(total))


@triton.jit(do_not_specialize=["count", "pieces"])
def _weights(
    x, lses, counts, out, scale, apart: tl.int64, bound, room, count, pieces, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, FOLD: tl.constexpr, PIECES: tl.constexpr, SUM: tl.constexpr, TIMES: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the softmax weights of a group's query heads, for a block of tokens: their sum if
    SUM, else the largest; and write each TIMES times. `lses` holds the log-sum-exps of the `pieces`
    parts of each row of x. Rows of x lie `apart` entries apart, those of `out` `room`."""
    this, head = tl.program_id(1).to(tl.int64), tl.arange(0, FOLD)
    row, mine = this * HEADS + head, head < HEADS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row[:, None] * apart + at, mask=mine[:, None] & (at < bound), other=float("-inf"))
    if counts is not None:
        count = tl.load(counts + this // GROUPS).to(tl.int32)
    lse = joined(lses, row, mine, pieces, PIECES)
    weight = tl.where(mine[:, None], tl.exp(value.to(tl.float32) * scale - lse[:, None]), 0.0)
    combined = tl.sum(weight, 0) if SUM else tl.max(weight, 0)  # no weight is smaller than 0
    if TIMES == 1:
        tl.store(out + this * room + at, combined, mask=at < room)
    else:
        time = tl.arange(0, WIDE)
        to, there = at[:, None] * TIMES + time, (at < count)[:, None] & (time < TIMES)
        tl.store(out + this * room + to, tl.broadcast_to(combined[:, None], [BLOCK, WIDE]), mask=there)


@triton.jit(do_not_specialize=["count"])
def _tops(x, tops, near, count, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Find the largest logit of one piece of a row of x, and set the group's entry in `near`, in
    which `_margins` will count, to 0."""
    this, piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    pieces, heads = tl.num_programs(1), tl.num_programs(2)
    row = this * heads + head
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    end = tl.minimum((piece + 1) * PIECE, count)
    for start in range(piece * PIECE, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(x + row * count + at, mask=at < end, other=float("-inf")).to(tl.float32))
    tl.store(tops + (this * pieces + piece) * heads + head, tl.max(top, 0))
    if piece + head == 0:
        tl.store(near + this, 0)


@triton.jit(do_not_specialize=["count", "candidates", "pieces"])
def _margins(
    x, tops, of_each, out, near, reach, count, candidates, pieces, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute how far each of a block of candidate tokens lies below the largest logit of its row
    in x, at the query head of the group where it comes closest, and count in `near` those within
    `reach`. `tops` holds the largest logit of each piece of a row. For several sequences, `of_each`
    may hold the number of candidates of each. The count is an integer, so the order of additions
    does not matter."""
    this, piece = tl.program_id(1).to(tl.int64), tl.arange(0, PIECES)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < candidates
    if of_each is not None:
        live = at < tl.load(of_each + this // GROUPS)
    margin = tl.full([BLOCK], float("-inf"), tl.float32)
    for head in range(HEADS):
        of_head = tops + (this * pieces + piece) * HEADS + head
        top = tl.max(tl.load(of_head, mask=piece < pieces, other=float("-inf")), 0)
        row = this * HEADS + head
        margin = tl.maximum(margin, tl.load(x + row * count + at, mask=live, other=0.0).to(tl.float32) - top)
    tl.store(out + this * candidates + at, margin, mask=live)
    tl.atomic_add(near + this, tl.sum((live & (margin >= -reach)).to(tl.int64), 0))
