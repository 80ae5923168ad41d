"""Copies rows of each KV head to and from a block of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import common
from kernels.gpu.common import (
    head_rows,
    lengths_of,
    load,
    located,
    number_of,
    padded,
    program_at,
    unfit,
    unfit_host,
    unfit_shape,
)
from kernels.ragged import Ragged, filled, first_of, with_sizes

NEW_ALONE = "writes to a new tensor alone"  # why it refuses to write where the caller says
_TILE = 2048  # entries that a program writes into rows
# Bytes of a tile that is read, and programs where rows come over the bus, of which each has asked for two tiles. So
# 384 KiB are on their way, enough for a bus of 55 GB/s that answers after 2 us, and most multiprocessors are free for
# other kernels.
_READ_TILE, _BUS_PROGRAMS = 8192, 24
# only the width matters to a copy
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows(
    x: Tensor | Ragged, rows: Tensor | Ragged, out: Tensor | None = None
) -> Tensor | Ragged:
    """Copy rows (tokens) of each KV head out of x [B G S D] at the indices rows [B G K], as
    kernels/reference.py defines it. -> [B G K D]"""
    return gather_tiers(x, rows, None, None)


def gather_rows_refuses(x, rows, out=None):
    return NEW_ALONE if out is not None else gather_tiers_refuses(x, rows, None, None)


def gather_tiers(
    far: Tensor | Ragged, rows: Tensor | Ragged, held: Tensor | None, slots: Tensor | None
) -> Tensor | Ragged:
    """Copy rows of each KV head out of `held` [B G C D], where `slots` [B G K] says so, else out of
    `far` [B G S D], as kernels/reference.py defines it. -> [B G K D]. Rows in pinned host memory
    are read over the bus while the kernel runs, by few programs, so that kernels of another stream
    run beside it."""
    first, chosen = first_of(far), filled(rows)
    (batch, groups, count), dim = chosen.shape, first.shape[3]
    out = torch.empty((*chosen.shape, dim), dtype=first.dtype, device=chosen.device)
    wide = min(_TILE, padded(dim, 1))
    at_once = max(1, _READ_TILE // (wide * first.element_size()))
    tiles = triton.cdiv(count, at_once) * batch * groups * triton.cdiv(dim, wide)
    if out.numel():
        _from_tiers[(min(tiles, _BUS_PROGRAMS) if first.device.type == "cpu" else tiles,)](
            _words(far),
            None if held is None else _words(held),
            chosen.contiguous(),
            lengths_of(rows),
            None if slots is None else slots.contiguous(),
            _words(out).x,
            count,
            tiles,
            groups,
            dim,
            wide,
            at_once,
        )
    return with_sizes(out, rows)


def gather_tiers_refuses(far, rows, held, slots):
    if held is not None and slots is not None:
        sides = unfit_shape(held, *rows.shape[:2], None, far.shape[3]) or unfit_shape(
            slots, *rows.shape
        )
        if sides or held.dtype != far.dtype:
            return sides or f"takes one dtype, got {far.dtype} and rows held as {held.dtype}"
    if held is not None and held.stride(3) != 1:
        return "needs the channels of a row side by side"
    near = [x for x in (held, slots) if x is not None]
    return unfit_host(first_of(far), filled(rows), *near) or _unfit(far, filled(rows))


def _unfit(whole: Tensor | Ragged, rows: Tensor) -> str | None:
    """Return why no kernel can copy `rows` of `whole`, or None, wherever they lie."""
    x = first_of(whole)
    if x.element_size() not in _WORDS:
        return f"takes entries of up to 8 bytes, got {x.dtype}"
    if rows.dtype not in (torch.int64, torch.int32):
        return f"takes rows as int64 or int32, got {rows.dtype}"
    if x.stride(3) != 1:
        return "needs the channels of a row side by side"
    return unfit_shape(whole, *rows.shape[:2], None, None)


def put_rows(x: Tensor | Ragged, rows: Tensor, values: Tensor) -> None:
    """Write values [B G K D] into the rows [B G K] of each KV head of x [B G S D], as
    kernels/reference.py defines it."""
    (batch, groups, count, dim), wide = values.shape, min(_TILE, padded(values.shape[3], 1))
    if values.numel():
        _put[(triton.cdiv(count, _TILE // wide), batch * groups, triton.cdiv(dim, wide))](
            _words(x),
            rows,
            _words(values if values.stride(3) == 1 else values.contiguous()),
            *rows.stride(),
            count,
            groups,
            dim,
            wide,
            _TILE // wide,
        )


def put_rows_refuses(x, rows, values):
    if values.dtype != x.dtype:
        return f"takes one dtype, got {x.dtype} and values of {values.dtype}"
    width = values.shape[3] if isinstance(x, Ragged) else x.shape[3]
    sides = unfit_shape(values, *rows.shape, width)
    return sides or unfit(first_of(x), rows, values) or _unfit(x, rows)


def _words(x: Tensor | Ragged) -> common.Rows:
    """Return where the rows of x lie, as whole numbers of the same width."""
    rows = located(x)
    return rows._replace(x=rows.x.view(_WORDS[rows.x.element_size()]))


@triton.jit(do_not_specialize=["count"])
def _put(
    x,
    rows,
    values,
    rb: tl.int64,
    rg: tl.int64,
    rk: tl.int64,
    count,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write a tile of `values`, some rows and channels of one head, into rows of x."""
    this = program_at(1)
    sequence, group = this // GROUPS, this % GROUPS
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    live = place < count
    row = load(rows + sequence * rb + group * rg + place * rk, live).to(tl.int64)
    inside, step = head_rows(x, sequence, group)
    outside, apart = head_rows(values, sequence, group)
    there = live[:, None] & (channel < DIM)
    value = tl.load(outside + place[:, None] * apart + channel, mask=there)
    tl.store(inside + row[:, None] * step + channel, value, mask=there)


@triton.jit(do_not_specialize=["count", "tiles"])
def _from_tiers(
    far,
    held,
    rows,
    counts,
    slots,
    out,
    count,
    tiles,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy tiles, each some rows and channels of one head, to `out`: a row with a slot of 0 or more
    from that slot of `held`, any other one from `far`. For several sequences, `counts` may say how
    many rows each has. Each program takes every so many-th tile, and asks for the next one before
    it stores the last."""
    tile = tl.program_id(0)
    x, at, channel, live = _load_tile(
        tile, far, held, rows, counts, slots, count, GROUPS, DIM, WIDE, ROWS
    )
    for following in range(tile + tl.num_programs(0), tiles, tl.num_programs(0)):
        y, next_at, next_channel, next_live = _load_tile(
            following, far, held, rows, counts, slots, count, GROUPS, DIM, WIDE, ROWS
        )
        _store_tile(out, x, at, channel, live, DIM)
        x, at, channel, live = y, next_at, next_channel, next_live
    _store_tile(out, x, at, channel, live, DIM)


@triton.jit
def _load_tile(
    tile,
    far,
    held,
    rows,
    counts,
    slots,
    count,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load the tile number `tile`. Return it, its rows among those of all heads [ROWS], its channels
    [WIDE], and which of its rows there are."""
    columns: tl.constexpr = (DIM + WIDE - 1) // WIDE
    per_head = tl.cdiv(count, ROWS)
    this = (tile // columns // per_head).to(tl.int64)
    sequence, group = this // GROUPS, this % GROUPS
    place = tile // columns % per_head * ROWS + tl.arange(0, ROWS)
    live = place < number_of(counts, sequence, count)
    at = this * count + place
    channel = tile % columns * WIDE + tl.arange(0, WIDE)
    row = load(rows + at, live).to(tl.int64)
    first, step = head_rows(far, sequence, group)
    begin = first + row * step
    if slots is not None:
        slot = tl.load(slots + at, mask=live, other=-1).to(tl.int64)
        near, apart = head_rows(held, sequence, group)
        begin = tl.where(slot >= 0, near + slot * apart, begin)
    value = tl.load(begin[:, None] + channel, mask=live[:, None] & (channel < DIM))
    return value, at, channel, live


@triton.jit
def _store_tile(out, x, at, channel, live, DIM: tl.constexpr):
    tl.store(out + at[:, None] * DIM + channel, x, mask=live[:, None] & (channel < DIM))
