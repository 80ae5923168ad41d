"""Writes numbers as NVFP4, NVIDIA's floats of 4 bits, in plain torch: no FP4 unit is needed.

A code is a sign, two bits of exponent and one of mantissa (e2m1), so a number is one of 0, 0.5, 1,
1.5, 2, 3, 4, 6, or minus one of these. Every 16 neighbouring channels share a scale in
`float8_e4m3fn`, and every tensor a scale in fp32, its largest magnitude / (6 * 448), which makes
the largest scale of 16 channels 448. A number is code * (scale of 16 * scale of the tensor).

Scales, codes and ties (to the even mantissa) are those of NVIDIA's Model Optimizer
(modelopt/torch/quantization/qtensor/nvfp4_tensor.py): a scale of 16 is at least 2**-9, and is 1
where all numbers are zero. A cache grows, so its whole is never there at once: here a tensor is
what a head's keys, or its values, are in one block of tokens. Bytes hold codes as `quantise.pack`
orders them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.quantise import pack, unpack

CHANNELS = 16  # that share a scale
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_SCALE = 448.0


class CodedFloats4(NamedTuple):
    """Hold keys and values that are written as NVFP4, in whole blocks of `block` tokens. Sequences
    of different lengths have a `Ragged`, which holds a tensor per sequence, instead of each
    tensor."""

    k: Tensor  # [B G S D/2] uint8
    v: Tensor  # [B G S D/2] uint8
    of_tensor: Tensor  # [B G S/block 2] fp32: the scales of a block's keys and of its values
    scales: Tensor  # [B G S 2*D/16] uint8: the e4m3 scales of a token's key, then of its value
    block: int

    @property
    def dim(self) -> int:
        """Return the number of channels of a head."""
        return self.k.shape[3] * 2

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """Return the four numbers of `Coded.kind`, where a group of channels shares a scale."""
        return self.dim // CHANNELS, 4, 4, self.block

    @property
    def all_four(self) -> tuple[Tensor, ...]:
        """Return four tensors, as `Coded.all_four` does: codes of keys, codes of values, scales of
        blocks and scales of tokens."""
        return self[:4]

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values as numbers of `dtype`, [... D] each. Leading dimensions
        broadcast, as those of `Coded.decoded` do."""
        of_keys, of_values = self.scales.view(torch.float8_e4m3fn).float().chunk(2, -1)
        of_all_keys, of_all_values = self.of_tensor.chunk(2, -1)
        return (
            _numbers(self.k, of_keys * of_all_keys, dtype),
            _numbers(self.v, of_values * of_all_values, dtype),
        )


def encode_nvfp4(k: Tensor, v: Tensor, block: int) -> tuple[CodedFloats4, Tensor]:
    """Write keys and values [B G S D] of whole blocks of `block` tokens as NVFP4. Return also
    whether numbers of a block are not finite (`quantise.refuse`), [B G S/block 2]."""
    (k_codes, *of_k), (v_codes, *of_v) = (_written(x.unflatten(2, (-1, block))) for x in (k, v))
    scales, of_tensor = (torch.cat(both, -1) for both in zip(of_k, of_v, strict=True))
    return CodedFloats4(k_codes, v_codes, of_tensor, scales, block), ~of_tensor.isfinite()


@cache
def level_table(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what the 16 codes stand for, [16] on `device`."""
    return torch.tensor([sign * x for sign in (1, -1) for x in LEVELS], dtype=dtype, device=device)


def _written(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write blocks [B G n block D] as NVFP4 -> packed codes [B G n*block D/2], scales of 16
    channels [B G n*block D/16] (e4m3 as uint8) and of blocks [B G n 1] (fp32)."""
    parts = x.float().unflatten(-1, (-1, CHANNELS))
    of_tensor = parts.abs().amax((3, 4, 5)) / (LEVELS[-1] * _LARGEST_SCALE)
    whole = of_tensor.masked_fill(of_tensor == 0, 1).view(*of_tensor.shape, 1, 1)
    scales = parts.abs().amax(-1) / (LEVELS[-1] * whole)
    scales = scales.masked_fill(scales == 0, 1).clamp(min=2.0**-9).to(torch.float8_e4m3fn)
    numbers = (parts / (scales.float() * whole).unsqueeze(-1)).flatten(-2)
    codes = torch.bucketize(numbers.abs(), _middles(x.device)) + 8 * (numbers < 0)
    packed = pack(codes.to(torch.uint8), 4).flatten(2, 3)
    return packed, scales.view(torch.uint8).flatten(2, 3), of_tensor.unsqueeze(-1)


def _numbers(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of `dtype` [... D] for packed codes [... D/2], given the whole scale of every 16
    channels, fp32 [... D/16]."""
    levels = level_table(packed.device)[unpack(packed, 4, torch.int32)]
    return (levels.unflatten(-1, (-1, CHANNELS)) * scales.unsqueeze(-1)).flatten(-2).to(dtype)


@cache
def _middles(device: torch.device) -> Tensor:
    """Return the largest fp32 number that is rounded to each level but the last, [7]: the middle
    to the next level, or where that level has the even mantissa the number below."""
    levels = torch.tensor(LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    middles[1::2] = middles[1::2].nextafter(torch.tensor(0.0))
    return middles.to(device)
