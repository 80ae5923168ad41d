"""Names the tokens of pages, chunks and blocks in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    known,
    lengths_of,
    load,
    number_of,
    program_at,
    unfit,
)
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, filled

_TOKENS = tl.constexpr(1024)  # that one program names


def token_rows(chunks: Tensor | Ragged, size: int, last: int | PerSequence | None = None) -> Tensor:
    """Return the tokens of chunks of `size` tokens, and of the chunk `last` after them if it is
    given, as kernels/pages.py defines it. chunks [B heads K] -> [B heads K * size], or
    [B heads (K + 1) * size]"""
    whole, more = filled(chunks), last is not None
    batch, heads, room = whole.shape
    tokens = (room + more) * size
    out = torch.empty((batch, heads, tokens), dtype=torch.int64, device=whole.device)
    if tokens:
        of_each, number = known(0 if last is None else last, whole.device)
        _token_rows[(triton.cdiv(tokens, _TOKENS), batch * heads)](
            whole,
            lengths_of(chunks),
            of_each,
            out,
            *whole.stride(),
            room,
            number,
            more,
            heads,
            size,
        )
    return out


def token_rows_refuses(chunks, *_):
    whole = filled(chunks)
    return (
        unfit(whole) if whole.dtype == torch.int64 else f"takes numbers as int64, got {whole.dtype}"
    )


@triton.jit(do_not_specialize=["room", "number"])
def _token_rows(
    chunks, counts, of_each, out, cb: tl.int64, ch: tl.int64, ck: tl.int64, room, number: tl.int64, LAST: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a block of tokens of one head's chunks to `out`. LAST: the chunks are
    followed by one more, of the given `number` or of the number in `of_each`, which has one per
    sequence."""
    this = program_at(1)
    sequence = this // HEADS
    token = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    place, count = token // SIZE, number_of(counts, sequence, room)
    at = chunks + sequence * cb + this % HEADS * ch + place.to(tl.int64) * ck
    chunk = load(at, place < count)
    if LAST:
        chunk = tl.where(place == count, number_of(of_each, sequence, number), chunk)
    tokens = (room + LAST) * SIZE
    tl.store(out + this * tokens + token, chunk * SIZE + token % SIZE, mask=token < tokens)
