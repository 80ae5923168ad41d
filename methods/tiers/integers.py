"""Defines a codec that writes integers of 2, 4 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import ops
from kernels.coded import Coded
from kernels.quantise import dequantise, pack, quantise
from methods.tiers.codec import Codec, Encoded, Layout


@dataclass(frozen=True, kw_only=True)
class IntCodec(Codec):
    """Write integers of `bits`, as KIVI does (arXiv 2402.02750): every `group` numbers share a
    range.

    A key's channel shares its range with the same channel of `group` tokens in a row, since keys
    have channels that are large throughout. A value's range covers `group` channels of one token
    (all its channels, if there are fewer). A range is two fp16 numbers, whatever the dtype of the
    cache. Per token: D * bits / 8 bytes of codes for K and as many for V, and 4 * D / group bytes
    for V's ranges; per block of `group` tokens: 4 * D bytes for K's."""

    bits: int
    group: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"A codec of {self.bits} bits is not possible: choose 2, 4 or 8.")
        if self.group < 2:
            raise ValueError(f"A codec's group of {self.group} must hold at least 2 numbers.")

    @property
    def block(self) -> int:
        return self.group

    def check(self, head_dim: int) -> None:
        if head_dim % min(self.group, head_dim) or head_dim % (8 // self.bits):
            raise ValueError(
                f"A codec of {self.bits} bits in groups of {self.group} does not suit a head size of {head_dim}: "
                "choose a group that divides it."
            )

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        self.check(head_dim)
        codes = head_dim * self.bits // 8
        ranges = 2 * head_dim // min(self.group, head_dim)
        return Layout(
            ((codes, torch.uint8), (codes, torch.uint8), (ranges, torch.float16)), ((2 * head_dim, torch.float16),)
        )

    def encode(self, k: Tensor, v: Tensor) -> Encoded:
        k_codes, k_least, k_step = quantise(k.unflatten(2, (-1, self.group)).mT, self.bits)  # [B G n D group]
        v_codes, v_least, v_step = quantise(v.unflatten(3, (-1, min(self.group, v.shape[3]))), self.bits)
        tokens = (k_codes.mT.flatten(2, 3), v_codes.flatten(3))
        return Encoded(
            (*(pack(codes, self.bits) for codes in tokens), torch.cat([v_least, v_step], -1)),
            (torch.cat([k_least, k_step], -1),),
        )

    def decode_rows(
        self, stored: Encoded, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        decoded: tuple[Tensor, Tensor] = ops.decode_rows(self.segment(stored, dtype), rows, blocks, dtype)
        return decoded

    def segment(self, stored: Encoded, dtype: torch.dtype) -> Coded:
        (k, v, v_range), (k_range,) = stored
        return Coded(k, v, k_range, v_range, self.bits, self.group)

    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        (k, v, v_range), (k_range,) = stored
        (k_least, k_step), (v_least, v_step) = k_range.chunk(2, -1), v_range.chunk(2, -1)
        return dequantise(k, k_least, k_step, self.bits, dtype), dequantise(v, v_least, v_step, self.bits, dtype)
