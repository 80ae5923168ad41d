"""Writes keys and values as codes of few bits, bit for bit as kernels/quantise.py defines it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    head_rows,
    located,
    program_at,
    unfit_heads,
    unfit_shape,
)

_MOST = 1 << 14  # numbers of a block of tokens in one head


def encode_codes(
    k: Tensor, v: Tensor, bits: int, value_bits: int, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Encode whole blocks of `group` tokens in one launch, k, v [B G S D], as kernels/quantise.py
    defines it; a program (one instance of the kernel) takes one block of one head."""
    (batch, groups, count, dim), share = k.shape, min(group, k.shape[3])
    blocks, ranges = count // group, dim // share
    k_codes, v_codes = (
        k.new_empty((batch, groups, count, dim * of_each // 8), dtype=torch.uint8)
        for of_each in (bits, value_bits)
    )
    k_range = k.new_empty((batch, groups, blocks, 2 * dim), dtype=torch.float16)
    v_range = k.new_empty((batch, groups, count, 2 * ranges), dtype=torch.float16)
    bad = k.new_empty((batch, groups, blocks), dtype=torch.int8)
    if blocks:
        _encode[(blocks, batch * groups)](
            located(k), located(v), k_codes, k_range, v_codes, v_range, bad, blocks, groups, group, dim, ranges, bits,
            value_bits,
            num_warps=4 if group * dim <= 4096 else 8,
        )  # fmt: skip
    return k_codes, k_range, v_codes, v_range, bad


def encode_codes_refuses(k, v, bits, value_bits, group):
    dim = k.shape[3]
    if any(size & (size - 1) for size in (group, dim)) or group * dim > _MOST:
        return f"takes powers of two, up to {_MOST} numbers of a block, got {group} tokens of {dim} channels"
    return unfit_shape(v, *k.shape) or unfit_heads(k, v)


@triton.jit
def _down(x):
    """Round x (fp32) to the largest fp16 that is not above it."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)  # sign and magnitude
    below = tl.where(near > 0, bits - 1, tl.where(near < 0, bits + 1, -0x7FFF)).to(tl.int16)
    return tl.where(near.to(tl.float32) > x, below.to(tl.float16, bitcast=True), near)


@triton.jit
def _coded(x, AXIS: tl.constexpr, BITS: tl.constexpr):
    """Quantise the numbers along AXIS of x (fp32) to integers of BITS. Return these, the least
    number and the step of each group, and 1 if a number cannot be encoded, else 0."""
    LEVELS: tl.constexpr = float((1 << BITS) - 1)
    least = _down(tl.min(x, AXIS, keep_dims=True))
    span = least.to(tl.float32) - tl.max(x, AXIS, keep_dims=True)
    step = -_down(tl.div_rn(span, tl.full(span.shape, LEVELS, tl.float32)))
    # 0: all numbers of the group are the same
    width = tl.where(step == 0, 1.0, step.to(tl.float32))
    code = tl.div_rn(x - least.to(tl.float32), tl.broadcast_to(width, x.shape))
    # 1.5 * 2**23: rounds to the nearest, of two to the even one
    code = (code + 12582912.0) - 12582912.0
    finite = (tl.abs(least.to(tl.float32)) < float("inf")) & (
        tl.abs(step.to(tl.float32)) < float("inf")
    )
    bad = tl.max(tl.ravel((x != x).to(tl.int32)), 0) | tl.max(tl.ravel((~finite).to(tl.int32)), 0)
    return tl.minimum(tl.maximum(code, 0.0), LEVELS).to(tl.uint8), least, step, bad


@triton.jit
def _packed(codes, BITS: tl.constexpr):
    """Pack codes [ROWS DIM] into bytes [ROWS DIM * BITS / 8]: the first codes of a row are the
    lowest bits of all bytes, the next ones the bits above, and so on."""
    PLANES: tl.constexpr = 8 // BITS
    shape: tl.constexpr = [codes.shape[0], PLANES, codes.shape[1] // PLANES]
    planes = tl.reshape(codes, shape).to(tl.int32)
    return tl.sum(planes << (tl.arange(0, PLANES) * BITS)[None, :, None], 1).to(tl.uint8)


@triton.jit
def _bytes(codes, row, DIM: tl.constexpr, BITS: tl.constexpr):
    """Return pointers to the bytes of the rows [n 1] of `codes`, which have DIM codes each."""
    WIDTH: tl.constexpr = DIM * BITS // 8
    return codes + row * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit(do_not_specialize=["blocks"])
def _encode(
    k, v, k_codes, k_range, v_codes, v_range, bad, blocks, HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, RANGES: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """Encode the keys of one block of GROUP tokens of one KV head, each channel in a range of its
    own, and their values, each token in RANGES ranges of neighbouring channels."""
    this = program_at(1)
    batch, group, block = this // HEADS, this % HEADS, program_at(0)
    token = tl.arange(0, GROUP)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    row = block * GROUP + token
    of_block = this * blocks + block
    to = of_block * GROUP + token
    keys, key_step = head_rows(k, batch, group)
    values, value_step = head_rows(v, batch, group)
    key = tl.load(keys + row * key_step + dim).to(tl.float32)
    value = tl.load(values + row * value_step + dim).to(tl.float32)
    codes, least, step, unfit = _coded(key, 0, BITS)
    tl.store(_bytes(k_codes, to, DIM, BITS), _packed(codes, BITS))
    tl.store(k_range + of_block * 2 * DIM + dim, least)
    tl.store(k_range + of_block * 2 * DIM + DIM + dim, step)
    codes, least, step, worse = _coded(
        tl.reshape(value, [GROUP, RANGES, DIM // RANGES]), 2, VALUE_BITS
    )
    packed = _packed(tl.reshape(codes, [GROUP, DIM]), VALUE_BITS)
    tl.store(_bytes(v_codes, to, DIM, VALUE_BITS), packed)
    ranges = v_range + to * 2 * RANGES + tl.arange(0, RANGES)[None, :]
    tl.store(ranges, tl.reshape(least, [GROUP, RANGES]))
    tl.store(ranges + RANGES, tl.reshape(step, [GROUP, RANGES]))
    tl.store(bad + of_block, (unfit | worse).to(tl.int8))
