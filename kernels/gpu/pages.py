"""Names the tokens of pages, chunks and blocks in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import unfit
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, filled

_TOKENS = 1024  # that one program names


def token_rows(chunks: Tensor | Ragged, size: int, last: int | PerSequence | None = None) -> Tensor:
    """Return the tokens of chunks of `size` tokens, and of the chunk `last` after them if it is
    given, as kernels/pages.py defines it. chunks [B heads K] -> [B heads K * size], or
    [B heads (K + 1) * size]"""
    whole, counts = filled(chunks), chunks.counts if isinstance(chunks, Ragged) else None
    batch, heads, room = whole.shape
    tokens = (room + (last is not None)) * size
    out = torch.empty((batch, heads, tokens), dtype=torch.int64, device=whole.device)
    if tokens:
        of_each = last.on(whole.device) if isinstance(last, PerSequence) else None
        number = last if isinstance(last, int) else 0
        _token_rows[(triton.cdiv(tokens, _TOKENS), batch * heads)](
            whole, counts, of_each, out, *whole.stride(), room, number, last is not None, heads, size, _TOKENS,
            num_warps=4,
        )  # fmt: skip
    return out


def token_rows_refuses(
    chunks: Tensor | Ragged, size: int, last: int | PerSequence | None = None
) -> str | None:
    whole = filled(chunks)
    return (
        unfit(whole) if whole.dtype == torch.int64 else f"takes numbers as int64, got {whole.dtype}"
    )


@triton.jit(do_not_specialize=["room", "number"])
def _token_rows(
    chunks, counts, of_each, out, cb: tl.int64, ch: tl.int64, ck: tl.int64, room, number: tl.int64, LAST: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a block of tokens of one head's chunks to `out`. LAST: the chunks are
    followed by one more, of the given `number` or of the number in `of_each`, which has one per
    sequence."""
    this = tl.program_id(1).to(tl.int64)
    sequence = this // HEADS
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place, count = token // SIZE, room
    if counts is not None:
        count = tl.load(counts + sequence).to(tl.int32)
    at = chunks + sequence * cb + this % HEADS * ch + place.to(tl.int64) * ck
    chunk = tl.load(at, mask=place < count, other=0)
    if LAST:
        if of_each is not None:
            number = tl.load(of_each + sequence)
        chunk = tl.where(place == count, number, chunk)
    tokens = (room + LAST) * SIZE
    tl.store(out + this * tokens + token, chunk * SIZE + token % SIZE, mask=token < tokens)
