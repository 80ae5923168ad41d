"""Writes numbers as codes of few bits, each group between its own least and largest number
(asymmetric, as KIVI, arXiv 2402.02750).

A number is `least + code * step`, with `least` and `step` in fp16. Both are rounded outwards, so
that the codes span the whole group and no number is off by more than half a step.

Floats of 8 bits (`float8_e4m3fn`: 4 bits of exponent, 3 of mantissa) share a scale instead, and a
number is `code * scale`: none is off by more than a sixteenth of itself, or where it is small by
less than the group's largest / 2**18."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_FLOAT8 = 448.0


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise each group of n numbers (the last dimension) to integers of `bits`. x [... n] ->
    codes [... n] in uint8, least and step [...] in fp16, and whether numbers of the group cannot be
    quantised (`refuse`), [...]"""
    x = x.float()
    levels = 2**bits - 1
    least = rounded_down(x.amin(-1))
    step = -rounded_down((least.float() - x.amax(-1)) / levels)
    bad = ~(least.isfinite() & step.isfinite())
    width = step.float().masked_fill(step == 0, 1)  # all numbers of the group are the same
    codes = ((x - least.float().unsqueeze(-1)) / width.unsqueeze(-1)).round_().clamp_(0, levels)
    return codes.to(torch.uint8), least, step, bad


def encode_codes(
    k: Tensor, v: Tensor, bits: int, value_bits: int, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantise keys and values [B G S D] of whole blocks of `group` tokens to integers of `bits`
    and of `value_bits`: each channel of the keys by blocks, and the values by `group` neighbouring
    channels (by all, if there are fewer). -> packed codes of keys [B G S D*bits/8], their ranges
    [B G S/group 2*D] (least numbers, then steps), codes of values [B G S D*value_bits/8], their
    ranges [B G S 2*c], and for each block of a head whether numbers in it cannot be encoded
    (`refuse`), [B G S/group] int8"""
    # [B G n D group]
    k_codes, k_least, k_step, k_bad = quantise(k.unflatten(2, (-1, group)).mT, bits)
    v_codes, v_least, v_step, v_bad = quantise(
        v.unflatten(3, (-1, min(group, v.shape[3]))), value_bits
    )
    bad = k_bad.any(-1) | v_bad.any(-1).unflatten(2, (-1, group)).any(-1)
    k_packed, v_packed = pack(k_codes.mT.flatten(2, 3), bits), pack(v_codes.flatten(3), value_bits)
    k_range, v_range = torch.cat([k_least, k_step], -1), torch.cat([v_least, v_step], -1)
    return k_packed, k_range, v_packed, v_range, bad.to(torch.int8)


def refuse(*bad: Tensor) -> None:
    """Raise ValueError if an entry of `bad` is set, which says of numbers that they are not finite
    or beyond fp16. This waits for the device once."""
    if bad and bool((torch.cat([x.flatten() for x in bad]) if bad[1:] else bad[0]).any()):
        raise ValueError(
            "Keys or values are not finite, or beyond what fp16 can hold: they cannot be quantised."
        )


def rounded_down(x: Tensor) -> Tensor:
    """Round fp32 numbers to the largest fp16 that is not above them."""
    near = x.half()
    bits = near.view(torch.int16)  # sign and magnitude
    below = torch.where(near > 0, bits - 1, torch.where(near < 0, bits + 1, -0x7FFF)).to(
        torch.int16
    )
    return torch.where(near.float() > x, below.view(torch.float16), near)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of `bits` each into bytes. uint8 [... n] -> uint8 [... n * bits / 8]

    The first n * bits / 8 codes are the lowest bits of all bytes, the next ones the bits above, and
    so on."""
    parts = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)
    packed = parts[0].clone()
    for place, part in enumerate(parts[1:], 1):
        packed |= part << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return packed codes as numbers of `dtype`. packed [... n * bits / 8] -> [... n]"""
    width, mask = packed.shape[-1], 2**bits - 1
    codes = torch.empty((*packed.shape[:-1], width * 8 // bits), dtype=dtype, device=packed.device)
    for place in range(8 // bits):
        codes[..., place * width : (place + 1) * width] = (packed >> (place * bits)) & mask
    return codes


def dequantise(
    packed: Tensor, least: Tensor, step: Tensor, bits: int, dtype: torch.dtype
) -> Tensor:
    """Turn packed codes back into numbers, code * step + least. packed [... n * bits / 8]; least
    and step [... c], each for n/c neighbouring numbers -> [... n]

    Leading dimensions broadcast: many rows may share one `least` and `step`."""
    codes = unpack(packed, bits, torch.float32)
    split = codes.unflatten(-1, (least.shape[-1], -1))
    return (
        split.mul_(step.float().unsqueeze(-1))
        .add_(least.float().unsqueeze(-1))
        .flatten(-2)
        .to(dtype)
    )


def to_float8(x: Tensor, of_scale: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Write each row (the last dimension) as floats of 8 bits with one scale. x [... n] -> codes
    [... n] in uint8, scale [... 1] in fp16, rounded upwards, or in fp32 (`of_scale`), and whether
    numbers of the row cannot be written (`refuse`), [... 1]"""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / _LARGEST_FLOAT8
    scale = -rounded_down(-scale) if of_scale is torch.float16 else scale
    width = scale.float().masked_fill(scale == 0, 1)  # all numbers of the row are zero
    return (x / width).to(torch.float8_e4m3fn).view(torch.uint8), scale, ~scale.isfinite()


def from_float8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn floats of 8 bits back into numbers of `dtype`. codes [... n] in uint8, scale [... 1] ->
    [... n]"""
    return (codes.view(torch.float8_e4m3fn).float() * scale.float()).to(dtype)
