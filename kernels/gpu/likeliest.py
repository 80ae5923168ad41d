"""Finds the most likely token of each sequence in two launches: of pieces of the vocabulary, then of
all pieces. A single program per row would read its 256 KB alone, on one multiprocessor.

A logit and its place become one whole number, whose largest value is the answer: the upper half
orders as the logits do, the lower half is larger for earlier places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    load,
    load_logits,
    padded,
    program_at,
    unfit,
    unfit_floats,
    unfit_shape,
)

_PIECE = tl.constexpr(1024)  # logits that one program reads
_MOST = 1 << 22  # logits of a row


def likeliest_tokens(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the most likely token of each row of logits [B V], and 1 where the row's sum is
    finite, as kernels/reference.py defines it: [2 B] int64, in `out` if it is given."""
    rows, width = logits.shape
    pieces = triton.cdiv(width, _PIECE)
    best = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
    sums = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    out = torch.empty((2, rows), dtype=torch.int64, device=logits.device) if out is None else out
    _best_of_piece[(pieces, rows)](logits, best, sums, logits.stride(0), width)
    _best_of_all[(rows,)](best, sums, out, out.stride(0), pieces, num_warps=1)
    return out


def likeliest_tokens_refuses(logits, out=None):
    if logits.stride(1) != 1 or (out is not None and out.stride(1) != 1):
        return "needs the logits of a sequence, and the tokens of all, side by side"
    if logits.shape[1] > _MOST:
        return f"takes up to {_MOST} logits of a sequence, got {logits.shape[1]}"
    if out is not None and (reason := unfit(out)):
        return reason
    return unfit_floats(logits) or unfit_shape(out, 2, len(logits))


@triton.jit
def _best_of_piece(logits, best, sums, xt: tl.int64, width):
    """Write for one piece of a row the whole number that stands for its largest logit and the place
    of this, and the sum of its logits. NaN is larger than all numbers, as in torch."""
    piece, row = tl.program_id(0), program_at(1)
    place = piece * _PIECE + tl.arange(0, _PIECE)
    there = place < width
    value = load_logits(logits + row * xt + place, there)
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(value == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # both zeros are equal
    order = tl.where(value != value, 0x7FFFFFFF, order).to(tl.int64)
    # places behind the row are later than all
    number = (order << 32) + (0x7FFFFFFF - place).to(tl.int64)
    at = row * tl.num_programs(0) + piece
    tl.store(best + at, tl.max(number, 0))
    tl.store(sums + at, tl.sum(tl.where(there, value, 0.0), 0))


@triton.jit
def _best_of_all(best, sums, out, step: tl.int64, PIECES: tl.constexpr):
    """Write the token of one row to `out`, and `step` entries behind it whether the sum of its
    logits is finite. The whole numbers of its pieces are in `best`."""
    row, piece = program_at(0), tl.arange(0, padded(PIECES, 1))
    there = piece < PIECES
    number = tl.load(best + row * PIECES + piece, mask=there, other=-(2**63))
    total = tl.sum(load(sums + row * PIECES + piece, there), 0)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(number, 0) & 0x7FFFFFFF))
    tl.store(out + step + row, (tl.abs(total) < float("inf")).to(tl.int64))
