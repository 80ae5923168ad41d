"""Defines a codec that writes floats of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import ops
from kernels.coded import CodedFloats
from kernels.quantise import to_float8
from methods.tiers.codec import Codec, Encoded, Layout


@dataclass(frozen=True, kw_only=True)
class FloatCodec(Codec):
    """Write `float8_e4m3fn`, times an fp16 scale for each token's key and for its value in each head. Per token: 2
    * D bytes of codes and 4 of scales."""

    @property
    def block(self) -> int:
        return 1

    def check(self, head_dim: int) -> None:
        """Accept every head size."""

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        return Layout(((head_dim, torch.uint8), (head_dim, torch.uint8), (2, torch.float16)))

    def encode(self, k: Tensor, v: Tensor) -> Encoded:
        (k_codes, of_key), (v_codes, of_value) = to_float8(k), to_float8(v)
        return Encoded((k_codes, v_codes, torch.cat([of_key, of_value], -1)))

    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return CodedFloats(*stored.tokens).decoded(dtype)

    def decode_rows(
        self, stored: Encoded, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        decoded: tuple[Tensor, Tensor] = ops.decode_rows(self.segment(stored, dtype), rows, blocks, dtype)
        return decoded

    def segment(self, stored: Encoded, dtype: torch.dtype) -> CodedFloats:
        return CodedFloats(*stored.tokens)
