"""Multiplies queries with the rows of an index, compiled (scores.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cpu.ffi.bindings import Function, Struct, elements, floats, int64s, integer, real
from kernels.cpu.ffi.library import load
from kernels.pages import by_sign
from kernels.ragged import Ragged, parts_of, with_sizes


class RowScores(Struct):
    """Describe a call of the compiled function that multiplies each query with each row of an
    index."""

    # width: channels, filled up to whole cache lines with zeros
    q = elements("batch * groups * heads * width")
    x = elements(strides="batch group row")  # [B G S C]
    # of `Ragged`, instead of the address and the strides above
    table = int64s("batch * 3", optional=True)
    counts = int64s("batch", optional=True)  # of each sequence, instead of `count`
    out = floats("batch * groups * heads * count", written=True)
    # the log-sum-exps of the scaled products of each part's rows
    lses = floats(
        "batch * groups * heads * ((count + part - 1) // part)", written=True, optional=True
    )
    batch = groups = heads = width = count = row_bytes = integer()
    part = integer()  # rows of a part
    scale = real()


_library = load(
    "scores", Function("row_scores", RowScores), Function("is_on_tiles", returns="int64_t")
)

_LINES = (1, 2, 3, 4, 6, 8, 16)  # row sizes that the library is built for, in cache lines
_PART = 1024  # rows whose log-sum-exp is computed together
_BYTES = {torch.float32: 4, torch.bfloat16: 2}


def row_scores(q: Tensor, x: Tensor | Ragged) -> Tensor | Ragged:
    """Multiply the g query heads of each group (those that share a KV head) with every row of an
    index, as kernels/reference.py defines it. q [B G g C], x [B G S C] -> [B G g S]"""
    return with_sizes(_scores(q, x)[0], x, 3)


def _scores(
    q: Tensor, x: Tensor | Ragged, scale: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return what `row_scores` does, padded, and if `scale` is given, the log-sum-exps of parts."""
    batch, groups, heads, width = q.shape
    count, size = x.shape[2], x.dtype.itemsize
    lses = (
        None
        if scale is None
        else q.new_empty((batch, groups, heads, -(-count // _PART)), dtype=torch.float32)
    )
    out = q.new_empty((batch, groups, heads, count), dtype=torch.float32)
    q = q.contiguous() if width * size % 64 == 0 else pad(q, (0, -width % (64 // size)))
    if count:
        first, table, counts = parts_of(x, q.device)
        _library.row_scores(
            q=q, x=first, table=table, counts=counts, out=out, batch=batch, groups=groups, heads=heads,
            width=q.shape[3], count=count, row_bytes=width * size, lses=lses, part=_PART, scale=scale or 1.0,
        )  # fmt: skip
    return out, lses


def row_scores_refuses(q, x):
    return _unfit(q, x, q.shape[3])


def row_scores_with_lse(q: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute what `row_scores` does, and the log-sum-exp of the scaled scores of each part of the rows,
    as kernels/reference.py defines it. -> [B G g S], [B G g n]"""
    scores, lses = _scores(q, x, scale)
    assert lses is not None
    return scores, lses


def row_scores_with_lse_refuses(q, x, scale):
    if isinstance(x, Ragged):
        return "takes rows of sequences of one length"
    if not x.shape[2]:
        return "takes at least one row"
    return row_scores_refuses(q, x)


def page_scores(q: Tensor, bounds: Tensor | Ragged) -> Tensor | Ragged:
    """Bound the product of each query q [B G g D] with the keys of each page, whose largest and
    smallest values are bounds [B G P 2D], as kernels/pages.py defines it. -> [B G g P]"""
    return row_scores(by_sign(q), bounds)


def page_scores_refuses(q, bounds):
    return _unfit(q, bounds, 2 * q.shape[3])


def _unfit(q: Tensor, x: Tensor | Ragged, width: int) -> str | None:
    """Return why the compiled function cannot multiply q with rows x of `width` channels, or
    None."""
    if -(-width * _BYTES.get(q.dtype, 1) // 64) not in _LINES:
        return f"is not built for rows of {width} x {q.dtype}"
    if q.dtype not in _BYTES or q.is_cuda:
        return f"takes float32 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    if x.dtype != q.dtype:
        return f"takes one dtype, got {q.dtype} and {x.dtype}"
    return "needs the channels of a row side by side" if x.stride(3) != 1 else None
