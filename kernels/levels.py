"""Writes vectors in few bits per number, as TurboQuant does (arXiv 2504.19874): the norm apart, and
each coordinate of the direction as the nearest of a few fixed levels.

After a random rotation (kernels/rotated.py) a coordinate of a direction of n channels has a density
proportional to (1 - x**2)**((n - 3) / 2), whatever the vector was. So the best levels are known
without a look at data: those of the Lloyd-Max quantiser of this density, where each level is the
mean of the coordinates that are nearest to it.

Levels shrink products with a query, since a mean is nearer to zero than most of what it stands for.
With a residual bit (the paper's TurboQuant_prod) a key spends one of its bits per number on the
signs of S r, where r is what its levels miss and S a matrix of independent normal numbers. Then
|r| * sqrt(pi / 2) / n * S^T sign(S r) is added to the key, and its products are right on average
over S."""

from __future__ import annotations

from functools import cache
from math import pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.quantise import pack, unpack

_ANGLES = 1 << 16  # at which the density of a coordinate is integrated
_ROUNDS = 20_000  # the most of Lloyd's algorithm: 16 levels take a few thousand


class CodedLevels(NamedTuple):
    """Hold keys and values of `dim` channels in `bits` per number, with norms that are written
    apart. Sequences of different lengths have a `Ragged`, which holds a tensor per sequence,
    instead of each tensor."""

    # [B G S dim*bits/8] uint8; with a residual bit, levels of bits - 1 and behind them the signs
    k: Tensor
    v: Tensor  # [B G S dim*bits/8] uint8
    # [B G S 2|3] fp16, of the key, of the value, and with a residual bit of what the key's levels miss
    norms: Tensor
    dim: int
    bits: int
    seed: int | None  # of the matrix behind the signs; None: there is no residual bit

    @property
    def block(self) -> int:
        """Return how many tokens share a norm: one."""
        return 1

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """Return the four numbers of `Coded.kind`; a key's bits are those of its level."""
        return 1, self.bits - (self.seed is not None), self.bits, 1

    @property
    def all_four(self) -> tuple[Tensor, ...]:
        """Return four tensors, as `Coded.all_four` does: codes of keys, codes of values, then twice
        the norms, in the places of the ranges of keys and of values."""
        return self.k, self.v, self.norms, self.norms

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values as numbers of `dtype`, [B G S dim] each."""
        of_key, of_value, *of_missed = self.norms.float().split(1, -1)
        v = _from_codes(self.v, self.bits, self.dim) * of_value
        if self.seed is None:
            return (_from_codes(self.k, self.bits, self.dim) * of_key).to(dtype), v.to(dtype)
        codes, signs = self.k.tensor_split([self.dim * (self.bits - 1) // 8], -1)
        missed = (2 * unpack(signs, 1, torch.float32) - 1) @ normal_matrix(
            self.dim, self.seed, v.device
        )
        k = _from_codes(codes, self.bits - 1, self.dim) * of_key
        return k.add_(missed.mul_(of_missed[0] * (sqrt(pi / 2) / self.dim))).to(dtype), v.to(dtype)


def encode_levels(k: Tensor, v: Tensor, bits: int, seed: int | None) -> tuple[CodedLevels, Tensor]:
    """Write keys and values [B G S D] in `bits` per number, keys with a residual bit unless `seed`
    is None. Return also whether numbers of a token cannot be written (`quantise.refuse`),
    [B G S 1]."""
    dim = k.shape[3]
    (keys, of_key), (values, of_value) = (_directions(x) for x in (k, v))
    v_codes, norms = _nearest(values, bits), [of_key, of_value]
    if seed is None:
        k_codes = _packed(_nearest(keys, bits), bits)
    else:
        rough = _nearest(keys, bits - 1)
        missed = keys - level_table(dim, bits - 1, k.device)[rough.long()]
        signs = (missed @ normal_matrix(dim, seed, k.device).T >= 0).to(torch.uint8)
        k_codes = torch.cat([_packed(rough, bits - 1), pack(signs, 1)], -1)
        norms.append(missed.norm(dim=-1, keepdim=True) * of_key)
    written = torch.cat(norms, -1).half()
    bad = ~written.isfinite().all(-1, keepdim=True)
    return CodedLevels(k_codes, _packed(v_codes, bits), written, dim, bits, seed), bad


@cache
def best_levels(dim: int, bits: int) -> tuple[float, ...]:
    """Return 2**bits numbers, ascending: the levels to which a coordinate of a random direction of
    `dim` channels can be rounded with the least mean square error, each to the nearest.

    As x = cos(a), the angle a has a density proportional to sin(a)**(dim - 2), which is smooth for
    every size from 2 on, and the integral of x over a range of angles is a difference of
    sin(a)**(dim - 1) / (dim - 1)."""
    angles = torch.linspace(0, pi, _ANGLES, dtype=torch.float64)
    steps = torch.cumulative_trapezoid(angles.sin() ** (dim - 2), angles)
    masses = torch.cat([steps.new_zeros(1), steps])
    count = 2**bits
    levels = (
        (torch.arange(count, dtype=torch.float64) * 2 + 1 - count) / count * min(0.9, 3 / sqrt(dim))
    )
    for _ in range(_ROUNDS):
        middles = (levels[1:] + levels[:-1]) / 2
        ends = torch.cat([middles.new_tensor([-1.0]), middles, middles.new_tensor([1.0])]).acos()
        place = (ends / pi * (_ANGLES - 1)).clamp(max=_ANGLES - 2)
        low = place.long()
        mass = masses[low].lerp(masses[low + 1], place - low)
        moment = ends.sin() ** (dim - 1) / (dim - 1)
        means = moment.diff() / mass.diff()
        if (means - levels).abs().max() < 1e-10:
            break
        levels = means
    return tuple(((levels - levels.flip(0)) / 2).tolist())


@cache
def level_table(
    dim: int, bits: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return `best_levels` as a tensor on `device`, [2**bits]."""
    return torch.tensor(best_levels(dim, bits), dtype=dtype, device=device)


@cache
def normal_matrix(dim: int, seed: int, device: torch.device) -> Tensor:
    """Return a matrix of independent normal numbers, [dim dim] fp32 on `device`."""
    return torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed)).to(device)


def _directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split vectors [... D] into directions of norm 1 (or 0), in fp32, and their norms [... 1]."""
    x = x.float()
    norms = x.norm(dim=-1, keepdim=True)
    return x / norms.masked_fill(norms == 0, 1), norms


def _nearest(directions: Tensor, bits: int) -> Tensor:
    """Return the number of the level that is nearest to each coordinate, uint8."""
    levels = level_table(directions.shape[-1], bits, directions.device)
    return torch.bucketize(directions, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


def _from_codes(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return the levels, in fp32, whose codes are packed: [... dim*bits/8] -> [... dim]"""
    if bits == 3:
        low, high = packed.tensor_split([dim // 4], -1)
        codes = unpack(low, 2, torch.int32) + 4 * unpack(high, 1, torch.int32)
    else:
        codes = unpack(packed, bits, torch.int32)
    return level_table(dim, bits, packed.device)[codes]


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [... n] into n * bits / 8 bytes. Codes of 3 bits are packed in two parts: the
    lower two bits of all codes, then the third bits of all."""
    return (
        torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], -1) if bits == 3 else pack(codes, bits)
    )
