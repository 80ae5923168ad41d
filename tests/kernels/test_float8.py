"""Floats of 8 bits with a scale for each token: how far they are off, and the same of several sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from kernels import ops
from kernels.coded import CodedFloats
from kernels.dispatch import use_backend
from kernels.quantise import from_float8, to_float8
from kernels.ragged import Ragged
from tests.kernels.coded_cases import floats, random


def test_no_number_is_off_by_more_than_a_sixteenth_of_itself() -> None:
    x = random(1, 50, 128) * torch.logspace(-6, 4, 50).unsqueeze(1)
    codes, scale = to_float8(x)
    error, most = (from_float8(codes, scale, torch.float64) - x).abs(), x.abs().amax(-1, keepdim=True)
    assert (codes.dtype, scale.dtype) == (torch.uint8, torch.float16)
    normal = scale > 6.2e-5  # below, the scale itself has fewer bits
    assert bool(((error <= x.abs() / 16 + most / 2**18) | ~normal).all())
    assert float((error / most).max()) > 1 / 64
    assert torch.equal(from_float8(*to_float8(torch.zeros(2, 8)), torch.float32), torch.zeros(2, 8))


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 1e9])
def test_what_no_scale_can_say_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="cannot be quantised"):
        to_float8(torch.tensor([[1.0, wrong]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_code_decodes_the_bits_of_plain_torch(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F].view(1, 1, 2, 127)  # all but those that are no numbers
    codes, rows = CodedFloats(every, every.flip(-1), random(1, 1, 1, 2, 2).half()), torch.tensor([[[1, 0, 1]]])
    for chosen, count in ((rows, rows), (None, rows[..., :2])):
        with use_backend("cpu"):
            if reason := ops.decode_rows.refusal("cpu", codes, chosen, count, dtype):
                pytest.skip(reason)
            compiled = ops.decode_rows(codes, chosen, count, dtype)
        with use_backend("torch"):
            for one, other in zip(compiled, ops.decode_rows(codes, chosen, count, dtype), strict=True):
                assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy, and masked lanes warn too
def test_one_call_for_all_equals_one_for_each() -> None:
    pytest.importorskip("triton")
    on = "cuda" if torch.cuda.is_available() else "cpu"
    members = [CodedFloats(*(x.to(on) for x in floats((1, 2, tokens, 96)))) for tokens in (90, 1, 40)]
    joined: Any = CodedFloats(*(Ragged(parts) for parts in zip(*members, strict=True)))  # type: ignore[arg-type]
    q, rows = random(3, 3, 6, 1, 96).to(on), torch.zeros(3, 2, 5, dtype=torch.int64, device=on)
    with use_backend("triton"):
        out, lse = ops.coded_attention(q, joined, 0.1)
        k, v = ops.decode_rows(joined, rows, rows, torch.float32)
    with use_backend("torch"):
        for i, member in enumerate(members):
            assert_close((out[i : i + 1], lse[i : i + 1]), ops.coded_attention(q[i : i + 1], member, 0.1))
            wanted = ops.decode_rows(member, rows[:1], rows[:1], torch.float32)
            assert torch.equal(k[i : i + 1], wanted[0])
            assert torch.equal(v[i : i + 1], wanted[1])
