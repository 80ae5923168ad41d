"""What one large channel of keys costs each codec, and the table of docs/kernels.md, made by tests/codec_errors.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from methods.tiers.codec import IntCodec
from methods.tiers.codecs import codec_of
from tests.codec_errors import CODECS, FACTORS, Errors, errors, one_large, table
from tests.kernels.coded_cases import random

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
SPREADING = ("nvfp4", "int4h", "tq4", "tq4q", "tq3")  # channels share a scale, or are mixed by a rotation


@cache
def measured(name: str, factor: int) -> Errors:
    return errors(codec_of(name), one_large(factor))


@pytest.mark.parametrize("name", CODECS)
def test_a_large_channel_costs_only_codecs_in_which_channels_share_a_scale(name: str) -> None:
    """4-bit codes have been reported to collapse on Qwen2.5, whose keys have such channels."""
    plain, *large = (measured(name, factor).logits for factor in FACTORS)
    if name in SPREADING:
        assert plain * 2 < large[0] < large[1]
    else:
        assert large == pytest.approx([plain, plain], rel=0.05)


def test_the_page_has_these_errors() -> None:
    lines = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines()]
    for found in table({})[2:]:
        (shown,) = (line for line in lines if line[:2] == found[:2])
        for cell, other in zip(found[2:], shown[2:], strict=False):
            pairs = zip(cell.split(", "), other.split(", "), strict=True)
            assert all(float(x) == pytest.approx(float(y), rel=0.05, abs=0.002) for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_with_the_largest_steps_stay_as_they_are(dtype: torch.dtype) -> None:
    """In each block those that vary most, not those that are large throughout; others are as without."""
    k, v = (random(seed, 1, 2, 64, 32).to(dtype) for seed in (1, 2))
    k[..., 4] += 20
    k[:, :, :32, 9], k[:, :, 32:, [11, 12]] = 20 * k[:, :, :32, 9], 30 * k[:, :, 32:, [11, 12]]
    plain, kept = (
        codec.decode_whole(codec.encode(k, v), dtype)
        for codec in (IntCodec(bits=4), IntCodec(bits=4, kept=2, value_bits=2))
    )
    exact = (kept[0] == k).all(2)  # [1 2 32]
    blocks = (kept[0] == k).unflatten(2, (2, 32)).all(3)
    assert blocks[:, :, 0, 9].all()
    assert blocks[:, :, 1, [11, 12]].all()
    assert blocks.sum(-1).tolist() == [[[2, 2]] * 2]
    assert not exact[..., 4].any()
    others = ~blocks.repeat_interleave(32, 2)
    assert torch.equal(kept[0][others], plain[0][others])
    assert float((kept[1] - v).float().std()) > 3 * float((plain[1] - v).float().std())
