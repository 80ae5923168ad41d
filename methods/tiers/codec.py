"""Defines codecs, which encode keys and values: as they are, in integers of 2, 4 or 8 bits, in
floats of 8 or 4 bits, or by levels of 2 to 4 bits; and integers and levels after a random rotation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels import ops
from kernels.coded import Coded, CodedFloats, Codes, Rotated
from kernels.levels import CodedLevels, encode_levels
from kernels.nvfp4 import CHANNELS, CodedFloats4, encode_nvfp4
from kernels.quantise import from_float8, refuse, to_float8
from kernels.reference import Segment
from kernels.rotated import rotate, rotate_back


class Encoded(NamedTuple):
    """Hold keys and values as a codec writes them: tensors with a row per token, and tensors with a
    row per block of tokens, such as the ranges (least number and step) in which its numbers were
    quantised. Every tensor is [B G rows width]."""

    tokens: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...] = ()


# tokens as attention reads them: plain, as codes, or still rotated
Part = Segment | Codes | Rotated


class Layout(NamedTuple):
    """Give the width and dtype of each tensor that a codec writes: those with a row per token, and
    those with a row per block of tokens."""

    tokens: tuple[tuple[int, torch.dtype], ...]
    blocks: tuple[tuple[int, torch.dtype], ...] = ()

    @property
    def token_bytes(self) -> int:
        """Return the bytes per token and head, without what is written per block."""
        return sum(width * dtype.itemsize for width, dtype in self.tokens)

    @property
    def block_bytes(self) -> int:
        """Return the bytes per block and head that are written in addition to those per token."""
        return sum(width * dtype.itemsize for width, dtype in self.blocks)


class Widths(Protocol):
    """Say how wide keys and values of a layer are (`LayerSpec`)."""

    @property
    def head_dim(self) -> int: ...

    @property
    def value_channels(self) -> int: ...

    @property
    def values_in_keys(self) -> bool: ...


class Codec(ABC):
    """Encode keys and values in whole blocks of tokens, and decode them token by token. A codec is
    a value, as a method is: a frozen dataclass."""

    @property
    def block(self) -> int:
        """Return how many tokens are encoded together: only multiples of it can be encoded."""
        return 1

    def check(self, head_dim: int) -> None:  # noqa: B027 (most codecs support every head size)
        """Raise `ValueError` if the codec does not support heads of `head_dim` channels."""

    def for_layer(self, spec: Widths) -> Codec:
        """Return this codec as it writes keys and values of layers like `spec`. Raise `ValueError` if it
        does not suit them."""
        if spec.values_in_keys:
            raise ValueError(
                "It writes keys and values apart, and latent attention (MLA) stores both as one row: choose fp8_ds_mla."
            )
        if spec.value_channels != spec.head_dim:
            raise ValueError(
                f"It writes values as wide as keys, and this model's have {spec.value_channels} channels and keys "
                f"{spec.head_dim}: leave it out."
            )
        self.check(spec.head_dim)
        return self

    @abstractmethod
    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        """Return the widths and dtypes of the tensors that `encode` returns, for keys and values of
        `head_dim` channels in `dtype`."""

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor) -> Encoded:
        """Encode whole blocks of tokens. k, v [B G n*block D]"""

    def encode_unchecked(self, k: Tensor, v: Tensor) -> tuple[Encoded, Tensor | None]:
        """Encode as `encode` does, without asking the device whether all numbers could be encoded.
        Also return a tensor that is set where a number cannot be encoded, for
        `kernels.quantise.refuse`; None if `encode` has asked already, or if every number can be
        encoded."""
        return self.encode(k, v), None

    @abstractmethod
    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return decoded keys and values [... D] in `dtype`, one pair for each row of
        `stored.tokens`. The rows of `stored.blocks` are those of each token's block; they have the
        same leading dimensions, or ones that broadcast."""

    def decode_rows(
        self, stored: Encoded, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return chosen tokens of each head, decoded, k, v [B G K D]. rows [B G K]: their rows in
        `stored.tokens`, or None for all that it holds. blocks [B G K]: the rows of `stored.blocks`
        that belong to them."""
        if (codes := self.codes(stored)) is not None:
            return ops.decode_rows(codes, rows, blocks, dtype)
        tokens = (
            stored.tokens
            if rows is None
            else tuple(ops.gather_rows(x, rows) for x in stored.tokens)
        )
        return self.decode(
            Encoded(tokens, tuple(ops.gather_rows(x, blocks) for x in stored.blocks)), dtype
        )

    def codes(self, stored: Encoded) -> Codes | None:
        """Return the encoded tokens in the form in which attention kernels read them without
        decoding; None if there are no kernels for this codec."""
        return None

    def segment(self, stored: Encoded, dtype: torch.dtype) -> Part:
        """Return all encoded tokens for attention: as codes if kernels read these, or else decoded
        in `dtype`. If the codec has rotated them, they are still rotated."""
        codes = self.codes(stored)
        return Segment(*self.decode_whole(stored, dtype)) if codes is None else codes

    def decode_whole(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all encoded tokens, decoded, k, v [B G n*block D]."""
        tokens = tuple(x.unflatten(2, (-1, self.block)) for x in stored.tokens)
        k, v = self.decode(Encoded(tokens, tuple(x.unsqueeze(3) for x in stored.blocks)), dtype)
        return k.flatten(2, 3), v.flatten(2, 3)


@dataclass(frozen=True)
class Plain(Codec):
    """Keep keys and values as they are: the codec that encodes nothing. `value_dim`: the channels of
    a value, if they are not as many as those of a key. `in_keys`: values are the last channels of
    keys, so that keys alone are written."""

    value_dim: int | None = None
    in_keys: bool = False

    def for_layer(self, spec: Widths) -> Plain:
        return Plain(spec.value_channels, spec.values_in_keys)

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        values = () if self.in_keys else ((self.value_dim or head_dim, dtype),)
        return Layout(((head_dim, dtype), *values))

    def encode(self, k: Tensor, v: Tensor) -> Encoded:
        return Encoded((k,) if self.in_keys else (k, v))

    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, *values = stored.tokens
        return k, values[0] if values else k[..., -(self.value_dim or k.shape[-1]) :]


class _Checked(Codec):
    """Define a codec of numbers that may be impossible to encode: those that are not finite or too
    large."""

    def encode(self, k: Tensor, v: Tensor) -> Encoded:
        encoded, bad = self.encode_unchecked(k, v)
        if bad is not None:
            refuse(bad)
        return encoded


class _Coded(_Checked):
    """Define a codec whose codes kernels read, and which say themselves what they stand for."""

    @abstractmethod
    def codes(self, stored: Encoded) -> Codes:
        """Return the encoded tokens as `Codec.codes` does; there are kernels for them."""

    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.codes(stored).decoded(dtype)


@dataclass(frozen=True, kw_only=True)
class IntCodec(_Coded):
    """Write integers of `bits`, as KIVI does (arXiv 2402.02750): every `group` numbers share a
    range.

    A key's channel shares its range with the same channel of `group` tokens in a row, since keys
    have channels that are large throughout. A value's range covers `group` channels of one token
    (all its channels, if there are fewer). A range is two fp16 numbers, whatever the dtype of the
    cache. Per token: D * bits / 8 bytes of codes for K and as many for V, and 4 * D / group bytes
    for V's ranges; per block of `group` tokens: 4 * D bytes for K's.

    `value_bits`: of values, if not `bits`. `kept`: as many channels of keys as are written as they
    are, besides their codes: in each block of `group` tokens those with the largest steps, which
    are off most. They take kept numbers per token, in the dtype of the cache, and kept bytes per
    block, which say where they belong. KVQuant (arXiv 2401.18079) keeps single large numbers so."""

    bits: int
    group: int = 32
    value_bits: int | None = None
    kept: int = 0

    def __post_init__(self) -> None:
        if not {self.bits, self.bits_of_values} <= {2, 4, 8}:
            given = " and ".join(map(str, dict.fromkeys((self.bits, self.bits_of_values))))
            raise ValueError(f"A codec of {given} bits is not possible: choose 2, 4 or 8.")
        if self.group < 2:
            raise ValueError(f"A codec's group of {self.group} must hold at least 2 numbers.")

    @property
    def block(self) -> int:
        return self.group

    @property
    def bits_of_values(self) -> int:
        """Return the bits of an integer of a value."""
        return self.value_bits or self.bits

    def check(self, head_dim: int) -> None:
        least = min(self.bits, self.bits_of_values)
        if head_dim % min(self.group, head_dim) or head_dim % (8 // least):
            raise ValueError(
                f"A codec of {least} bits in groups of {self.group} does not suit a head size of {head_dim}: "
                "choose a group that divides it."
            )
        if self.kept and not self.kept < head_dim <= 256:
            raise ValueError(
                f"{self.kept} channels in full do not suit a head size of {head_dim}: keep fewer, of at most 256."
            )

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        self.check(head_dim)
        codes = [(head_dim * bits // 8, torch.uint8) for bits in (self.bits, self.bits_of_values)]
        ranges = 2 * head_dim // min(self.group, head_dim)
        kept = [((self.kept, dtype), (self.kept, torch.uint8))] if self.kept else []
        return Layout(
            (*codes, (ranges, torch.float16), *(of_token for of_token, _ in kept)),
            ((2 * head_dim, torch.float16), *(of_block for _, of_block in kept)),
        )

    def encode_unchecked(self, k: Tensor, v: Tensor) -> tuple[Encoded, Tensor]:
        k_codes, k_range, v_codes, v_range, bad = ops.encode_codes(
            k, v, self.bits, self.bits_of_values, self.group
        )
        if not self.kept:
            return Encoded((k_codes, v_codes, v_range), (k_range,)), bad
        which = k_range.chunk(2, -1)[1].topk(self.kept).indices  # [B G n kept]
        kept = k.gather(3, which.repeat_interleave(self.group, 2))
        return Encoded((k_codes, v_codes, v_range, kept), (k_range, which.to(torch.uint8))), bad

    def codes(self, stored: Encoded) -> Coded:
        (k, v, v_range, *kept), (k_range, *which) = stored
        return Coded(k, v, k_range, v_range, self.bits, self.group, *kept, *which)


@dataclass(frozen=True, kw_only=True)
class FloatCodec(_Coded):
    """Write floats of 8 bits (`float8_e4m3fn`), times an fp16 scale for each token's key and for
    its value in each head. Per token and head: 2 * D bytes of codes and 4 of scales."""

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        return Layout(((head_dim, torch.uint8), (head_dim, torch.uint8), (2, torch.float16)))

    def encode_unchecked(self, k: Tensor, v: Tensor) -> tuple[Encoded, Tensor]:
        (k_codes, of_key, k_bad), (v_codes, of_value, v_bad) = to_float8(k), to_float8(v)
        return Encoded((k_codes, v_codes, torch.cat([of_key, of_value], -1))), k_bad | v_bad

    def codes(self, stored: Encoded) -> CodedFloats:
        return CodedFloats(*stored.tokens)


@dataclass(frozen=True)
class LatentCodec(_Checked):
    """Write rows of latent attention (MLA) as FlashMLA reads them and as vLLM's fp8_ds_mla stores them: a
    latent in floats of 8 bits (`float8_e4m3fn`), of which each `TILE` channels share a scale in fp32,
    and the rotated channels in bf16. That is 656 bytes for 512 and 64 channels. `channels`: those of a
    latent, which the layer says."""

    TILE: ClassVar[int] = 128
    channels: int = 512

    def for_layer(self, spec: Widths) -> LatentCodec:
        if not spec.values_in_keys:
            raise ValueError(
                "It writes the rows of latent attention (MLA), which this model does not have: choose fp8."
            )
        if spec.value_channels % self.TILE:
            raise ValueError(
                f"{self.TILE} channels of a latent share a scale, and this model's latents have {spec.value_channels}: "
                "leave it out."
            )
        return LatentCodec(spec.value_channels)

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        scales, rotated = self.channels // self.TILE, head_dim - self.channels
        parts = (self.channels, torch.uint8), (scales, torch.float32), (rotated, torch.bfloat16)
        return Layout(parts)

    def encode_unchecked(self, k: Tensor, v: Tensor) -> tuple[Encoded, Tensor]:
        rotated = k[..., : -self.channels].to(torch.bfloat16)
        tiles = v.float().unflatten(-1, (-1, self.TILE))
        codes, scales, bad = to_float8(tiles, torch.float32)
        return Encoded((codes.flatten(-2), scales.squeeze(-1), rotated)), bad

    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        codes, scales, rotated = stored.tokens
        tiles = codes.unflatten(-1, (-1, self.TILE))
        latents = from_float8(tiles, scales.unsqueeze(-1), dtype).flatten(-2)
        k = torch.cat([rotated.to(dtype), latents], -1)
        return k, k[..., -self.channels :]


@dataclass(frozen=True)
class Nvfp4Codec(_Coded):
    """Write floats of 4 bits as NVIDIA's NVFP4 defines them (kernels/nvfp4.py), where a tensor, which
    has a scale in fp32, is what a head's keys or values are in 32 tokens. Per token and head: D
    bytes of codes and D / 8 of scales; per 32 tokens: 8 bytes of scales."""

    @property
    def block(self) -> int:
        return 32

    def check(self, head_dim: int) -> None:
        if head_dim % CHANNELS:
            raise ValueError(
                f"NVFP4 does not suit a head size of {head_dim}, since {CHANNELS} channels share a scale: "
                "choose another codec, such as int4."
            )

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        self.check(head_dim)
        widths = head_dim // 2, head_dim // 2, 2 * head_dim // CHANNELS
        return Layout(tuple((width, torch.uint8) for width in widths), ((2, torch.float32),))

    def encode_unchecked(self, k: Tensor, v: Tensor) -> tuple[Encoded, Tensor]:
        written, bad = encode_nvfp4(k, v, self.block)
        return Encoded((written.k, written.v, written.scales), (written.of_tensor,)), bad

    def codes(self, stored: Encoded) -> CodedFloats4:
        (k, v, scales), (of_tensor,) = stored
        return CodedFloats4(k, v, of_tensor, scales, self.block)


@dataclass(frozen=True, kw_only=True)
class LevelCodec(_Coded):
    """Write each key and each value as a norm in fp16, and every coordinate of its direction as the
    nearest of 2**bits levels, which are the best ones for random directions (kernels/levels.py). It
    is meant for rotated vectors, so `turboquant` wraps it.

    `residual_bit`: keys have levels of one bit less, and a bit per coordinate that makes their
    products with a query right on average. Per token and head: D * bits / 8 bytes of codes for K
    and as many for V, and 4 bytes of norms, or 6 with a residual bit."""

    bits: int
    residual_bit: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4):
            raise ValueError(f"Levels of {self.bits} bits are not possible: choose 2, 3 or 4.")

    def check(self, head_dim: int) -> None:
        if head_dim % 8:
            raise ValueError(
                f"Codes of a head size of {head_dim} do not fill bytes: it must be a multiple of 8."
            )

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        self.check(head_dim)
        codes = head_dim * self.bits // 8
        return Layout(
            (
                (codes, torch.uint8),
                (codes, torch.uint8),
                (3 if self.residual_bit else 2, torch.float16),
            )
        )

    def encode_unchecked(self, k: Tensor, v: Tensor) -> tuple[Encoded, Tensor]:
        written, bad = encode_levels(k, v, self.bits, self._signs)
        return Encoded((written.k, written.v, written.norms)), bad

    def codes(self, stored: Encoded) -> CodedLevels:
        k, v, norms = stored.tokens
        return CodedLevels(k, v, norms, v.shape[-1] * 8 // self.bits, self.bits, self._signs)

    @property
    def _signs(self) -> int | None:
        return self.seed if self.residual_bit else None


@dataclass(frozen=True, kw_only=True)
class RotatedCodec(_Checked):
    """Rotate keys and values by a random rotation, the same for all, and write them as `inner`
    does. The rotation depends on the head size and on `seed` alone. It is not stored with a cache:
    a process makes it once. Where a step attends to all codes it rotates its query instead of them;
    chosen rows are rotated back when they are decoded."""

    inner: Codec
    seed: int = 1

    @property
    def block(self) -> int:
        return self.inner.block

    def check(self, head_dim: int) -> None:
        self.inner.check(head_dim)

    def layout(self, head_dim: int, dtype: torch.dtype) -> Layout:
        return self.inner.layout(head_dim, dtype)

    def encode_unchecked(self, k: Tensor, v: Tensor) -> tuple[Encoded, Tensor | None]:
        return self.inner.encode_unchecked(rotate(k, self.seed), rotate(v, self.seed))

    def decode(self, stored: Encoded, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._back(self.inner.decode(stored, torch.float32), dtype)

    def decode_rows(
        self, stored: Encoded, rows: Tensor | None, blocks: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return self._back(self.inner.decode_rows(stored, rows, blocks, torch.float32), dtype)

    def segment(self, stored: Encoded, dtype: torch.dtype) -> Rotated:
        tokens = self.inner.segment(stored, dtype)
        assert not isinstance(tokens, Segment | Rotated)
        return Rotated(tokens, self.seed)

    def _back(self, both: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = (rotate_back(x, self.seed, dtype) for x in both)
        return k, v


def turboquant(bits: int) -> RotatedCodec:
    """Return the codec of TurboQuant (arXiv 2504.19874) that keeps the mean square error small:
    `bits` per number."""
    return RotatedCodec(inner=LevelCodec(bits=bits))


def turboquant_residual(bits: int) -> RotatedCodec:
    """Return the codec of TurboQuant (arXiv 2504.19874) that is right on average over its random
    numbers. It takes `bits` per number; of a key's bits, one is the residual bit."""
    return RotatedCodec(inner=LevelCodec(bits=bits, residual_bit=True))


def rotated_integers(bits: int, group: int = 32, value_bits: int | None = None) -> RotatedCodec:
    """Return the codec that writes integers as `IntCodec` does, after a random rotation."""
    return RotatedCodec(inner=IntCodec(bits=bits, group=group, value_bits=value_bits))
