"""Estimates the weights of chosen tokens by keys in 4 bits, and finds the tokens that carry a share of
them, compiled (top_p.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.cpu.ffi.bindings import (
    Function,
    Struct,
    anything,
    elements,
    floats,
    int64s,
    integer,
    real,
)
from kernels.cpu.ffi.library import load
from kernels.cpu.widths import MOST_LINES, WIDTHS, width_of
from kernels.ragged import Ragged, first_of, table_of
from kernels.top_p import KeyCodes, existing, log_weights, without


class EstimatedLogits(Struct):
    """Describe a call of the compiled function that multiplies queries with chosen keys in 4 bits."""

    q = elements("batch * groups * heads * width")  # width: a head's channels, filled up with zeros
    codes = anything(strides="batch group token")  # uint8 [B G S D/2]
    ranges = anything(strides="batch group token")  # fp16 [B G S 2]
    # [B 3] of `Ragged`, instead of the address and the strides above
    codes_table = ranges_table = int64s("batch * 3", optional=True)
    rows = int64s("batch * groups * lists * count")
    out = floats("batch * groups * heads * count", written=True)
    batch = groups = count = dim = width = integer()
    heads = lists = integer()  # of a KV head


class Carrying(Struct):
    """Describe a call of the compiled function that marks which tokens carry a share of a softmax."""

    logits = floats("lists * heads * count")
    always = floats("lists * heads")
    read = anything("lists * count", written=True)  # bool
    lists = heads = count = integer()  # heads: of a list
    mass = real()


_library = load(
    "top_p", Function("estimated_logits", EstimatedLogits), Function("carrying", Carrying)
)


def estimated_logits(q: Tensor, keys: KeyCodes, rows: Tensor | Ragged) -> tuple[Tensor, Tensor]:
    """Multiply queries q [B G g D] with the quantised keys of chosen tokens, rows [B G|H K], as
    kernels/top_p.py defines it. -> [B G g K] or [B H 1 K], and the same again"""
    chosen, missing = existing(rows)
    (batch, groups, heads, dim), (_, lists, count) = q.shape, chosen.shape
    out = q.new_empty((batch, lists, groups * heads // lists, count), dtype=torch.float32)
    width = width_of(dim, q.dtype)
    if count:
        _library.estimated_logits(
            q=pad(q, (0, width - dim)).contiguous(), codes=first_of(keys.codes), ranges=first_of(keys.ranges),
            codes_table=table_of(keys.codes), ranges_table=table_of(keys.ranges), rows=chosen.long().contiguous(),
            out=out, batch=batch, groups=groups, heads=heads, lists=lists // groups, count=count, dim=dim, width=width,
        )  # fmt: skip
    return (without(out, missing),) * 2


def estimated_logits_refuses(q, keys, rows):
    if q.dtype not in WIDTHS or q.is_cuda:
        return f"takes float32 and bfloat16 on the CPU, got {q.dtype} on {q.device}"
    if q.shape[3] % 16 or q.shape[3] > MOST_LINES * WIDTHS[q.dtype]:
        return f"is not built for heads of {q.shape[3]} x {q.dtype}"
    return None


def carrying(logits: Tensor, tops: Tensor, always: Tensor, mass: float, scale: float) -> Tensor:
    """Return log-weights of the candidates, [B C K], 0 for those that carry a share `mass` of the
    weights, as kernels/top_p.py defines it. logits [B C h K], always [B C h P]"""
    batch, lists, heads, count = logits.shape
    if mass == 1:
        return log_weights((logits > float("-inf")).any(2))
    read = logits.new_empty((batch, lists, count), dtype=torch.bool)
    if count:
        _library.carrying(
            logits=(logits * scale).contiguous(), always=always.logsumexp(-1).contiguous(), read=read,
            lists=batch * lists, heads=heads, count=count, mass=mass,
        )  # fmt: skip
    return log_weights(read)


def carrying_refuses(logits, tops, always, mass, scale):
    if logits.dtype == always.dtype == torch.float32 and not logits.is_cuda:
        return None
    return f"takes float32 on the CPU, got {logits.dtype} on {logits.device}"
