"""Defines the operations that read keys and values as codes of few bits: attention, and rows that
are decoded.

Integer codes are written as in KIVI (kernels/quantise.py): keys share a range per channel over a
block of tokens, values over neighbouring channels of a token. Other codes are floats of 8 bits,
with a scale for each token's key and value, floats of 4 bits (kernels/nvfp4.py), or numbers of
levels, with a norm for each (kernels/levels.py). Compiled backends decode in registers, so that
only codes are read from memory. Products and sums run in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from kernels import ops
from kernels.levels import CodedLevels
from kernels.nvfp4 import CodedFloats4
from kernels.per_sequence import PerSequence
from kernels.quantise import dequantise, from_float8
from kernels.ragged import Ragged, by_sequence
from kernels.reference import Segment, gather_rows
from kernels.rotated import rotate, rotate_back


class Coded(NamedTuple):
    """Hold keys that are quantised to integers of `bits` and values that are quantised to integers
    of `value_bits`, in whole blocks of `block` tokens.

    A number is least + code * step. A range tensor holds, for each group of numbers quantised
    together, its least number, then for each its step. Some channels of keys may be kept in full:
    their numbers replace the decoded ones. Sequences of different lengths have a `Ragged`, which
    holds a tensor per sequence, instead of each tensor."""

    k: Tensor  # [B G S D*bits/8] uint8
    v: Tensor  # [B G S D*value_bits/8] uint8
    k_range: Tensor  # [B G S/block 2*D] fp16
    v_range: Tensor  # [B G S 2*c] fp16, for c groups of neighbouring channels
    bits: int
    block: int
    kept: Tensor | None = None  # [B G S n]: n channels of each key as they were
    which: Tensor | None = None  # [B G S/block n] uint8: the channels of a block that are kept

    @property
    def dim(self) -> int:
        """Return the number of channels of a head."""
        return self.k_range.shape[-1] // 2

    @property
    def value_bits(self) -> int:
        """Return the bits of an integer of a value."""
        return self.v.shape[-1] * 16 // self.k_range.shape[-1]

    @property
    def all_four(self) -> tuple[Tensor, ...]:
        """Return four tensors: the codes of keys, the codes of values, the ranges of keys, the
        ranges of values."""
        return self[:4]

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """Return the four numbers by which kernels tell formats apart: into how many groups a
        value's channels are split, the bits of a key's and of a value's integer, and how many
        tokens share a range of keys."""
        return self.v_range.shape[3] // 2, self.bits, self.value_bits, self.block

    def tokens(self, first: int | PerSequence, end: int | PerSequence) -> Coded:
        """Return the tokens from `first` to `end`; both must be multiples of `block`."""
        blocks = first // self.block, end // self.block
        return Coded(
            _between(self.k, first, end),
            _between(self.v, first, end),
            _between(self.k_range, *blocks),
            _between(self.v_range, first, end),
            self.bits,
            self.block,
            None if self.kept is None else _between(self.kept, first, end),
            None if self.which is None else _between(self.which, *blocks),
        )

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values as numbers of `dtype`, [... D] each. Leading dimensions
        broadcast: the range of a key must stand at the token's place, or at one that serves it."""
        (k_least, k_step), (v_least, v_step) = self.k_range.chunk(2, -1), self.v_range.chunk(2, -1)
        k = dequantise(self.k, k_least, k_step, self.bits, dtype)
        if self.kept is not None and self.which is not None:
            k.scatter_(-1, self.which.long().expand(self.kept.shape), self.kept.to(dtype))
        return k, dequantise(self.v, v_least, v_step, self.value_bits, dtype)


class CodedFloats(NamedTuple):
    """Hold keys and values that are written as floats of 8 bits (`float8_e4m3fn`), with one scale
    for the key and one for the value of each token and head. Sequences of different lengths have a
    `Ragged`, which holds a tensor per sequence, instead of each tensor."""

    k: Tensor  # [B G S D] uint8
    v: Tensor  # [B G S D] uint8
    scales: Tensor  # [B G S 2] fp16, of the key and of the value

    @property
    def block(self) -> int:
        """Return how many tokens share a scale: one."""
        return 1

    @property
    def dim(self) -> int:
        """Return the number of channels of a head."""
        return self.k.shape[3]

    @property
    def all_four(self) -> tuple[Tensor, ...]:
        """Return four tensors, as `Coded.all_four` does: codes of keys, codes of values, then twice
        the one tensor of scales, in the places of the ranges of keys and of values."""
        return (*self, self.scales)

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """Return the four numbers of `Coded.kind`; 0 bits mark floats for the kernels."""
        return 1, 0, 0, 1

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values as numbers of `dtype`, [B G S D] each."""
        of_key, of_value = self.scales.chunk(2, -1)
        return from_float8(self.k, of_key, dtype), from_float8(self.v, of_value, dtype)


Codes = Coded | CodedFloats | CodedFloats4 | CodedLevels


class Rotated(NamedTuple):
    """Hold codes of tokens whose keys and values were rotated by `kernels.rotated.rotation(dim, seed)`
    before they were written."""

    tokens: Codes
    seed: int


OF_BLOCKS = ("k_range", "which", "of_tensor")  # tensors that have a row per block of tokens
DECODED_AT_ONCE = 1 << 13  # tokens that no kernel may read, decoded together for attention


def _between(x: Any, first: int | PerSequence, end: int | PerSequence) -> Any:
    return x.slice(first, end) if isinstance(x, Ragged) else x[:, :, first:end]


@by_sequence
def coded_attention(
    q: Tensor, segments: Sequence[Segment | Codes | Rotated], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to all tokens of `segments`, some of which are codes,
    under one softmax, and return its log-sum-exp too. Rotated codes are read by a rotated query. q
    [B H 1 D] -> [B H 1 D], [B H] (fp32)"""
    pieces: list[Segment | Codes | Rotated] = []
    for segment in segments:
        pieces += _pieces(segment) if isinstance(segment, Codes) else [segment]
    return under_one_softmax(q, pieces, scale, _attended)


def under_one_softmax(
    q: Tensor,
    segments: Sequence[Segment | Codes | Rotated],
    scale: float,
    attend: Callable[[Tensor, Codes, float], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attend to codes with `attend`, one after the other, and to all other segments at once, and
    merge what comes out. q [B H 1 D] -> [B H 1 D], log-sum-exp [B H]"""
    parts = [
        _attended_rotated(q, codes, scale)
        if isinstance(codes, Rotated)
        else attend(q, codes, scale)
        for codes in segments
        if not isinstance(codes, Segment)
    ]
    if plain := [segment for segment in segments if isinstance(segment, Segment)]:
        parts.append(ops.segment_attention_with_lse(q, plain, scale))
    return ops.merge_attention_with_lse(*zip(*parts, strict=True)) if parts[1:] else parts[0]


def _attended_rotated(q: Tensor, rotated: Rotated, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to codes of rotated keys and values, and rotate the output back."""
    turned = rotate(q, rotated.seed).to(q.dtype)
    out, lse = ops.coded_attention(turned, [rotated.tokens], scale)
    return rotate_back(out, rotated.seed, q.dtype), lse


def _attended(q: Tensor, coded: Codes, scale: float) -> tuple[Tensor, Tensor]:
    decoded: tuple[Tensor, Tensor] = ops.segment_attention_with_lse(
        q, [_decoded(coded, q.dtype)], scale
    )
    return decoded


def _pieces(coded: Codes) -> list[Codes]:
    """Cut codes into pieces that are decoded one after the other, on a GPU too, where numbers for a
    whole long prompt would take more memory than its codes save."""
    each = max(1, DECODED_AT_ONCE // coded.block)
    count = max(1, -(-coded.k.shape[2] // (each * coded.block)))

    def part(i: int) -> Codes:
        return _of_both(
            coded,
            lambda x: x[:, :, i * each * coded.block : (i + 1) * each * coded.block],
            lambda x: x[:, :, i * each : (i + 1) * each],
        )

    return [part(i) for i in range(count)]


C = TypeVar("C", bound=Codes)


def _of_both(
    coded: C, of_tokens: Callable[[Tensor], Tensor], of_blocks: Callable[[Tensor], Tensor]
) -> C:
    """Return `coded` with what `of_tokens` makes of its tensors that have a row per token, and
    `of_blocks` of those that have a row per block of tokens."""
    made: dict[str, Any] = {
        name: (of_blocks if name in OF_BLOCKS else of_tokens)(cast(Tensor, x))
        for name, x in coded._asdict().items()
        if isinstance(x, Tensor | Ragged)
    }
    return cast(C, coded._replace(**made))


def _decoded(coded: Codes, dtype: torch.dtype) -> Segment:
    """Return the keys and values of all tokens in `coded` as numbers of `dtype`."""
    by_block = _of_both(
        coded, lambda x: x.unflatten(2, (-1, coded.block)), lambda x: x.unsqueeze(3)
    )
    return Segment(*(x.flatten(2, 3) for x in by_block.decoded(dtype)))


@by_sequence
def decode_rows(
    coded: Codes,
    rows: Tensor | None,
    blocks: Tensor | None,
    dtype: torch.dtype,
    recent: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn codes of the tokens `rows` back into keys and values [B G K D].

    rows [B G K]: indices into `k`, `v` and `v_range`, or None for all; blocks [B G K]: for each
    token the index of its block in `k_range`, or None if all tokens stand in their blocks. recent:
    exact values [B G K D], and a number n on the device ([1] or [B] int64); from token number n on,
    the exact values replace the decoded ones. There are two indices because moved rows have an
    order of their own, while `k_range` stays where it is. Floats and levels do not use `blocks`."""
    if blocks is None and rows is None:
        k, v = _decoded(coded, dtype)[:2]
    else:
        k, v = _of_both(
            coded,
            lambda x: x if rows is None else gather_rows(x, rows),
            lambda x: x if blocks is None else gather_rows(x, blocks),
        ).decoded(dtype)
    return k, v if recent is None else with_recent(v, *recent)


def decoded_tokens(
    coded: Codes, blocks: Tensor | None, recent: tuple[Tensor, Tensor] | None
) -> int:
    """Return how many tokens `decode_rows` decodes; the shape of a `Ragged` may be larger than any
    sequence."""
    if blocks is not None:
        return blocks.shape[2]
    return coded.k.shape[2] if recent is None else recent[0].shape[2]


def with_recent(v: Tensor, exact: Tensor, unused: Tensor) -> Tensor:
    """Return values [B G K D] in which all but the first `unused` ([1] or [B]) are `exact`."""
    tokens = torch.arange(v.shape[2], device=v.device).view(-1, 1)
    return torch.where(tokens < unused.view(-1, 1, 1, 1), v, exact)
