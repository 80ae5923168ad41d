"""Copies rows of each KV head to and from a block of their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import common
from kernels.gpu.common import head_rows, located, unfit, unfit_shape
from kernels.ragged import Ragged, filled, first_of

_TILE = 2048  # entries
# Rows that come over the bus: bytes of a tile, and programs, of which each has asked for two tiles. So 384 KiB are on
# their way, enough for a bus of 55 GB/s that answers after 2 us, and most multiprocessors are free for other kernels.
_BUS_TILE, _BUS_PROGRAMS = 8192, 24
# only the width matters to a copy
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_rows(x: Tensor | Ragged, rows: Tensor | Ragged) -> Tensor | Ragged:
    """Copy rows (tokens) of each KV head out of x [B G S D] at the indices rows [B G K], as
    kernels/reference.py defines it. -> [B G K D]"""
    chosen = filled(rows)
    out = first_of(x).new_empty((*chosen.shape, x.shape[3]))
    _run(x, chosen, rows.counts if isinstance(rows, Ragged) else None, out, put=False)
    return Ragged.filled_up(out, rows.sizes) if isinstance(rows, Ragged) else out


def gather_rows_refuses(x: Tensor | Ragged, rows: Tensor | Ragged) -> str | None:
    return _unfit(x, filled(rows), first_of(x))


def gather_tiers(
    far: Tensor | Ragged, rows: Tensor | Ragged, held: Tensor | None, slots: Tensor | None
) -> Tensor | Ragged:
    """Copy rows of each KV head out of `held` [B G C D], where `slots` [B G K] says so, else out of
    `far` [B G S D], as kernels/reference.py defines it. -> [B G K D]. Rows in pinned host memory
    are read over the bus while the kernel runs, by few programs, so that kernels of another stream
    run beside it."""
    (first, places, aligned), chosen = located(far), filled(rows)
    (batch, groups, count), dim, word = chosen.shape, first.shape[3], _WORDS[first.element_size()]
    out = torch.empty((*chosen.shape, dim), dtype=first.dtype, device=chosen.device)
    wide = min(_TILE, triton.next_power_of_2(dim))
    at_once = max(1, _BUS_TILE // (wide * first.element_size()))
    tiles = triton.cdiv(count, at_once) * batch * groups * triton.cdiv(dim, wide)
    if out.numel():
        _from_tiers[(min(tiles, _BUS_PROGRAMS) if first.device.type == "cpu" else tiles,)](
            first.view(word), places, None if held is None else held.view(word), chosen.contiguous(),
            rows.counts if isinstance(rows, Ragged) else None, None if slots is None else slots.contiguous(),
            out.view(word), *first.stride()[:3], *((0, 0, 0) if held is None else held.stride()[:3]), count, tiles,
            groups, dim, wide, at_once, aligned, num_warps=4,
        )  # fmt: skip
    return Ragged.filled_up(out, rows.sizes) if isinstance(rows, Ragged) else out


def gather_tiers_refuses(
    far: Tensor | Ragged, rows: Tensor | Ragged, held: Tensor | None, slots: Tensor | None
) -> str | None:
    first = first_of(far)
    if first.device.type == "cpu" and not (
        common.INTERPRETED or first.is_pinned() or not first.numel()
    ):
        return "reads host memory that is pinned"
    if held is not None and slots is not None:
        sides = unfit_shape(held, *rows.shape[:2], None, far.shape[3]) or unfit_shape(
            slots, *rows.shape
        )
        if sides or held.dtype != far.dtype:
            return sides or f"takes one dtype, got {far.dtype} and rows held as {held.dtype}"
    near = [x for x in (held, slots) if x is not None] + (
        [] if first.device.type == "cpu" else [first]
    )
    if held is not None and held.stride(3) != 1:
        return "needs the channels of a row side by side"
    return _unfit(far, filled(rows), *near)


def _unfit(whole: Tensor | Ragged, rows: Tensor, *near: Tensor) -> str | None:
    """Return why no kernel can copy `rows` of `whole`, or None. `near`: other tensors of the call
    that must be on the same device as `rows`."""
    x = first_of(whole)
    if reason := unfit_shape(whole, *rows.shape[:2], None, None):
        return reason
    if x.element_size() not in _WORDS:
        return f"takes entries of up to 8 bytes, got {x.dtype}"
    if rows.dtype not in (torch.int64, torch.int32):
        return f"takes rows as int64 or int32, got {rows.dtype}"
    return unfit(rows, *near) or (
        "needs the channels of a row side by side" if x.stride(3) != 1 else None
    )


def put_rows(x: Tensor | Ragged, rows: Tensor, values: Tensor) -> None:
    """Write values [B G K D] into the rows [B G K] of each KV head of x [B G S D], as
    kernels/reference.py defines it."""
    _run(x, rows, None, values if values.stride(3) == 1 else values.contiguous(), put=True)


def put_rows_refuses(x: Tensor | Ragged, rows: Tensor, values: Tensor) -> str | None:
    if values.dtype != x.dtype:
        return f"takes one dtype, got {x.dtype} and values of {values.dtype}"
    width = values.shape[3] if isinstance(x, Ragged) else x.shape[3]
    return unfit_shape(values, *rows.shape, width) or _unfit(x, rows, first_of(x), values)


def _run(x: Tensor | Ragged, rows: Tensor, counts: Tensor | None, block: Tensor, put: bool) -> None:
    batch, groups, count = rows.shape
    first, places, aligned = located(x)
    dim, word = block.shape[3], _WORDS[first.element_size()]
    wide = min(_TILE, triton.next_power_of_2(dim))
    at_once = _TILE // wide
    if block.numel():
        _copy[(triton.cdiv(count, at_once), batch * groups, triton.cdiv(dim, wide))](
            first.view(word), places, rows, counts, block.view(word), *first.stride()[:3], *rows.stride(),
            *block.stride()[:3], count, groups, dim, put, wide, at_once, aligned, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _copy(
    x, places, rows, counts, block, xb: tl.int64, xg: tl.int64, xt: tl.int64, rb: tl.int64, rg: tl.int64, rk: tl.int64,
    bb: tl.int64, bg: tl.int64, bk: tl.int64, count, GROUPS: tl.constexpr, DIM: tl.constexpr, PUT: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy a tile, some rows and channels of one head, from x to `block`, or from `block` into x if
    PUT. For several sequences, `counts` may say how many rows each has."""
    this = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    live = place < count
    if counts is not None:
        live = place < tl.load(counts + this // GROUPS)
    sequence, group, place = this // GROUPS, this % GROUPS, place.to(tl.int64)
    row = tl.load(rows + sequence * rb + group * rg + place * rk, mask=live, other=0).to(tl.int64)
    first, step = head_rows(x, places, sequence, group, xb, xg, xt, ALIGNED)
    inside = first + row[:, None] * step + channel
    outside = block + sequence * bb + group * bg + place[:, None] * bk + channel
    there = live[:, None] & (channel < DIM)
    if PUT:
        tl.store(inside, tl.load(outside, mask=there), mask=there)
    else:
        tl.store(outside, tl.load(inside, mask=there), mask=there)


@triton.jit(do_not_specialize=["count", "tiles"])
def _from_tiers(
    far, places, held, rows, counts, slots, out, fb: tl.int64, fg: tl.int64, ft: tl.int64, hb: tl.int64, hg: tl.int64,
    ht: tl.int64, count, tiles, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy tiles, each some rows and channels of one head, to `out`: a row with a slot of 0 or more
    from that slot of `held`, any other one from `far`. For several sequences, `counts` may say how
    many rows each has. Each program takes every so many-th tile, and asks for the next one before
    it stores the last."""
    tile = tl.program_id(0)
    x = _load_tile(tile, far, places, held, rows, counts, slots, fb, fg, ft, hb, hg, ht, count, GROUPS, DIM, WIDE, ROWS,
                   ALIGNED)  # fmt: skip
    for following in range(tile + tl.num_programs(0), tiles, tl.num_programs(0)):
        y = _load_tile(following, far, places, held, rows, counts, slots, fb, fg, ft, hb, hg, ht, count, GROUPS, DIM,
                       WIDE, ROWS, ALIGNED)  # fmt: skip
        _store_tile(tile, x, counts, out, count, GROUPS, DIM, WIDE, ROWS)
        x, tile = y, following
    _store_tile(tile, x, counts, out, count, GROUPS, DIM, WIDE, ROWS)


@triton.jit
def _load_tile(
    tile, far, places, held, rows, counts, slots, fb, fg, ft, hb, hg, ht, count, GROUPS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    this, at, channel, live = _within(tile, counts, count, GROUPS, DIM, WIDE, ROWS)
    sequence, group = this // GROUPS, this % GROUPS
    row = tl.load(rows + at, mask=live, other=0).to(tl.int64)
    first, step = head_rows(far, places, sequence, group, fb, fg, ft, ALIGNED)
    begin = first + row * step
    if slots is not None:
        slot = tl.load(slots + at, mask=live, other=-1).to(tl.int64)
        begin = tl.where(slot >= 0, held + sequence * hb + group * hg + slot * ht, begin)
    return tl.load(begin[:, None] + channel, mask=live[:, None] & (channel < DIM))


@triton.jit
def _store_tile(
    tile, x, counts, out, count, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    _, at, channel, live = _within(tile, counts, count, GROUPS, DIM, WIDE, ROWS)
    tl.store(out + at[:, None] * DIM + channel, x, mask=live[:, None] & (channel < DIM))


@triton.jit
def _within(
    tile,
    counts,
    count,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the number of the head that the tile number `tile` belongs to, its rows among those of
    all heads [ROWS], its channels [WIDE], and which of its rows there are."""
    columns: tl.constexpr = (DIM + WIDE - 1) // WIDE
    per_head = tl.cdiv(count, ROWS)
    this = (tile // columns // per_head).to(tl.int64)
    place = tile // columns % per_head * ROWS + tl.arange(0, ROWS)
    live = place < count
    if counts is not None:
        live = place < tl.load(counts + this // GROUPS)
    return this, this * count + place, tile % columns * WIDE + tl.arange(0, WIDE), live
