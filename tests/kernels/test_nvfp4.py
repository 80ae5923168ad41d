"""NVFP4 against its definition in plain loops, bit by bit: codes, scales of 16 channels, scales of tensors, numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.nvfp4 import CodedFloats4, encode_nvfp4
from kernels.quantise import refuse, unpack
from methods.tiers.codec import Nvfp4Codec
from tests.kernels.coded_cases import random

BLOCK, CHANNELS = 4, 32
# a magnitude by its bits: subnormal numbers are multiples of 2**-9, and S.1111.111 is no number
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
ONE = np.float32(1)


def nearest(x: Any, numbers: np.ndarray) -> int:
    """The bits of the number that is nearest to x; of two, the one with the even mantissa."""
    off = np.abs(numbers - float(x))
    best = [int(bits) for bits in np.flatnonzero(off == off.min())]
    return next((bits for bits in best if bits % 2 == 0), best[0])


def by_hand(tensor: np.ndarray) -> tuple[np.float32, list[int], list[int], list[np.float32]]:
    """The scale of a tensor [tokens channels], scales of 16 channels in e4m3, codes in e2m1, and what they stand for,
    as NVIDIA's Model Optimizer makes them: fp32, every step rounded."""
    whole = np.float32(np.abs(tensor).max()) / np.float32(6 * 448)
    scales, codes, numbers = [], [], []
    for part in tensor.reshape(-1, 16):
        largest = np.abs(part).max()
        wanted = largest / (np.float32(6) * whole) if largest else ONE
        scales.append(nearest(max(wanted, np.float32(2**-9)), E4M3))
        scale = np.float32(E4M3[scales[-1]]) * whole
        for x in part:
            bits = nearest(min(abs(x / scale), np.float32(6)), E2M1) if x else 0
            codes.append(bits + 8 * bool(x < 0))
            numbers.append(np.float32(E2M1[bits] * (-1 if x < 0 else 1)) * scale)
    return whole, scales, codes, numbers


def ties(x: Tensor) -> Tensor:
    """Numbers halfway between two, of both signs, under a scale that is exact."""
    halves = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return torch.cat([halves, -halves]).mul(448).repeat(x.numel() // 16).view_as(x)


def spread(x: Tensor) -> Tensor:
    """Groups of 16 whose scales are normal, subnormal, and below the least subnormal one."""
    return x * torch.logspace(3, -6, x.numel() // 16).repeat_interleave(16).view_as(x)


def one_large(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_copy(1, torch.tensor([15]), x[:, 15:16] * factor)  # the last of its 16 channels


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x, "bf16": lambda x: x.bfloat16().float(), "equal": lambda x: torch.full_like(x, -0.3),
    "a-group-of-zeros": lambda x: x * (torch.arange(x.shape[1]) >= 16),
    "signed-zeros": lambda x: torch.where(x > 0, x, -0.0), "ties": ties, "spread": spread, "one-of-30": one_large(30),
    "one-of-3000": one_large(3000), "huge": lambda x: x * 1e38, "tiny": lambda x: x * 1e-33,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_the_definition(case: str) -> None:
    k, v = (CASES[case](random(seed, 2 * BLOCK, CHANNELS)).clamp(-3e38, 3e38) for seed in (1, 2))
    written, bad = encode_nvfp4(k[None, None], v[None, None], BLOCK)
    back = by_token(written).decoded(torch.float32)
    refuse(bad)
    for side, (x, packed, decoded) in enumerate(((k, written.k, back[0]), (v, written.v, back[1]))):
        scales = written.scales.chunk(2, -1)[side][0, 0]
        for block in range(2):
            rows = slice(block * BLOCK, (block + 1) * BLOCK)
            whole, of_parts, codes, numbers = by_hand(x[rows].numpy())
            assert float(written.of_tensor[0, 0, block, side]) == float(whole)
            assert scales[rows].flatten().tolist() == of_parts
            assert unpack(packed[0, 0, rows], 4, torch.int32).flatten().tolist() == codes
            assert torch.equal(decoded[0, 0, rows].flatten(), torch.tensor(numbers))


def by_token(written: CodedFloats4) -> CodedFloats4:
    """The same with the scales of tensors at the place of every token."""
    return written._replace(of_tensor=written.of_tensor.repeat_interleave(BLOCK, 2))


def test_zeros_stay_zeros_and_what_is_not_finite_is_refused() -> None:
    x = torch.zeros(1, 1, 2 * BLOCK, CHANNELS)
    written, bad = encode_nvfp4(x, x, BLOCK)
    refuse(bad)
    assert written.of_tensor.abs().max() == 0
    assert torch.equal(by_token(written).decoded(torch.float32)[0], x)
    for wrong in (float("inf"), float("nan")):
        x[0, 0, 5, 3] = wrong
        assert encode_nvfp4(torch.zeros_like(x), x, BLOCK)[1].tolist() == [[[[False, False], [False, True]]]]
        with pytest.raises(ValueError, match="quantised"):
            Nvfp4Codec().encode(*[x.repeat(1, 1, 4, 1)] * 2)


def test_a_head_size_that_16_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head size of 72.*int4"):
        Nvfp4Codec().check(72)
