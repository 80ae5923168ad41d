"""Computes prefill attention, whole or within a window, and its column sums, compiled
(prefill.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu import decode, scores
from kernels.cpu.ffi.bindings import Function, Struct, elements, floats, integer, real
from kernels.cpu.ffi.library import load
from kernels.ragged import filled
from kernels.reference import NARROW, Segment
from kernels.windowed import room_by_token


class PrefillAttention(Struct):
    """Describe a call of the compiled attention over a prompt, which may also return what each key
    receives and each query's log-sum-exp."""

    q = elements(strides="batch head token")  # [B H T D]
    k = elements(strides="batch group token")
    # None, as is `out`, where only the sums are wanted
    v = elements(strides="batch group token", optional=True)
    out = elements(strides="batch head token", optional=True, written=True)
    sums = floats("batch * groups * heads * stored", optional=True, written=True)
    # log-sum-exp of each query
    lse = floats("batch * groups * heads * fresh", optional=True, written=True)
    # heads: query heads of a KV head; fresh: queries
    batch = groups = heads = fresh = stored = dim = integer()
    first = integer(None)
    window = integer()  # query t sees the last `window` keys up to place first + t
    scale = real()


_library = load(
    "prefill",
    Function("prefill_attention", PrefillAttention),
    Function("is_fast_in_float32", returns="int64_t"),
    Function("is_fast_in_bfloat16", returns="int64_t"),
    Function("is_faster_in_torch", returns="int64_t"),
)
FAST = {
    torch.float32: bool(_library.is_fast_in_float32()),
    torch.bfloat16: bool(_library.is_fast_in_bfloat16()),
}
_FASTER_IN_TORCH = bool(_library.is_faster_in_torch())


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last T of S tokens, q [B H T D], k, v [B G S D] -> [B H T D],
    as kernels/reference.py defines it. The result lies in memory as [B T H D], as the output
    projection needs it."""
    if q.shape[2] == 1:
        return decode.segment_attention(q, [Segment(k, v)], scale)
    out = room_by_token(q)
    _run(q, k, v, out, None, scale)
    return out


def prefill_attention_refuses(q, k, v, scale):
    if not FAST.get(q.dtype, True) and q.shape[2] > 1:
        return f"leaves {q.dtype} to torch, whose attention is faster on this processor"
    if q.dtype is torch.bfloat16 and q.shape[2] > 1 and _FASTER_IN_TORCH:
        return "leaves bfloat16 to torch, which has AMX: this build has none (KV_HARNESS_MARCH)"
    return prefill_attention_with_column_sums_refuses(q, k, v, scale)


def column_sums(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Sum the attention that each key receives from the queries, q [B H T D], k [B G S D] ->
    [B H S], as kernels/windowed.py defines it."""
    if q.shape[2] == 1:
        return _logits_of_one(q, k, scale).softmax(-1)
    sums = q.new_zeros((*q.shape[:2], k.shape[2]), dtype=torch.float32)
    _run(q, k, None, None, sums, scale)
    return sums


def column_sums_refuses(q, k, scale):
    return prefill_attention_with_column_sums_refuses(q, k, k, scale)


def prefill_attention_with_column_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention [B H T D] and the attention that each key receives, summed over
    queries, [B H S], as kernels/windowed.py defines them."""
    if q.shape[2] == 1:
        return _one_query(q, k, v, scale)
    out = room_by_token(q)
    sums = q.new_zeros((*q.shape[:2], k.shape[2]), dtype=torch.float32)
    _run(q, k, v, out, sums, scale)
    return out, sums


def prefill_attention_with_column_sums_refuses(q, k, v, scale):
    refusal = windowed_attention_refuses(q, k, v)
    if refusal is None and q.shape[2] == 1:
        return decode.segment_attention_refuses(q, [Segment(k, v)], scale)
    return refusal


def _one_query(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `prefill_attention_with_column_sums` for a single query per sequence by the functions
    of a decode step, since packing keys and values would not pay for one query."""
    out, lse = decode.segment_attention_with_lse(q, [Segment(k, v)], scale)
    return out, _logits_of_one(q, k, scale).sub_(lse.unsqueeze(-1)).exp_()


def _logits_of_one(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the logits of a single query per sequence, q [B H 1 D], k [B G S D] -> [B H S]."""
    products = filled(scores.row_scores(q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k))
    return products.view(*q.shape[:2], -1).mul_(scale)


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int
) -> tuple[Tensor, Tensor]:
    """Compute attention in which query t sees the last `window` keys up to key `first` + t, and its
    log-sum-exp, as kernels/windowed.py defines it. -> [B H T D], which lies in memory as [B T H D],
    and [B H T]"""
    out = room_by_token(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    _run(q, k, v, out, None, scale, lse=lse, seen=(first, window))
    return out, lse


def windowed_attention_refuses(q, k, v, *_):
    if q.is_cuda or q.dtype not in FAST:
        return f"takes float32 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    if q.shape[3] % 16:
        return f"needs a head size that 16 divides, got {q.shape[3]}"
    if v.shape[3] != k.shape[3]:
        return NARROW.format(v.shape[3], k.shape[3])
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"takes one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}"
    if any(x.stride(3) != 1 for x in (q, k, v)):
        return "needs the channels of a row side by side"
    return None


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    out: Tensor | None,
    sums: Tensor | None,
    scale: float,
    *,
    lse: Tensor | None = None,
    seen: tuple[int, int] | None = None,
) -> None:
    """Call the compiled function, which writes attention, column sums and log-sum-exps into `out`,
    `sums` and `lse` where these are given. `seen`: the first query's position and the window; None:
    each query sees its whole past."""
    batch, heads, fresh, dim = q.shape
    groups, stored = k.shape[1:3]
    first, window = seen or (stored - fresh, stored)
    _library.prefill_attention(
        q=q, k=k, v=v, out=out, sums=sums, lse=lse, batch=batch, groups=groups, heads=heads // groups,
        fresh=fresh, stored=stored, dim=dim, first=first, window=window, scale=scale,
    )  # fmt: skip
