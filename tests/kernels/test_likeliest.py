"""The most likely token: the first of equal ones, NaN above all numbers, and a row that is not finite is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import ops, reference
from kernels.dispatch import use_backend
from tests.kernels.guarded import guarded
from tests.kernels.op_cases import converted, device_of, random

pytest.importorskip("triton")


def logits() -> Iterator[tuple[str, Tensor]]:
    for width in (1, 5, 1024, 1025, 3333):
        yield f"{width}", random(width, 3, width)
    whole = random(1, 3, 2, 2500)
    yield "rows-apart", whole[:, 1]
    alike = whole[:, 0].clone()
    alike[:, [700, 701, 1900]] = 9
    alike[1] = 2
    yield "equal", alike
    zeros = -whole[:, 0].abs()
    zeros[:, 1023], zeros[:, 1024], zeros[1, 1], zeros[1, 1023] = 0.0, -0.0, -0.0, -1.0
    yield "both-zeros", zeros
    ends = torch.full((4, 2500), -torch.inf)
    ends[1, [40, 1300]] = torch.inf
    ends[2], ends[3, [1500, 2400]] = whole[0, 0], 7.0
    yield "infinite", ends
    unknown = whole[:, 0].clone()
    unknown[0, [30, 2000]], unknown[1, 2400], unknown[1, 5] = torch.nan, -torch.nan, torch.inf
    yield "nan", unknown


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy, which warns of infinities
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "given"), logits(), ids=[name for name, _ in logits()])
def test_likeliest_tokens_are_torchs(name: str, given: Tensor, dtype: torch.dtype) -> None:
    x = converted(given, dtype, device_of("triton"))
    out = converted(torch.full((2, 2 * len(given)), -1)[:, : len(given)], dtype, x.device)  # as whole numbers
    with use_backend("triton"):
        assert (reason := ops.likeliest_tokens.refusal("triton", x, out)) is None, reason
        with guarded((x, out), "triton"):
            assert ops.likeliest_tokens(x, out) is out
            made = ops.likeliest_tokens(x)
    assert torch.equal(made, out)
    assert made[0].tolist() == x.argmax(-1).tolist()
    assert made[1].tolist() == x.isfinite().all(-1).tolist()
    assert torch.equal(made, reference.likeliest_tokens(x))
