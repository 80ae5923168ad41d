"""Computes attention over codes, and decodes rows of them. Each byte is read once.

Codes become fp16 numbers, which hold them exactly: if the lowest bits of the fp16 number 1024 are
replaced by a code, the result is 1024 + code. A plane is the set of codes that have the same place
in their bytes. The codes of a plane are neighbouring channels, so the product with a query is a sum
of products of planes."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.coded import Coded, CodedFloats, Codes, decoded_tokens
from kernels.gpu.common import (
    DTYPES,
    Rows,
    each,
    fused,
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
from kernels.ragged import first_of
from kernels.reference import Segment

Steps = Coded | CodedFloats  # whose numbers are evenly spaced, or floats: what the kernels read
_TILE = 2048  # numbers that a program decodes
_THREADS = 128  # of a program


def coded_attention(
    q: Tensor, segments: Sequence[Segment | Codes], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to coded and other segments, as kernels/coded.py defines
    it: q [B H 1 D] -> [B H 1 D], log-sum-exp [B H]. Tokens are cut into pieces as in decode.py; the
    results of all segments' pieces lie side by side and are merged at once."""
    q, codes = q.contiguous(), [segment for segment in segments if isinstance(segment, Steps)]
    tiles = [_tokens_of_a_tile(coded, q.dtype) for coded in codes]
    cuts = [_cut(coded, tile) for coded, tile in zip(codes, tiles, strict=True)]
    plain = [segment for segment in segments if isinstance(segment, Segment)]
    outs, lses, firsts = read_parts(q, plain, scale, more=sum(pieces for pieces, _ in cuts))
    first = firsts[-1]
    for coded, tile, (pieces, most) in zip(codes, tiles, cuts, strict=True):
        (batch, heads, _, dim), (_, groups, count, _) = q.shape, coded.k.shape
        _attend_codes[(batch * groups, pieces)](
            q,
            *_located(coded),
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


def coded_attention_refuses(
    q: Tensor, segments: Sequence[Segment | Codes], scale: float
) -> str | None:
    plain = [segment for segment in segments if isinstance(segment, Segment)]
    if plain and (reason := segment_attention_refuses(q, plain, scale)):
        return reason
    for coded in segments:
        if not isinstance(coded, Segment) and (
            reason := (
                unfit_shape(q, coded.k.shape[0], None, 1, coded.dim)
                or unfit_sharing(q.shape[1], coded.k.shape[1])
                or unfit_heads(q)
                or unfit_floats(q)
                or _unfit(coded)
                or _unfit_blocks(cast(Steps, coded))
            )
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
    assert isinstance(coded, Steps)
    (batch, groups, *_), dim = coded.k.shape, coded.dim
    count, at_once = decoded_tokens(coded, blocks, recent), max(1, _TILE // padded(dim))
    reader = coded.k.device  # of a `Ragged`, the device that reads it
    k, v = (torch.empty((batch, groups, count, dim), dtype=dtype, device=reader) for _ in range(2))
    exact, unused = (None, None) if recent is None else (recent[0].contiguous(), recent[1])
    if count:
        _decode_rows[(triton.cdiv(count, at_once), batch * groups)](
            *_located(coded),
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


def decode_rows_refuses(
    coded: Codes,
    rows: Tensor | None,
    blocks: Tensor | None,
    dtype: torch.dtype,
    recent: tuple[Tensor, Tensor] | None = None,
) -> str | None:
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
    return (
        _unfit(coded)
        or (None if blocks is not None else _unfit_blocks(cast(Steps, coded)))
        or unfit(*listed)
    )


@triton.constexpr_function
def _row_bytes(dim: int, bits: int) -> int:
    """Return the bytes that hold the codes of one token's key, or of its value, in one head."""
    return dim * (bits or 8) // 8


def _tokens_of_a_tile(coded: Steps, dtype: torch.dtype) -> int:
    """Return how many tokens a program (one instance of the kernel) reads at a time, to attend to
    from queries of `dtype`.

    More tokens take fewer instructions and more registers. The ranges of a tile's keys must not be
    as many as threads: each thread would load a single number, and codes would follow that
    layout."""
    if isinstance(coded, CodedFloats) or dtype == torch.float32:
        return 32
    shared, width = coded.block & -coded.block, padded(_row_bytes(coded.dim, coded.bits))
    sizes = (32, 64, 128) if coded.bits == 4 else (64, 32, 128)
    return next(tokens for tokens in sizes if tokens // min(tokens, shared) * width != _THREADS)


def _cut(coded: Steps, tile: int) -> tuple[int, int]:
    """Return two numbers of pieces into which the tokens of a KV head are cut: the most in the
    longest of these sequences, and the most in any sequence. The pieces of one sequence fill the
    device once."""
    registers = 128 if coded.kind[1] in (0, 4) else 160
    most = max(1, places(32_768, registers, _THREADS // 32) // coded.k.shape[1])
    return min(max(1, triton.cdiv(coded.k.shape[2], tile)), most), most


def _located(coded: Steps) -> list[Rows]:
    """Return where the four tensors of `all_four` lie, for the kernels."""
    *others, v_range = map(located, coded.all_four)
    if v_range.table is None:  # few numbers, whose step is seldom a multiple of 16
        v_range = v_range._replace(aligned=tl.constexpr(gcd(16, 2 * v_range.row)))
    return [*others, v_range]


def _unfit(coded: Codes) -> str | None:
    if not isinstance(coded, Steps):
        return "reads integers and floats of 8 bits, got levels or floats of 4 bits"
    if isinstance(coded, Coded) and coded.kept is not None:
        return "reads no channels that are kept beside codes"
    tensors = [first_of(x) for x in coded.all_four]
    if any(x.stride(3) != 1 for x in tensors):
        return "needs the codes of a row side by side"
    (batch, groups, count, _), (ranges, *bits, _), dim = coded.k.shape, coded.kind, coded.dim
    k_range = 2 * dim if bits[0] else 2
    of_rows = zip(
        coded.all_four,
        (count, count, None, count),
        (*(_row_bytes(dim, of_each) for of_each in bits), k_range, 2 * ranges),
        strict=True,
    )
    sides = (unfit_shape(x, batch, groups, *sizes) for x, *sizes in of_rows)
    return next(filter(None, sides), None) or unfit(*tensors)


def _unfit_blocks(coded: Steps) -> str | None:
    """Return why the kernel cannot attend to these codes, or None: there must be a range for each
    block of keys."""
    blocks, block = coded.all_four[2].shape[2], coded.block
    if coded.k.shape[2] > blocks * block:
        return f"takes a range for each {block} keys, got {blocks} for {coded.k.shape[2]}"
    return None


@triton.jit
def _floats(row, scale, dim, there):
    """Decode floats of 8 bits: return in fp32 the numbers of the rows at the pointers `row` [n 1],
    each row times the scale at the pointer `scale` [n 1].

    Each float's bits are shifted to their places in an fp16 number, which is then 256 times too
    small and is multiplied by 256: so GPUs that have no 8-bit floats can decode them, too."""
    codes = load(row + dim, there).to(tl.int16)
    halves = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    scales = load_wide(scale, tl.max(there.to(tl.int32), 1, keep_dims=True) > 0)
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * scales


@triton.jit
def _halves(codes, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of plane PLANE, one of the 8 / BITS in each byte of `codes`, in fp16."""
    if BITS < 8:
        codes = (codes >> (PLANE * BITS)) & ((1 << BITS) - 1)
    return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def _planes(codes, BITS: tl.constexpr):
    """Return all codes of the bytes [n WIDE], plane after plane: [n WIDE * 8 / BITS] fp16."""
    if BITS == 8:
        every = _halves(codes, 0, 8)
    elif BITS == 4:
        pairs = tl.join(_halves(codes, 0, 4), _halves(codes, 1, 4))
        every = tl.reshape(tl.permute(pairs, (0, 2, 1)), [codes.shape[0], 2 * codes.shape[1]])
    else:
        even = tl.join(_halves(codes, 0, 2), _halves(codes, 2, 2))
        odd = tl.join(_halves(codes, 1, 2), _halves(codes, 3, 2))
        quads = tl.permute(tl.join(even, odd), (0, 2, 3, 1))
        every = tl.reshape(quads, [codes.shape[0], 4 * codes.shape[1]])
    return every


@triton.jit
def _in_range(codes, least, step, dtype: tl.constexpr):
    """Return least + code * step in `dtype`, rounded once, for codes in fp16. `least` and `step`
    broadcast."""
    return fused(
        codes.to(dtype), tl.broadcast_to(step, codes.shape), tl.broadcast_to(least, codes.shape)
    )


@triton.jit
def _keys(
    codes, ranges, step, start, end, byte, PLANE: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    SHARED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return one plane of keys [BLOCK WIDE], from token `start` on, of which those from `end` on do
    not exist, given their codes. SHARED tokens share a range, a row of `ranges`; the rows are `step`
    apart."""
    BLOCK: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = DIM * BITS // 8
    SUB: tl.constexpr = min(SHARED & -SHARED, BLOCK)  # tokens that certainly share one
    token = tl.minimum(start + tl.arange(0, BLOCK // SUB) * SUB, end - 1)
    at = ranges + (token // SHARED).to(tl.int64)[:, None] * step + PLANE * WIDTH + byte
    least = load(at, byte < WIDTH)
    steps = load(at + DIM, byte < WIDTH)
    if SUB == BLOCK:
        key = _in_range(_halves(codes, PLANE, BITS), least, steps, dtype)
    else:
        parts: tl.constexpr = [BLOCK // SUB, 1, codes.shape[1]]
        least, steps = tl.reshape(least, parts), tl.reshape(steps, parts)
        split = tl.reshape(_halves(codes, PLANE, BITS), [BLOCK // SUB, SUB, codes.shape[1]])
        key = tl.reshape(_in_range(split, least, steps, dtype), codes.shape)
    return key


@triton.jit
def _values(
    codes, ranges, listed, DIM: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Return values, plane after plane, [ROWS WIDE * 8 / BITS], for their codes [ROWS WIDE] and
    pointers to their rows of `ranges` [ROWS 1], where these are `listed`: RANGES least numbers, and
    as many steps, each for neighbouring channels."""
    ROWS: tl.constexpr = codes.shape[0]
    SHARE: tl.constexpr = DIM // RANGES
    value = _planes(codes, BITS)
    if (
        _row_bytes(DIM, BITS) == codes.shape[1] and SHARE & (SHARE - 1) == 0
    ):  # ranges in their own shape, in one load
        both = tl.reshape(
            load(ranges + tl.arange(0, 2 * RANGES)[None, :], listed),
            [ROWS, 2, RANGES],
        )
        least, step = tl.split(tl.permute(both, (0, 2, 1)))
        value = tl.reshape(value, [ROWS, RANGES, SHARE])
        value = tl.reshape(
            _in_range(value, least[:, :, None], step[:, :, None], dtype), [ROWS, DIM]
        )
    else:
        channel, there = _channels(DIM, BITS)
        at, there = ranges + channel // SHARE, listed & there
        value = _in_range(
            value,
            load(at, there),
            load(at + RANGES, there),
            dtype,
        )
    return value


@triton.jit
def _channels(DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the channels that stand plane after plane [1 n], and which of the places have one."""
    WIDTH: tl.constexpr = _row_bytes(DIM, BITS)
    WIDE: tl.constexpr = padded(WIDTH)
    place = tl.arange(0, WIDE * (DIM // WIDTH))[None, :]
    if WIDTH == WIDE:
        channel, there = place, place < DIM
    else:
        channel, there = place // WIDE * WIDTH + place % WIDE, place % WIDE < WIDTH
    return channel, there


@triton.jit
def _plane(
    q, head, byte, PLANE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Load the channels of one plane of GROUP queries at q, [heads bytes]; 0 where there is none."""
    there = (head < GROUP)[:, None] & (byte < WIDTH)
    return load(q + head[:, None] * DIM + PLANE * WIDTH + byte, there)


@triton.jit(do_not_specialize=["count", "most", "first", "parts"])
def _attend_codes(
    q, k, v, k_range, v_range, counts, outs, lses, scale, count, most, first, parts, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend from the GROUP query heads of one KV head to one piece of its coded tokens, and write
    the output and the log-sum-exp of the piece. SHARED tokens share a range of keys. Queries of 16
    bits are multiplied in fp16, which holds codes in their ranges more exactly than bf16 does.

    counts: how many tokens each sequence has; None: `count`. They are cut into up to `most` pieces.
    A piece without any has a log-sum-exp of minus infinity."""
    this, piece = program_at(0), tl.program_id(1)
    batch, group = this // HEADS, this % HEADS
    WIDTH: tl.constexpr = _row_bytes(DIM, BITS)
    WIDE: tl.constexpr = padded(WIDTH)
    PLANES: tl.constexpr = DIM // WIDTH
    dtype: tl.constexpr = (
        q.dtype.element_ty if BITS == 0 or q.dtype.element_ty == tl.float32 else tl.float16
    )
    head, byte = tl.arange(0, padded(GROUP)), tl.arange(0, WIDE)[None, :]
    V_WIDTH: tl.constexpr = _row_bytes(DIM, VALUE_BITS)
    v_byte = tl.arange(0, padded(V_WIDTH))[None, :]
    asked = q + this * GROUP * DIM
    queries = (
        _plane(asked, head, byte, 0, GROUP, DIM, WIDTH).to(dtype),
        _plane(asked, head, byte, 1 % PLANES, GROUP, DIM, WIDTH).to(dtype),
        _plane(asked, head, byte, 2 % PLANES, GROUP, DIM, WIDTH).to(dtype),
        _plane(asked, head, byte, 3 % PLANES, GROUP, DIM, WIDTH).to(dtype),
    )
    keys, key_step = head_rows(k, batch, group)
    values, value_step = head_rows(v, batch, group)
    of_blocks, block_step = head_rows(k_range, batch, group)
    of_tokens, token_step = head_rows(v_range, batch, group)
    every = tl.full([BLOCK, 1], 1, tl.int1)  # rows are read again where there are no more
    top = tl.full([head.shape[0]], float("-inf"), tl.float32)
    totals = tl.zeros([head.shape[0], BLOCK], tl.float32)
    mixed = tl.zeros([head.shape[0], padded(V_WIDTH) * (DIM // V_WIDTH)], tl.float32)
    count = number_of(counts, batch, count)
    length = tl.maximum(tl.cdiv(tl.cdiv(count, BLOCK), most), 1) * BLOCK
    end = tl.minimum((piece + 1) * length, count)
    for start in range(piece * length, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < end
        at = tl.minimum(token, end - 1).to(tl.int64)[:, None]  # no load waits for a mask of its own
        of_token = of_tokens + at * token_step
        logits = tl.zeros([head.shape[0], BLOCK], tl.float32)
        if BITS == 0:
            key = _floats(keys + at * key_step, of_token, byte, every & (byte < DIM))
            logits += product(queries[0], tl.trans(key.to(dtype)))
        else:
            codes = load(keys + at * key_step + byte, byte < WIDTH)
            for plane in tl.static_range(PLANES):
                key = _keys(
                    codes, of_blocks, block_step, start, end, byte, plane, DIM, BITS, SHARED, dtype
                )
                logits += product(queries[plane], tl.trans(key))
        logits = tl.where(there[None, :], logits * (scale * 1.4426950408889634), float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        # 2**12 is the largest weight: those down to 2**-36 of it count in fp16
        shrink, weights = tl.exp2(top - highest), tl.exp2(logits - (highest - 12)[:, None])
        if BITS == 0:
            value = _floats(values + at * value_step, of_token + 1, byte, every & (byte < DIM))
        else:
            packed = load(values + at * value_step + v_byte, v_byte < V_WIDTH)
            value = _values(packed, of_token, every, DIM, RANGES, VALUE_BITS, dtype)
        mixed = mixed * shrink[:, None] + product(weights.to(dtype), value.to(dtype))
        totals = totals * shrink[:, None] + weights
        top = highest
    total = tl.sum(totals, 1)
    to = (this * GROUP + head) * parts + first + piece
    tl.store(lses + to, (top + tl.log2(total) - 12) * 0.6931471805599453, mask=head < GROUP)
    channel, there = _channels(DIM, VALUE_BITS)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(outs + to[:, None] * DIM + channel, mixed, mask=(head < GROUP)[:, None] & there)


@triton.jit(do_not_specialize=["count"])
def _decode_rows(
    k, v, k_range, v_range, counts, rows, blocks, exact, unused, k_out, v_out, count, HEADS: tl.constexpr,
    DIM: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    SHARED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Decode the keys and values of some tokens of one KV head into `k_out` and `v_out`. `counts`:
    how many of them each sequence has; None: `count`. Where `exact` is given, its values stand
    instead of those from number `unused` on."""
    this = program_at(1)
    batch, group = this // HEADS, this % HEADS
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    WIDTH: tl.constexpr = _row_bytes(DIM, BITS)
    byte = tl.arange(0, padded(WIDTH))[None, :]
    listed = place < number_of(counts, batch, count)
    row, block = place, place // SHARED
    if rows is not None:
        row = load(rows + this * count + place, listed).to(tl.int64)
    if blocks is not None:
        block = load(blocks + this * count + place, listed).to(tl.int64)
    row, block = tl.where(listed, row, 0), tl.where(listed, block, 0)
    keys, key_step = head_rows(k, batch, group)
    values, value_step = head_rows(v, batch, group)
    of_blocks, block_step = head_rows(k_range, batch, group)
    of_tokens, token_step = head_rows(v_range, batch, group)
    of_token = of_tokens + row * token_step
    channel, there = _channels(DIM, BITS)
    v_channel, v_there = _channels(DIM, VALUE_BITS)
    if BITS == 0:
        key = _floats(keys + row * key_step, of_token, byte, listed & there)
        value = _floats(values + row * value_step, of_token + 1, byte, listed & there)
    else:
        codes = load(keys + row * key_step + byte, listed & (byte < WIDTH))
        V_WIDTH: tl.constexpr = _row_bytes(DIM, VALUE_BITS)
        v_byte = tl.arange(0, padded(V_WIDTH))[None, :]
        packed = load(values + row * value_step + v_byte, listed & (v_byte < V_WIDTH))
        at = of_blocks + block * block_step + channel
        least = load(at, listed & there)
        step = load(at + DIM, listed & there)
        key = _in_range(_planes(codes, BITS), least, step, tl.float32)
        value = _values(packed, of_token, listed, DIM, RANGES, VALUE_BITS, tl.float32)
    to = (this * count + place) * DIM
    if exact is not None:
        known = listed & (place >= number_of(unused, batch, 0))
        value = tl.where(known, load_wide(exact + to + v_channel, known & v_there), value)
    tl.store(k_out + to + channel, key.to(k_out.dtype.element_ty), mask=listed & there)
    tl.store(v_out + to + v_channel, value.to(v_out.dtype.element_ty), mask=listed & v_there)
