"""Turns logits into weights: log-sum-exp of each row, then the weights of a group; and margins to
the largest logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import DTYPES, padded, unfit
from kernels.per_sequence import PerSequence
from kernels.ragged import RAGGED, Ragged, filled, too_few

_PIECE = 4096  # entries of a row; a longer row is summed in pieces
_BLOCK = 1024


def log_sum_exp(logits: Tensor, scale: float, counts: Tensor | None = None) -> Tensor:
    """Return the log-sum-exp of each row of logits times `scale`. [... S] -> [...] (fp32)

    counts [B]: only so many leading entries of each sequence's rows exist; None: all."""
    count = logits.shape[-1]
    pieces = triton.cdiv(count, _PIECE)
    out: Tensor = logits.new_empty((*logits.shape[:-1], pieces), dtype=torch.float32)
    if out.numel():
        rows = out.numel() // pieces
        side = min(_BLOCK, triton.next_power_of_2(count))
        of_each = 1 if counts is None else rows // len(counts)
        _log_sum_exp[(rows, pieces)](logits.contiguous(), counts, out, scale, count, of_each, _PIECE, side, num_warps=4)
    return log_sum_exp(out, 1.0) if pieces > 1 else out.squeeze(-1)


def group_weights(logits: Tensor | Ragged, scale: float, reduce: str) -> Tensor | Ragged:
    """Turn logits [B G g S] into one weight per KV head and token, [B G S], as kernels/reference.py
    defines it: a softmax in each query head, then the sum or the largest over the group."""
    (batch, groups, heads, count), counts = logits.shape, logits.counts if isinstance(logits, Ragged) else None
    x = filled(logits).contiguous()
    out = x.new_empty((batch, groups, count), dtype=torch.float32)
    if count:
        _weights[(triton.cdiv(count, _BLOCK), batch * groups)](
            x, log_sum_exp(x, scale, counts), counts, out, scale, count, groups, heads, reduce == "sum", _BLOCK,
            num_warps=4,
        )  # fmt: skip
    return Ragged.filled_up(out, logits.sizes) if isinstance(logits, Ragged) else out


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


@triton.jit(do_not_specialize=["count"])
def _log_sum_exp(x, counts, out, scale, count, ROWS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the log-sum-exp of one piece of a row of x times `scale`. For several sequences, with
    ROWS rows each, `counts` may say how many entries of a row exist."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    room = count
    if counts is not None:
        count = tl.load(counts + row // ROWS).to(tl.int32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    end = tl.minimum((piece + 1) * PIECE, count)
    for start in range(piece * PIECE, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * room + at, mask=at < end, other=float("-inf")).to(tl.float32) * scale
        highest = tl.maximum(top, value)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - shift) + tl.exp(value - shift)
        top = highest
    highest = tl.max(top, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(total * tl.exp(top - shift), 0)
    tl.store(out + row * tl.num_programs(1) + piece, highest + tl.log(total))


@triton.jit(do_not_specialize=["count"])
def _weights(
    x, lse, counts, out, scale, count, GROUPS: tl.constexpr, HEADS: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Combine the softmax weights of a group's query heads, for a block of tokens: their sum if
    SUM, else the largest. `lse` holds the log-sum-exp of each row of x."""
    this = tl.program_id(1).to(tl.int64)
    room = count
    if counts is not None:
        count = tl.load(counts + this // GROUPS).to(tl.int32)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    combined = tl.zeros([BLOCK], tl.float32)  # no weight is smaller
    for head in range(HEADS):
        row = this * HEADS + head
        value = tl.load(x + row * room + at, mask=at < count, other=0.0).to(tl.float32)
        weight = tl.exp(value * scale - tl.load(lse + row))
        combined = combined + weight if SUM else tl.maximum(combined, weight)
    tl.store(out + this * room + at, combined, mask=at < count)


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
