"""Computes attention over codes, and decodes rows of them (kernels/gpu/codes.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd, pi, sqrt
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import nvfp4
from kernels.coded import Coded, Codes, Rotated, decoded_tokens
from kernels.gpu import codes as of
from kernels.gpu.common import (
    DTYPES,
    Rows,
    each,
    head_rows,
    lengths_of,
    load,
    load_wide,
    located,
    number_of,
    padded,
    places,
    product,
    program_at,
    unfit,
    unfit_floats,
    unfit_heads,
    unfit_numbers,
    unfit_shape,
    unfit_sharing,
)
from kernels.gpu.decode import merged, read_parts, segment_attention_refuses
from kernels.levels import CodedLevels, level_table, normal_matrix
from kernels.nvfp4 import CodedFloats4
from kernels.ragged import first_of
from kernels.reference import Segment
from kernels.rotated import rotation

_TILE = 2048  # numbers that a program decodes
_THREADS = 128  # of a program
_FEWEST = 16  # tokens of a tile that is multiplied


class _Given(NamedTuple):
    """Hold codes as one argument of a kernel. `levels` and `key_levels`: the numbers that codes of
    values and of keys stand for; None if codes are numbers themselves."""

    k: Rows
    v: Rows
    of_block: Rows  # ranges, or scales, that tokens share
    of_token: Rows
    kept: Rows | None
    which: Rows | None
    levels: Tensor | None
    key_levels: Tensor | None
    channels: Any  # how many of a key are kept


def coded_attention(
    q: Tensor, segments: Sequence[Segment | Codes | Rotated], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to coded and other segments, as kernels/coded.py defines
    it: q [B H 1 D] -> [B H 1 D], log-sum-exp [B H]. Tokens are cut into pieces as in decode.py; the
    results of all segments' pieces lie side by side and are merged at once. A program turns its
    queries to where rotated codes are, and its result back."""
    q, codes = q.contiguous(), [segment for segment in segments if not isinstance(segment, Segment)]
    tiles = [_tokens_of_a_tile(_tokens_of(coded), q.dtype) for coded in codes]
    cuts = [_cut(_tokens_of(coded), tile) for coded, tile in zip(codes, tiles, strict=True)]
    plain = [segment for segment in segments if isinstance(segment, Segment)]
    outs, lses, firsts = read_parts(q, plain, scale, more=sum(pieces for pieces, _ in cuts))
    first = firsts[-1]
    for segment, tile, (pieces, most) in zip(codes, tiles, cuts, strict=True):
        coded = _tokens_of(segment)
        (batch, heads, _, dim), (_, groups, count, _) = q.shape, coded.k.shape
        turn, signs = _turns(segment, q.device)
        _attend_codes[(batch * groups, pieces)](
            q,
            _given(coded, q.dtype),
            turn,
            signs,
            lengths_of(coded.k),
            outs,
            lses,
            scale,
            count,
            most,
            first,
            lses.shape[1],
            groups,
            heads // groups,
            dim,
            *coded.kind,
            tile,
            # masked rows take more registers
            num_warps=_THREADS // 32 if dim == padded(dim) else _THREADS // 16,
            num_stages=2,
        )
        first += pieces
    return merged(outs, lses, torch.empty_like(q))


def coded_attention_refuses(q, segments, scale):
    plain = [segment for segment in segments if isinstance(segment, Segment)]
    if plain and (reason := segment_attention_refuses(q, plain, scale)):
        return reason
    for segment in segments:
        if isinstance(segment, Segment):
            continue
        coded = _tokens_of(segment)
        kept = [first_of(x) for x in _kept_of(coded)[:1]]
        if kept and isinstance(segment, Rotated):
            return "keeps no channels of rotated keys"
        if reason := (
            unfit_shape(q, coded.k.shape[0], None, 1, coded.dim)
            or unfit_sharing(q.shape[1], coded.k.shape[1])
            or unfit_heads(q)
            or unfit_floats(q, *kept)
            or _unfit(coded)
            or _unfit_blocks(coded)
            or _unfit_tile(coded)
        ):
            return reason
    return None


def decode_rows(
    coded: Codes,
    rows: Tensor | None,
    blocks: Tensor | None,
    dtype: torch.dtype,
    recent: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn codes of the tokens `rows` (None: all) back into keys and values [B G K D], as
    kernels/coded.py defines it. `blocks` [B G K] names the block of each token, whose range its key
    shares (None: they stand in order); `recent` holds exact values, and how many are not used."""
    (batch, groups, *_), dim = coded.k.shape, coded.dim
    count, at_once = decoded_tokens(coded, blocks, recent), max(1, _TILE // padded(dim))
    reader = coded.k.device  # of a `Ragged`, the device that reads it
    k, v = (torch.empty((batch, groups, count, dim), dtype=dtype, device=reader) for _ in range(2))
    exact, unused = (None, None) if recent is None else (recent[0].contiguous(), recent[1])
    if count:
        _decode_rows[(triton.cdiv(count, at_once), batch * groups)](
            _given(coded, torch.float32),
            lengths_of(coded.k) if rows is None else None,
            *(None if x is None else x.contiguous() for x in (rows, blocks)),
            exact,
            each(unused),
            k,
            v,
            count,
            groups,
            dim,
            *coded.kind,
            at_once,
        )
    return k, v


def decode_rows_refuses(coded, rows, blocks, dtype, recent=None):
    if dtype not in DTYPES:
        return f"makes float32, bfloat16 and float16, got {dtype}"
    (batch, groups, stored, _), listed = coded.k.shape, [x for x in (rows, blocks) if x is not None]
    count = decoded_tokens(coded, blocks, recent)
    for numbers in listed:
        if reason := unfit_shape(numbers, batch, groups, count):
            return reason
    if blocks is None and rows is not None:
        return "takes the blocks of chosen rows"
    if rows is None and isinstance(coded.k, Tensor) and count > stored:
        return f"decodes up to {stored} tokens, got {count}"
    if recent is not None and (
        reason := unfit_shape(recent[0], batch, groups, count, coded.dim)
        or unfit_numbers(recent[1], batch)
    ):
        return reason
    if isinstance(coded, CodedLevels) and coded.seed is not None:
        return "does not turn signs back into numbers"
    return _unfit(coded) or (None if blocks is not None else _unfit_blocks(coded)) or unfit(*listed)


def _tokens_of(segment: Codes | Rotated) -> Codes:
    return segment.tokens if isinstance(segment, Rotated) else segment


def _kept_of(coded: Codes) -> tuple[Tensor, ...]:
    """Return the channels of keys that are kept in full, and which these are; nothing if none are."""
    both = (coded.kept, coded.which) if isinstance(coded, Coded) else ()
    return tuple(x for x in both if x is not None)


def _tokens_of_a_tile(coded: Codes, dtype: torch.dtype) -> int:
    """Return how many tokens a program (one instance of the kernel) reads at a time, to attend to
    from queries of `dtype`.

    More tokens take fewer instructions and more registers. The ranges of a tile's keys must not be
    as many as threads: each thread would load a single number, and codes would follow that
    layout. Scales of blocks, and channels that are kept, are those of one block."""
    if isinstance(coded, CodedFloats4) or _kept_of(coded):
        return min(32, coded.block & -coded.block)
    if not isinstance(coded, Coded) or dtype == torch.float32:
        return 32
    shared, width = coded.block & -coded.block, padded(of.row_bytes(coded.dim, coded.bits))
    sizes = (32, 64, 128) if coded.bits == 4 else (64, 32, 128)
    return next(tokens for tokens in sizes if tokens // min(tokens, shared) * width != _THREADS)


def _cut(coded: Codes, tile: int) -> tuple[int, int]:
    """Return two numbers of pieces into which the tokens of a KV head are cut: the most in the
    longest of these sequences, and the most in any sequence. The pieces of one sequence fill the
    device once."""
    registers = 128 if coded.kind[1] in (0, 4) else 160
    most = max(1, places(32_768, registers, _THREADS // 32) // coded.k.shape[1])
    return min(max(1, triton.cdiv(coded.k.shape[2], tile)), most), most


def _given(coded: Codes, dtype: torch.dtype) -> _Given:
    """Return codes as the kernels take them, which compute in `dtype`, or in fp16 if that has 16
    bits."""
    k, v, of_block, of_token = map(located, coded.all_four)
    if not of_token.listed:  # few numbers, whose step is seldom a multiple of 16
        step = of_token.x.element_size() * of_token.row
        of_token = of_token._replace(aligned=tl.constexpr(gcd(16, step)))
    given = _Given(k, v, of_block, of_token, None, None, None, None, tl.constexpr(0))
    device = first_of(coded.k).device
    exact = dtype if dtype == torch.float32 else torch.float16
    if isinstance(coded, CodedLevels):
        bits = coded.bits, coded.kind[1]
        tables = [level_table(coded.dim, of_each, device, exact) for of_each in bits]
        return given._replace(levels=tables[0], key_levels=tables[1])
    if isinstance(coded, CodedFloats4):
        table = nvfp4.level_table(device, exact)
        return given._replace(levels=table, key_levels=table)
    if both := _kept_of(coded):
        kept, which = map(located, both)
        return given._replace(kept=kept, which=which, channels=tl.constexpr(both[0].shape[3]))
    return given


def _turns(segment: Codes | Rotated, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return two matrices [D D], by which queries are multiplied to meet keys, and to meet the signs
    of keys; None where they are not needed."""
    coded, seed = _tokens_of(segment), segment.seed if isinstance(segment, Rotated) else None
    signs = coded.seed if isinstance(coded, CodedLevels) else None
    return (
        None if seed is None else rotation(coded.dim, seed, device),
        None if signs is None else _of_signs(coded.dim, signs, seed, device),
    )


@cache
def _of_signs(dim: int, seed: int, turned_by: int | None, device: torch.device) -> Tensor:
    """Return the matrix whose product with a query, times signs, is what the signs of a key add to
    its product with the query (kernels/levels.py)."""
    matrix = normal_matrix(dim, seed, device) * (sqrt(pi / 2) / dim)
    return matrix if turned_by is None else matrix @ rotation(dim, turned_by, device)


def _unfit(coded: Codes) -> str | None:
    kept = _kept_of(coded)
    tensors = [first_of(x) for x in (*coded.all_four, *kept)]
    (batch, groups, count, _), (ranges, *bits, _), dim = coded.k.shape, coded.kind, coded.dim
    widths = [of.row_bytes(dim, of_each) for of_each in bits]
    if isinstance(coded, Coded):
        widths += [2 * dim, 2 * ranges]
    elif isinstance(coded, CodedLevels) and coded.seed is not None:
        widths = [widths[0] + dim // 8, widths[1], 3, 3]
    else:
        widths += [2, 2 * ranges]
    of_rows = [*zip(coded.all_four, (count, count, None, count), widths, strict=True)]
    blocks = coded.all_four[2].shape[2]
    of_rows += [(x, rows, kept[0].shape[3]) for x, rows in zip(kept, (count, blocks), strict=False)]
    if any(x.stride(3) != 1 for x in tensors):
        return "needs the codes of a row side by side"
    sides = (unfit_shape(x, batch, groups, *sizes) for x, *sizes in of_rows)
    return next(filter(None, sides), None) or unfit(*tensors)


def _unfit_blocks(coded: Codes) -> str | None:
    """Return why the kernel cannot attend to these codes, or None: there must be a range for each
    block of keys."""
    blocks, block = coded.all_four[2].shape[2], coded.block
    if coded.k.shape[2] > blocks * block:
        return f"takes a range for each {block} keys, got {blocks} for {coded.k.shape[2]}"
    return None


def _unfit_tile(coded: Codes) -> str | None:
    """Return why a tile cannot lie in one block of tokens, or None."""
    if _tokens_of_a_tile(coded, torch.float32) < _FEWEST:
        return f"takes blocks of a multiple of {_FEWEST} tokens, got {coded.block}"
    return None


@triton.jit(do_not_specialize=["count", "most", "first", "parts"])
def _attend_codes(
    q, codes, turn, signs, counts, outs, lses, scale, count, most, first, parts, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend from the GROUP query heads of one KV head to one piece of its coded tokens, and write
    the output and the log-sum-exp of the piece. SHARED tokens share a range of keys. Queries of 16
    bits are multiplied in fp16, which holds codes in their ranges more exactly than bf16 does.

    counts: how many tokens each sequence has; None: `count`. They are cut into up to `most` pieces.
    A piece without any has a log-sum-exp of minus infinity.

    turn [D D]: the codes are those of turned keys and values. signs [D D]: keys have signs behind
    their codes, which are multiplied with signs @ query."""
    this, piece = program_at(0), tl.program_id(1)
    batch, group = this // HEADS, this % HEADS
    FLOATS4: tl.constexpr = codes.of_token.x.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = of.row_bytes(DIM, BITS)
    WIDE: tl.constexpr = padded(WIDTH)
    PLANES: tl.constexpr = DIM // WIDTH
    dtype: tl.constexpr = (
        q.dtype.element_ty if BITS == 0 or q.dtype.element_ty == tl.float32 else tl.float16
    )
    head, byte = tl.arange(0, padded(GROUP)), tl.arange(0, WIDE)[None, :]
    asked = q + this * GROUP * DIM
    if codes.levels is None:
        channel, is_channel = of.channels(DIM, VALUE_BITS)
        queries = (
            _query(asked, turn, byte, 0, GROUP, DIM, WIDTH).to(dtype),
            _query(asked, turn, byte, 1 % PLANES, GROUP, DIM, WIDTH).to(dtype),
            _query(asked, turn, byte, 2 % PLANES, GROUP, DIM, WIDTH).to(dtype),
            _query(asked, turn, byte, 3 % PLANES, GROUP, DIM, WIDTH).to(dtype),
        )
    else:
        channel, is_channel = of.eighths(DIM, 8)
        turned = (
            of.queries_of(asked, turn, channel, is_channel, GROUP, DIM).to(dtype),
            of.queries_of(asked, signs, channel, is_channel, GROUP, DIM).to(dtype),
        )
    keys, key_step = head_rows(codes.k, batch, group)
    values, value_step = head_rows(codes.v, batch, group)
    of_blocks, block_step = head_rows(codes.of_block, batch, group)
    of_tokens, token_step = head_rows(codes.of_token, batch, group)
    levels = codes.levels
    if levels is not None:
        key_levels = tl.load(codes.key_levels + tl.arange(0, 1 << BITS))
        levels = tl.load(levels + tl.arange(0, 1 << VALUE_BITS))
    every = tl.full([BLOCK, 1], 1, tl.int1)  # rows are read again where there are no more
    top = tl.full([head.shape[0]], float("-inf"), tl.float32)
    totals = tl.zeros([head.shape[0], BLOCK], tl.float32)
    mixed = tl.zeros([head.shape[0], channel.shape[1]], tl.float32)
    count = number_of(counts, batch, count)
    length = tl.maximum(tl.cdiv(tl.cdiv(count, BLOCK), most), 1) * BLOCK
    end = tl.minimum((piece + 1) * length, count)
    for start in range(piece * length, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < end
        at = tl.minimum(token, end - 1).to(tl.int64)[:, None]  # no load waits for a mask of its own
        of_token = of_tokens + at * token_step
        row = keys + at * key_step
        of_block = of_blocks + start // SHARED * block_step
        logits = tl.zeros([head.shape[0], BLOCK], tl.float32)
        if codes.levels is not None:
            key = of.levels(row, key_levels, DIM, BITS)
            if FLOATS4:
                key = of.scaled(key, of_token, DIM)
                logits += product(turned[0], tl.trans(key)) * tl.load(of_block)
            else:
                logits += product(turned[0], tl.trans(key)) * tl.trans(load_wide(of_token, every))
            if signs is not None:
                sign = of.signs(row + WIDTH, DIM).to(dtype)
                missed = tl.trans(load_wide(of_token + 2, every))
                logits += product(turned[1], tl.trans(sign)) * missed
        elif BITS == 0:
            key = of.floats(row, of_token, every, DIM)
            logits += product(queries[0], tl.trans(key.to(dtype)))
        else:
            if codes.kept is not None:
                kept, hidden = _kept(asked, codes, batch, group, at, start // SHARED, GROUP, DIM)
                logits += kept
            else:
                hidden = None
            packed = load(row + byte, byte < WIDTH)
            for plane in tl.static_range(PLANES):
                key = of.keys_of_plane(
                    packed, of_blocks, block_step, start, end, byte, hidden, plane, DIM, BITS, SHARED, dtype
                )  # fmt: skip
                logits += product(queries[plane], tl.trans(key))
        logits = tl.where(there[None, :], logits * (scale * 1.4426950408889634), float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        # 2**12 is the largest weight: those down to 2**-36 of it count in fp16
        shrink, weights = tl.exp2(top - highest), tl.exp2(logits - (highest - 12)[:, None])
        row = values + at * value_step
        value = of.values(row, of_token, levels, every, DIM, RANGES, VALUE_BITS, dtype)
        taken = product(weights.to(dtype), value.to(dtype))
        if FLOATS4:
            taken *= tl.load(of_block + 1)
        mixed = mixed * shrink[:, None] + taken
        totals = totals * shrink[:, None] + weights
        top = highest
    total, mine = tl.sum(totals, 1), head < GROUP
    to = (this * GROUP + head) * parts + first + piece
    tl.store(lses + to, (top + tl.log2(total) - 12) * 0.6931471805599453, mask=mine)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    of.store_turned(outs + to[:, None] * DIM, mixed, turn, channel, is_channel, mine[:, None], DIM)


@triton.jit
def _query(
    q, turn, byte, PLANE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Load the channels of one plane of GROUP queries at q, [heads bytes]; 0 where there is none."""
    return of.queries_of(q, turn, PLANE * WIDTH + byte, byte < WIDTH, GROUP, DIM)


@triton.jit
def _kept(q, codes, batch, group, token, block, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Multiply GROUP queries at q with the channels of keys that are kept in full, of the tokens
    `token` [BLOCK 1] of one block, [heads BLOCK]. Return also which channels they are, [n 1]."""
    head, place = (
        tl.arange(0, padded(GROUP))[:, None],
        tl.arange(0, padded(codes.channels))[:, None],
    )
    rows, step = head_rows(codes.kept, batch, group)
    which, apart = head_rows(codes.which, batch, group)
    channel = _channels_at(which + block * apart + place, place < codes.channels)
    listed = tl.trans(channel >= 0)
    query = load(q + head * DIM + tl.trans(channel), (head < GROUP) & listed)
    return product(query, tl.trans(load(rows + token * step + tl.trans(place), listed))), channel


@triton.jit
def _channels_at(which, listed):
    """Return the channels of keys that are kept in full, by the pointers `which`; -1 where none is
    listed."""
    return tl.where(listed, load(which, listed).to(tl.int32), -1)


@triton.jit(do_not_specialize=["count"])
def _decode_rows(
    codes, counts, rows, blocks, exact, unused, k_out, v_out, count, HEADS: tl.constexpr,
    DIM: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Decode the keys and values of some tokens of one KV head into `k_out` and `v_out`. `counts`:
    how many of them each sequence has; None: `count`. Where `exact` is given, its values stand
    instead of those from number `unused` on."""
    this = program_at(1)
    batch, group = this // HEADS, this % HEADS
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    FLOATS4: tl.constexpr = codes.of_token.x.dtype.element_ty == tl.uint8
    listed = place < number_of(counts, batch, count)
    row, block = place, place // SHARED
    if rows is not None:
        row = load(rows + this * count + place, listed).to(tl.int64)
    if blocks is not None:
        block = load(blocks + this * count + place, listed).to(tl.int64)
    row, block = tl.where(listed, row, 0), tl.where(listed, block, 0)
    keys, key_step = head_rows(codes.k, batch, group)
    values, value_step = head_rows(codes.v, batch, group)
    of_blocks, block_step = head_rows(codes.of_block, batch, group)
    of_tokens, token_step = head_rows(codes.of_token, batch, group)
    keys += row * key_step
    of_token, of_block = of_tokens + row * token_step, of_blocks + block * block_step
    if codes.levels is None:
        channel, there = of.channels(DIM, BITS)
        v_channel, v_there = of.channels(DIM, VALUE_BITS)
    else:
        channel, there = of.eighths(DIM, 8)
        v_channel, v_there = channel, there
    there, v_there = listed & there, listed & v_there
    levels = codes.levels
    if levels is not None:
        levels = tl.load(levels + tl.arange(0, 1 << VALUE_BITS))
        key_levels = tl.load(codes.key_levels + tl.arange(0, 1 << BITS))
        key = of.by_level(keys, key_levels, of_token, listed, DIM, BITS)
    elif BITS == 0:
        key = of.floats(keys, of_token, listed, DIM)
    else:
        WIDTH: tl.constexpr = of.row_bytes(DIM, BITS)
        byte = tl.arange(0, padded(WIDTH))[None, :]
        key = of.in_ranges(
            load(keys + byte, listed & (byte < WIDTH)),
            load(of_block + channel, there),
            load(of_block + DIM + channel, there),
            BITS,
        )
    value = of.values(
        values + row * value_step, of_token, levels, listed, DIM, RANGES, VALUE_BITS, tl.float32
    )
    if FLOATS4:
        key *= load(of_block, listed)
        value *= load(of_block + 1, listed)
    to = (this * count + place) * DIM
    if exact is not None:
        known = listed & (place >= number_of(unused, batch, 0))
        value = tl.where(known, load_wide(exact + to + v_channel, known & v_there), value)
    if codes.kept is not None:
        kept, kept_step = head_rows(codes.kept, batch, group)
        which, which_step = head_rows(codes.which, batch, group)
        for one in range(codes.channels):
            full = _channels_at(which + block * which_step + one, listed)
            key = tl.where(channel == full, load_wide(kept + row * kept_step + one, listed), key)
    tl.store(k_out + to + channel, key.to(k_out.dtype.element_ty), mask=there)
    tl.store(v_out + to + v_channel, value.to(v_out.dtype.element_ty), mask=v_there)
