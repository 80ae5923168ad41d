"""Turns codes into numbers inside of kernels, in registers. Each byte is read once.

Codes of integers become fp16 numbers, which hold them exactly: if the lowest bits of the fp16 number
1024 are replaced by a code, the result is 1024 + code. Codes of levels, and of floats of 4 bits, are
looked up in a table of up to 16 numbers in shared memory: no two of its words lie in one bank, so all
threads of a warp read it at once. A plane is the set of codes that have the same place in their bytes. The codes of
a plane are neighbouring channels, so the product with a query is a sum of products of planes."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.common import fused, load, load_wide, padded, product

_TURNED = tl.constexpr(32)  # channels that are turned at a time


@triton.constexpr_function
def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes that hold the codes of one token's key, or of its value, in one head."""
    return dim * (bits or 8) // 8


@triton.jit
def float8(codes):
    """Return floats of 8 bits (e4m3) in fp32.

    Each float's bits are shifted to their places in an fp16 number, which is then 256 times too
    small and is multiplied by 256: so GPUs that have no 8-bit floats can decode them, too."""
    codes = codes.to(tl.int16)
    halves = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def floats(rows, scales, listed, DIM: tl.constexpr):
    """Decode floats of 8 bits: return in fp32 the numbers of the rows at the pointers `rows` [n 1],
    each times its scale at the pointers `scales` [n 1], where they are `listed` [n 1]."""
    dim = tl.arange(0, padded(DIM))[None, :]
    return float8(load(rows + dim, listed & (dim < DIM))) * load_wide(scales, listed)


@triton.jit
def _plane(codes, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of plane PLANE, one of the 8 / BITS in each byte of `codes`."""
    if BITS < 8:
        codes = (codes >> (PLANE * BITS)) & ((1 << BITS) - 1)
    return codes


@triton.jit
def halves(codes):
    """Return whole numbers of 8 bits in fp16."""
    return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def _planes(codes, BITS: tl.constexpr):
    """Return all codes of the bytes [n WIDE], plane after plane: [n WIDE * 8 / BITS]."""
    if BITS == 8:
        every = codes
    elif BITS == 4:
        every = tl.permute(tl.join(_plane(codes, 0, 4), _plane(codes, 1, 4)), (0, 2, 1))
    elif BITS == 2:
        even = tl.join(_plane(codes, 0, 2), _plane(codes, 2, 2))
        odd = tl.join(_plane(codes, 1, 2), _plane(codes, 3, 2))
        every = tl.permute(tl.join(even, odd), (0, 2, 3, 1))
    else:
        first = tl.join(_plane(codes, 0, 1), _plane(codes, 4, 1))
        third = tl.join(_plane(codes, 2, 1), _plane(codes, 6, 1))
        second = tl.join(_plane(codes, 1, 1), _plane(codes, 5, 1))
        fourth = tl.join(_plane(codes, 3, 1), _plane(codes, 7, 1))
        both = tl.join(tl.join(first, third), tl.join(second, fourth))
        every = tl.permute(both, (0, 2, 3, 4, 1))
    return tl.reshape(every, [codes.shape[0], codes.shape[1] * (8 // BITS)])


@triton.jit
def _in_range(codes, least, step, dtype: tl.constexpr):
    """Return least + code * step in `dtype`, rounded once, for codes of 8 bits. `least` and `step`
    broadcast."""
    return fused(
        halves(codes).to(dtype),
        tl.broadcast_to(step, codes.shape),
        tl.broadcast_to(least, codes.shape),
    )


@triton.jit
def in_ranges(codes, least, step, BITS: tl.constexpr):
    """Return all numbers least + code * step of the bytes `codes`, plane after plane, in fp32."""
    return _in_range(_planes(codes, BITS), least, step, tl.float32)


@triton.jit
def keys_of_plane(
    codes, ranges, step, start, end, byte, hidden, PLANE: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    SHARED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return one plane of keys [BLOCK WIDE], from token `start` on, of which those from `end` on do
    not exist, given their codes. SHARED tokens share a range, a row of `ranges`; the rows are `step`
    apart. `hidden` [n 1]: channels that are to be zero, where all BLOCK tokens share a range."""
    BLOCK: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = DIM * BITS // 8
    SUB: tl.constexpr = min(SHARED & -SHARED, BLOCK)  # tokens that certainly share one
    token = tl.minimum(start + tl.arange(0, BLOCK // SUB) * SUB, end - 1)
    channel = PLANE * WIDTH + byte
    at = ranges + (token // SHARED).to(tl.int64)[:, None] * step + channel
    there = byte < WIDTH
    if hidden is not None:
        there &= tl.max((hidden == channel).to(tl.int32), 0, keep_dims=True) == 0
    least = load(at, there)
    steps = load(at + DIM, there)
    if SUB == BLOCK:
        key = _in_range(_plane(codes, PLANE, BITS), least, steps, dtype)
    else:
        parts: tl.constexpr = [BLOCK // SUB, 1, codes.shape[1]]
        least, steps = tl.reshape(least, parts), tl.reshape(steps, parts)
        split = tl.reshape(_plane(codes, PLANE, BITS), [BLOCK // SUB, SUB, codes.shape[1]])
        key = tl.reshape(_in_range(split, least, steps, dtype), codes.shape)
    return key


@triton.jit
def values(
    rows, ranges, table, listed, DIM: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Return the values whose codes stand at the pointers `rows` [n 1], where they are `listed`
    [n 1]. `ranges` [n 1] points to a token's ranges or scales.

    Integers come in `dtype`, plane after plane; RANGES least numbers, and as many steps, are each
    for neighbouring channels. Other formats are as in `by_level` and `floats`, and their scales
    stand behind RANGES of the key."""
    ROWS: tl.constexpr = rows.shape[0]
    WIDTH: tl.constexpr = row_bytes(DIM, BITS)
    SHARE: tl.constexpr = DIM // RANGES
    if table is not None:
        value = by_level(rows, table, ranges + RANGES, listed, DIM, BITS)
    elif BITS == 0:
        value = floats(rows, ranges + RANGES, listed, DIM)
    else:
        byte = tl.arange(0, padded(WIDTH))[None, :]
        value = _planes(load(rows + byte, listed & (byte < WIDTH)), BITS)
        if padded(WIDTH) == WIDTH and SHARE & (SHARE - 1) == 0:
            # ranges in their own shape, in one load
            both = load(ranges + tl.arange(0, 2 * RANGES)[None, :], listed)
            both = tl.permute(tl.reshape(both, [ROWS, 2, RANGES]), (0, 2, 1))
            least, step = tl.split(both)
            value = tl.reshape(value, [ROWS, RANGES, SHARE])
            value = _in_range(value, least[:, :, None], step[:, :, None], dtype)
            value = tl.reshape(value, [ROWS, DIM])
        else:
            channel, there = channels(DIM, BITS)
            at, there = ranges + channel // SHARE, listed & there
            value = _in_range(value, load(at, there), load(at + RANGES, there), dtype)
    return value


@triton.jit
def channels(DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the channels that stand plane after plane [1 n], and which of the places have one."""
    WIDTH: tl.constexpr = row_bytes(DIM, BITS)
    WIDE: tl.constexpr = padded(WIDTH)
    place = tl.arange(0, WIDE * (DIM // WIDTH))[None, :]
    if WIDTH == WIDE:
        channel, there = place, place < DIM
    else:
        channel, there = place // WIDE * WIDTH + place % WIDE, place % WIDE < WIDTH
    return channel, there


@triton.jit
def eighths(DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the bytes of a row of codes of BITS [1 n], and which of the places have one, so that
    every eighth of a head's channels begins at the same place, whatever BITS is. For 8 bits these
    are the channels."""
    PART: tl.constexpr = DIM // 8
    WIDE: tl.constexpr = padded(PART, 1)
    place = tl.arange(0, BITS * WIDE)[None, :]
    if PART == WIDE:
        byte, there = place, place < BITS * PART
    else:
        byte, there = place // WIDE * PART + place % WIDE, place % WIDE < PART
    return byte, there


@triton.jit
def _eighths_of(rows, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of 1, 2 or 4 bits of the rows at the pointers `rows` [n 1], in the order of
    `eighths`, [n DIM]."""
    byte, there = eighths(DIM, BITS)
    return _planes(load(rows + byte, there), BITS)


@triton.jit
def levels(rows, table, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the numbers in `table` [2**BITS] that the codes of the rows at the pointers `rows` [n 1] stand
    for, in the order of `eighths`, [n DIM]. Codes of 3 bits lie in two parts, as in
    kernels/levels.py."""
    if BITS == 3:
        codes = _eighths_of(rows, DIM, 2) | (_eighths_of(rows + DIM // 4, DIM, 1) << 2)
    else:
        codes = _eighths_of(rows, DIM, BITS)
    every = tl.reshape(codes.to(tl.int32), [codes.shape[0] * codes.shape[1]])
    return tl.reshape(tl.gather(table, every, 0), codes.shape)


@triton.jit
def by_level(rows, table, scales, listed, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return the numbers of `levels` times the scales at the pointers `scales` [n 1]: a row's own, or if
    they are bytes those of `scaled`."""
    numbers = levels(rows, table, DIM, BITS)
    if scales.dtype.element_ty == tl.uint8:
        numbers = scaled(numbers, scales, DIM)
    else:
        numbers = numbers * load_wide(scales, listed)
    return numbers


@triton.jit
def signs(rows, DIM: tl.constexpr):
    """Return -1 or 1 for each bit of the rows at the pointers `rows` [n 1], [n DIM] fp16."""
    return halves(_eighths_of(rows, DIM, 1)) * 2.0 - 1.0


@triton.jit
def scaled(numbers, scales, DIM: tl.constexpr):
    """Multiply numbers [n DIM] in the order of `eighths` by the scale of their 16 channels, floats
    of 8 bits at the pointers `scales` [n 1]. In fp16, too, products with levels of 4 bits are
    exact."""
    ROWS: tl.constexpr = numbers.shape[0]
    RANGES: tl.constexpr = DIM // 16
    if RANGES & (RANGES - 1) == 0:  # in their own shape
        scale = float8(tl.load(scales + tl.arange(0, RANGES)[None, :])).to(numbers.dtype)
        split = tl.reshape(numbers, [ROWS, RANGES, 16]) * scale[:, :, None]
        numbers = tl.reshape(split, [ROWS, DIM])
    else:
        channel, there = eighths(DIM, 8)
        numbers *= float8(load(scales + channel // 16, there)).to(numbers.dtype)
    return numbers


@triton.jit
def queries_of(q, turn, channel, there, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Load channels of GROUP queries at q, [heads n]; 0 where they are not `there` [1 n]. If `turn`
    [DIM DIM] is given, they are those of turn @ query, in fp32."""
    head = tl.arange(0, padded(GROUP))[:, None]
    if turn is None:
        result = load(q + head * DIM + channel, (head < GROUP) & there)
    else:
        result = tl.zeros([head.shape[0], channel.shape[1]], tl.float32)
        for start in range(0, DIM, _TURNED):
            some = start + tl.arange(0, _TURNED)[:, None]
            query = load_wide(
                q + head * DIM + tl.trans(some), (head < GROUP) & (tl.trans(some) < DIM)
            )
            result += product(query, load(turn + channel * DIM + some, there & (some < DIM)))
    return result


@triton.jit
def store_turned(to, mixed, turn, channel, there, mine, DIM: tl.constexpr):
    """Store rows `mixed` [heads n], whose places are those of `channel`, at the pointers `to`
    [heads 1] of the heads that are `mine`. If `turn` [DIM DIM] is given, they were turned by it and
    are turned back."""
    if turn is None:
        tl.store(to + channel, mixed, mask=mine & there)
    else:
        for start in range(0, DIM, _TURNED):
            some = start + tl.arange(0, _TURNED)[None, :]
            rows = tl.trans(
                load(turn + channel * DIM + tl.trans(some), there & (tl.trans(some) < DIM))
            )
            tl.store(to + some, product(mixed, rows), mask=mine & (some < DIM))
