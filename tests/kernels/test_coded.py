"""Operations that read codes: how far they are off, the same bits in any company, and one softmax with other tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import coded, ops, reference, sink_logits
from kernels.coded import Coded
from kernels.dispatch import BackendError, use_backend
from kernels.reference import Segment
from tests.kernels.coded_cases import SHAPES, Shape, random
from tests.kernels.coded_cases import coded as written

LONG = {bits: Shape(bits, 1, 8, 2, 128, 4096, 32, 4) for bits in (2, 4, 8)}
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # of attention, as a share of its largest number
BITS = pytest.mark.parametrize("bits", LONG)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    """The compiled backend, or none of these tests."""
    with use_backend("cpu"):
        try:
            ops.coded_attention(random(1, 1, 8, 1, 128), written(LONG[8]), 0.1)
        except BackendError as error:
            pytest.skip(str(error))


def largest_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@BITS
@pytest.mark.parametrize("dtype", ERRORS, ids=lambda dtype: str(dtype)[6:])
def test_the_largest_error_of_attention(bits: int, dtype: torch.dtype) -> None:
    """Against the same codes in float64. In bf16 it is the rounding of what comes out; plain torch, which rounds keys,
    values and weights too, is off by more."""
    q, codes = random(3, 1, 8, 1, 128).to(dtype), written(LONG[bits])
    wanted, wanted_lse = coded.coded_attention(q.double(), codes, 0.1)
    with use_backend("cpu"):
        out, lse = ops.coded_attention(q, codes, 0.1)
    assert out.dtype == dtype
    assert largest_error(out, wanted) < ERRORS[dtype]
    assert largest_error(lse, wanted_lse) < 1e-6


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "int2-dim24"])
@pytest.mark.parametrize("dtype", ERRORS, ids=lambda dtype: str(dtype)[6:])
def test_decoded_rows_have_the_bits_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    """A code times a step is exact in fp32, so that nothing is rounded but the sum, and the result."""
    codes = written(SHAPES[name], spare=2)
    rows = torch.arange(codes.k.shape[2]).flip(0)[::3].expand(*codes.k.shape[:2], -1)
    with use_backend("cpu"):
        got = ops.decode_rows(codes, rows, rows // codes.block, dtype)
    wanted = coded.decode_rows(codes, rows, rows // codes.block, dtype)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@BITS
def test_a_sequence_gets_the_same_bits_alone_and_on_any_number_of_threads(bits: int) -> None:
    shape = LONG[bits]._replace(batch=2, tokens=2048)
    q, codes = random(3, 2, 8, 1, 128), written(shape)
    threads = torch.get_num_threads()
    second = Coded(*(x[1:] for x in codes[:4]), codes.bits, codes.block)
    with use_backend("cpu"):
        together, alone = ops.coded_attention(q, codes, 0.1), ops.coded_attention(q[1:], second, 0.1)
        try:
            torch.set_num_threads(1 + threads % 2)
            elsewhere = ops.coded_attention(q, codes, 0.1)
        finally:
            torch.set_num_threads(threads)
    for one, other, third in zip(together, alone, elsewhere, strict=True):
        assert torch.equal(one[1:], other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -2.0, 0.5, 3.0] * 2)], ids=["plain", "sinks"])
def test_codes_and_other_tokens_are_one_softmax(sinks: Tensor | None) -> None:
    shape = LONG[4]._replace(tokens=160)
    q, codes = random(3, 1, 8, 1, 128), written(shape)
    late = Segment(random(5, 1, 2, 7, 128), random(6, 1, 2, 7, 128))
    every = torch.arange(160).expand(1, 2, -1) // 32
    whole = Segment(*coded.decode_rows(codes, None, every, torch.float64))
    wide = Segment(*(torch.cat([x, y.double()], 2) for x, y in zip(whole[:2], late[:2], strict=True)))
    lse = reference.segment_attention_with_lse(q.double(), [wide], 0.1)[1]
    share = 1.0 if sinks is None else torch.sigmoid(lse - sinks).view(1, 8, 1, 1)
    wanted = reference.segment_attention(q.double(), [wide], 0.1) * share
    got = sink_logits.segment_attention(q, [codes, late], 0.1, sinks)
    assert largest_error(got, wanted) < ERRORS[torch.float32]
    alone = sink_logits.segment_attention(q, [codes], 0.1, sinks)
    assert largest_error(alone, wanted) > 1e-3
