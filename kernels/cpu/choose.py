"""Computes softmax over candidates and chooses among them, compiled (choose.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.ffi.bindings import Function, Struct, floats, int64s, integer, real
from kernels.cpu.ffi.library import load
from kernels.per_sequence import PerSequence, most_of
from kernels.ragged import RAGGED, Ragged, counts_of, filled, too_few, with_sizes
from kernels.reference import mean_counts


class GroupWeights(Struct):
    """Describe a call of the compiled function that turns logits into one weight per KV head and
    token. A pair is one KV head of one sequence."""

    logits = floats("pairs * heads * count")
    out = floats("pairs * count", written=True)
    counts = int64s("pairs // groups", optional=True)  # of each sequence, instead of `count`
    pairs = groups = heads = count = integer()
    largest = integer(0)  # 1 for the largest weight of a group's heads, 0 for their sum
    scale = real()


class GroupMargins(Struct):
    """Describe a call of the compiled function that measures how far candidate tokens lie below the
    largest logit of their row. A pair is one KV head of one sequence."""

    logits = floats("pairs * heads * count")
    out = floats("pairs * candidates", written=True)
    counts = int64s("pairs", written=True)
    # candidates of each sequence, instead of `candidates`
    of_each = int64s("pairs // groups", optional=True)
    pairs = groups = heads = count = candidates = integer()
    reach = real()


class TopK(Struct):
    """Describe a call of the compiled function that finds the indices of the k largest numbers of
    each row."""

    scores = floats()  # `rows` of `count`, `stride` entries apart
    out = int64s("rows * k", written=True)
    # of each sequence, instead of `count` and `k`
    counts = ks = int64s("rows // lists", optional=True)
    rows = count = k = integer()
    lists = integer()  # rows of a sequence
    stride = integer(0)


class FirstPlaces(Struct):
    """Describe a call of the compiled function that finds the first entry with the same value."""

    rows = int64s("lists * count")
    out = int64s("lists * count", written=True)
    lists = count = integer()


_library = load(
    "choose",
    Function("group_weights", GroupWeights),
    Function("group_margins", GroupMargins),
    Function("top_k", TopK),
    Function("first_places", FirstPlaces),
)


def group_weights(logits: Tensor | Ragged, scale: float, reduce: str) -> Tensor | Ragged:
    """Turn logits [B G g S] into one weight per KV head and token, [B G S], as kernels/reference.py
    defines it: a softmax in each query head, then the sum or the largest over the group."""
    batch, groups, heads, count = logits.shape
    x = filled(logits)
    out = x.new_empty((batch, groups, count))
    _library.group_weights(
        logits=x.contiguous(), out=out, counts=counts_of(logits, x.device), pairs=batch * groups, groups=groups,
        heads=heads, count=count, largest=reduce == "largest", scale=scale,
    )  # fmt: skip
    return with_sizes(out, logits)


def group_weights_refuses(logits, scale, reduce):
    return _unfit(logits)


def group_margins(
    logits: Tensor, tops: Tensor | None, candidates: int | PerSequence, reach: float, most: int | PerSequence,
    read: Tensor | None = None,
) -> tuple[Tensor | Ragged, Tensor]:  # fmt: skip
    batch, groups, heads, count = logits.shape
    wanted, of_each = most_of(candidates), counts_of(candidates, logits.device)
    out = logits.new_empty((batch, groups, wanted))
    counts = logits.new_zeros((batch, groups), dtype=torch.int64)
    if wanted:
        _library.group_margins(
            logits=logits.contiguous(), out=out, counts=counts, of_each=of_each, pairs=batch * groups, groups=groups,
            heads=heads, count=count, candidates=wanted, reach=reach,
        )  # fmt: skip
    return with_sizes(out, candidates), mean_counts(counts, most, read)


def group_margins_refuses(logits, tops, candidates, reach, most, read=None):
    return RAGGED if isinstance(logits, Ragged) else _unfit(logits)


def top_k(scores: Tensor | Ragged, count: int | PerSequence) -> Tensor | Ragged:
    x, most = filled(scores), most_of(count)
    size = x.shape[-1]
    if not x.is_contiguous() and (x.stride(-1) != 1 or x.dim() > 3 or not _evenly_spaced(x)):
        x = x.contiguous()
    out = torch.empty((*x.shape[:-1], most), dtype=torch.int64)
    if out.numel():
        rows, stride = x.numel() // size, x.stride(-2) if x.dim() > 1 else size
        _library.top_k(
            scores=x, out=out, counts=counts_of(scores, x.device), ks=counts_of(count, x.device), rows=rows,
            count=size, stride=stride, k=most, lists=max(1, rows // x.shape[0]),
        )  # fmt: skip
    return with_sizes(out, count, out.dim() - 1)


def top_k_refuses(scores, count):
    if isinstance(scores, Ragged) and scores.dim != len(scores.shape) - 1:
        return "takes scores that differ in their last dimension"
    return _unfit(scores) or (
        "leaves a count beyond the row to torch" if too_few(scores, count) else None
    )


def first_places(rows: Tensor) -> Tensor:
    out = torch.empty(rows.shape, dtype=torch.int64)
    if rows.numel():
        lists, count = rows.shape[:2].numel(), rows.shape[2]
        _library.first_places(rows=rows.long().contiguous(), out=out, lists=lists, count=count)
    return out


def first_places_refuses(rows):
    return f"takes rows on the CPU, got {rows.device}" if rows.is_cuda else None


def _evenly_spaced(x: Tensor) -> bool:
    """Return whether consecutive rows of x [... S] are all the same number of entries apart."""
    return x.dim() < 3 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _unfit(x: Tensor | Ragged) -> str | None:
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return None
    return f"takes float32 on the CPU, got {x.dtype} on {x.device}"
