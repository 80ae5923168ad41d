"""Defines the operations that read keys and values as codes of few bits: attention, and rows that
are decoded.

Integer codes are written as in KIVI (kernels/quantise.py): keys share a range per channel over a
block of tokens, values over neighbouring channels of a token. Other codes are floats of 8 bits,
with a scale for each token's key and value, or numbers of levels, with a norm for each
(kernels/levels.py). Compiled backends decode in registers, so that only codes are read from memory;
levels are decoded in plain torch. Products and sums run in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from kernels import ops
from kernels.levels import CodedLevels
from kernels.per_sequence import PerSequence
from kernels.quantise import dequantise, from_float8
from kernels.ragged import Ragged, by_sequence
from kernels.reference import Segment, gather_rows, segment_attention_with_lse


class Coded(NamedTuple):
    """Hold keys and values that are quantised to integers of `bits`, in whole blocks of `block`
    tokens.

    A number is least + code * step. A range tensor holds, for each group of numbers quantised
    together, its least number, then for each its step. Sequences of different lengths have a
    `Ragged`, which holds a tensor per sequence, instead of each tensor."""

    k: Tensor  # [B G S D*bits/8] uint8
    v: Tensor  # [B G S D*bits/8] uint8
    k_range: Tensor  # [B G S/block 2*D] fp16
    v_range: Tensor  # [B G S 2*c] fp16, for c groups of neighbouring channels
    bits: int
    block: int

    @property
    def dim(self) -> int:
        """Return the number of channels of a head."""
        return self.k_range.shape[3] // 2

    @property
    def all_four(self) -> tuple[Tensor, ...]:
        """Return four tensors: the codes of keys, the codes of values, the ranges of keys, the
        ranges of values."""
        return self[:4]

    @property
    def kind(self) -> tuple[int, int, int]:
        """Return the three numbers by which kernels tell formats apart: into how many groups a
        value's channels are split, the bits of an integer, and how many tokens share a range of
        keys."""
        return self.v_range.shape[3] // 2, self.bits, self.block

    def tokens(self, first: int | PerSequence, end: int | PerSequence) -> Coded:
        """Return the tokens from `first` to `end`; both must be multiples of `block`."""
        k, v, v_range = (_between(x, first, end) for x in (self.k, self.v, self.v_range))
        k_range = _between(self.k_range, first // self.block, end // self.block)
        return self._replace(k=k, v=v, k_range=k_range, v_range=v_range)


class CodedFloats(NamedTuple):
    """Hold keys and values that are written as floats of 8 bits (`float8_e4m3fn`), with one scale
    for the key and one for the value of each token and head. Sequences of different lengths have a
    `Ragged`, which holds a tensor per sequence, instead of each tensor."""

    k: Tensor  # [B G S D] uint8
    v: Tensor  # [B G S D] uint8
    scales: Tensor  # [B G S 2] fp16, of the key and of the value

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
    def kind(self) -> tuple[int, int, int]:
        """Return the three numbers of `Coded.kind`; 0 bits mark floats for the kernels."""
        return 1, 0, 1

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values as numbers of `dtype`, [B G S D] each."""
        of_key, of_value = self.scales.chunk(2, -1)
        return from_float8(self.k, of_key, dtype), from_float8(self.v, of_value, dtype)


Codes = Coded | CodedFloats | CodedLevels
LEVELS_AT_ONCE = 1 << 13  # tokens whose levels are decoded together for attention


def _between(x: Tensor, first: int | PerSequence, end: int | PerSequence) -> Tensor:
    return cast(Tensor, x.slice(first, end)) if isinstance(x, Ragged) else x[:, :, first:end]


@by_sequence
def coded_attention(
    q: Tensor, segments: Sequence[Segment | Codes], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to all tokens of `segments`, some of which are codes,
    under one softmax, and return its log-sum-exp too. q [B H 1 D] -> [B H 1 D], [B H] (fp32)"""
    pieces = [
        piece
        for segment in segments
        for piece in ([segment] if isinstance(segment, Segment) else _pieces(segment))
    ]
    return under_one_softmax(q, pieces, scale, _attended)


def under_one_softmax(
    q: Tensor,
    segments: Sequence[Segment | Codes],
    scale: float,
    attend: Callable[[Tensor, Codes, float], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attend to codes with `attend`, one after the other, and to all other segments at once, and
    merge what comes out. q [B H 1 D] -> [B H 1 D], log-sum-exp [B H]"""
    parts = [attend(q, codes, scale) for codes in segments if not isinstance(codes, Segment)]
    if plain := [segment for segment in segments if isinstance(segment, Segment)]:
        parts.append(ops.segment_attention_with_lse(q, plain, scale))
    return ops.merge_attention_with_lse(*zip(*parts, strict=True)) if parts[1:] else parts[0]


def _attended(q: Tensor, coded: Codes, scale: float) -> tuple[Tensor, Tensor]:
    decoded: tuple[Tensor, Tensor] = segment_attention_with_lse(
        q, [_decoded(coded, q.dtype)], scale
    )
    return decoded


def _pieces(coded: Codes) -> list[Codes]:
    """Cut codes of levels into pieces that are decoded one after the other, on a GPU too, where
    numbers in fp32 for a whole long prompt would take more memory than its codes save."""
    if not isinstance(coded, CodedLevels):
        return [coded]
    sides = zip(*(x.split(LEVELS_AT_ONCE, 2) for x in (coded.k, coded.v, coded.norms)), strict=True)
    return [coded._replace(k=k, v=v, norms=norms) for k, v, norms in sides]


def _decoded(coded: Codes, dtype: torch.dtype) -> Segment:
    """Return the keys and values of all tokens in `coded` as numbers of `dtype`."""
    if not isinstance(coded, Coded):
        return Segment(*coded.decoded(dtype))
    k_least, k_step = coded.k_range.unsqueeze(3).chunk(2, -1)
    k = dequantise(
        coded.k.unflatten(2, (-1, coded.block)), k_least, k_step, coded.bits, dtype
    ).flatten(2, 3)
    v_least, v_step = coded.v_range.chunk(2, -1)
    return Segment(k, dequantise(coded.v, v_least, v_step, coded.bits, dtype))


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
    if not isinstance(coded, Coded):
        k, v = (coded if rows is None else _picked(coded, rows)).decoded(dtype)
    elif blocks is None:
        k, v = _decoded(coded, dtype)[:2]
    else:
        k, v, v_range = (
            x if rows is None else gather_rows(x, rows) for x in (coded.k, coded.v, coded.v_range)
        )
        (k_least, k_step), (v_least, v_step) = (
            gather_rows(coded.k_range, blocks).chunk(2, -1),
            v_range.chunk(2, -1),
        )
        k = dequantise(k, k_least, k_step, coded.bits, dtype)
        v = dequantise(v, v_least, v_step, coded.bits, dtype)
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


def _picked(coded: CodedFloats | CodedLevels, rows: Tensor) -> CodedFloats | CodedLevels:
    """Return the codes of the tokens `rows` [B G K]."""
    tensors = {name: x for name, x in coded._asdict().items() if isinstance(x, Tensor)}
    return coded._replace(**{name: gather_rows(x, rows) for name, x in tensors.items()})
