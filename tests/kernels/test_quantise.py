"""Codes of few bits and floats of 8 bits: what they span, how far they are off, how many bytes they take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import coded, ops, reference, sink_logits
from kernels.dispatch import use_backend
from kernels.levels import best_levels, encode_levels
from kernels.quantise import (
    dequantise,
    encode_codes,
    from_float8,
    pack,
    quantise,
    refuse,
    rounded_down,
    to_float8,
    unpack,
)
from kernels.reference import Segment
from kernels.rotated import rotate, rotate_back, rotation
from kernels.sink_logits import segment_attention_with_lse
from methods.tiers.codec import Encoded, rotated_integers, turboquant
from tests.kernels.coded_cases import Shape, random
from tests.kernels.coded_cases import coded as written

BITS = pytest.mark.parametrize("bits", [2, 4, 8])


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spread", "offset"), [(1.0, 0.0), (20.0, 300.0), (1e-3, -7.0), (0.0, 0.1)])
def test_no_number_is_off_by_more_than_half_a_step(bits: int, dtype: torch.dtype, spread: float, offset: float) -> None:
    x = (random(0, 3, 5, 64) * spread + offset).to(dtype)
    codes, least, step, _ = quantise(x.unflatten(-1, (2, 32)), bits)
    back = dequantise(pack(codes.flatten(-2), bits), least, step, bits, torch.float32)
    error = (back - x.float()).unflatten(-1, (2, 32)).abs().amax(-1)
    assert bool((error <= step.float() * 0.501 + 1e-6 * abs(offset)).all())
    exact = (x.float().unflatten(-1, (2, 32)).amax(-1) - least.float()) / (2**bits - 1)
    assert bool((step.float() <= exact * 1.001 + 6e-8).all())  # no wider than the group asks for


@BITS
def test_packed_codes_take_their_bits(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 7, 32), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = pack(codes, bits)
    assert (packed.dtype, packed.nbytes) == (torch.uint8, codes.numel() * bits // 8)
    assert torch.equal(unpack(packed, bits, torch.float32), codes.float())


def test_a_bound_is_rounded_down_to_the_next_fp16() -> None:
    x = torch.cat([random(2, 1000) * 1000, torch.tensor([0.0, -1e-9, 1e-9])])
    low = rounded_down(x)
    assert bool((low.float() <= x).all())
    assert bool((-rounded_down(-x)).float().ge(x).all())
    assert torch.equal(rounded_down(low.float()), low)
    nearest = x.half()
    assert bool(((low == nearest) | (nearest.float() > x)).all())


def test_no_number_is_off_by_more_than_a_sixteenth_of_itself() -> None:
    x = random(1, 50, 128) * torch.logspace(-6, 4, 50).unsqueeze(1)
    codes, scale, _ = to_float8(x)
    error, most = (from_float8(codes, scale, torch.float64) - x).abs(), x.abs().amax(-1, keepdim=True)
    assert (codes.dtype, scale.dtype) == (torch.uint8, torch.float16)
    normal = scale > 6.2e-5  # below, the scale itself has fewer bits
    assert bool(((error <= x.abs() / 16 + most / 2**18) | ~normal).all())
    assert float((error / most).max()) > 1 / 64
    assert torch.equal(from_float8(*to_float8(torch.zeros(2, 8))[:2], torch.float32), torch.zeros(2, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_what_fp16_cannot_hold_is_refused(bad: float) -> None:
    x = torch.zeros(4, 32)
    x[2, 3] = bad
    for *_, unfit in (quantise(x, 4), to_float8(x), encode_codes(*[x.view(1, 1, 4, 32)] * 2, 4, 4, 2)):
        refuse(torch.zeros_like(unfit))
        with pytest.raises(ValueError, match="quantised"):
            refuse(torch.zeros_like(unfit), unfit)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_codes_is_as_exact_as_plain_torch(dtype: torch.dtype) -> None:
    """As in test_gpu.py, against plain torch in fp32, on inputs of a length that the interpreter takes."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here: test_gpu.py compares them")
    codes, q = written(Shape(4, 1, 4, 1, 128, 1024, 32, 4)), 3 * random(21, 1, 4, 1, 128).to(dtype)
    results = []
    for backend, query in (("torch", q.float()), ("torch", q), ("triton", q)):
        with use_backend(backend):
            results.append(ops.coded_attention(query, [codes], 0.09))
    for exact, plain, kernel in zip(*results, strict=True):
        limit = max(2 * torch.finfo(kernel.dtype).eps, 5e-5) * exact.abs().max()
        errors = [(one.double() - exact).abs().max() for one in (kernel, plain)]
        assert errors[0] <= min(limit, errors[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy
@pytest.mark.parametrize(("bits", "value_bits"), [(2, 2), (4, 4), (8, 8), (4, 2), (2, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_interpreted_kernels_write_the_same_bits(bits: int, value_bits: int, dtype: torch.dtype) -> None:
    """Numbers of all sizes, groups of one number, the limits of fp16, and blocks that cannot be encoded."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here: test_ops.py compares them")
    shape = 2, 2, 96, 64
    k, v = (random(i, *shape) * 2.0 ** random(i + 2, *shape).mul(3).round().clamp(-9, 9) for i in (1, 2))
    for x in (k, v):
        x[0, 0, :32], x[0, 1, :16], x[0, 1, 16:32] = 0.1, 60000.0, -60000.0
        x[0, 1, 32:64] *= 1e-8
        x[1, 0, 40, 3], x[1, 1, 5, 7] = float("nan"), -float("inf")
    k, v = k.to(dtype), v.to(dtype)
    with use_backend("triton"):
        *written, bad = ops.encode_codes(k, v, bits, value_bits, 32)
    *wanted, unfit = encode_codes(k, v, bits, value_bits, 32)
    assert torch.equal(bad, unfit)
    assert unfit.sum() == 2
    for one, other in zip(written, wanted, strict=True):
        blocks = (x.unflatten(2, (3, -1))[~unfit.bool()] for x in (one, other))
        assert torch.equal(*blocks)


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -2.0, 0.5, 3.0] * 2)], ids=["plain", "sinks"])
def test_codes_and_other_tokens_are_one_softmax(sinks: Tensor | None) -> None:
    q, codes = random(3, 1, 8, 1, 128), written(Shape(4, 1, 8, 2, 128, 160, 32, 4))
    late = Segment(random(5, 1, 2, 7, 128), random(6, 1, 2, 7, 128))
    every = torch.arange(160).expand(1, 2, -1) // 32
    whole = Segment(*coded.decode_rows(codes, None, every, torch.float64))
    wide = Segment(*(torch.cat([x, y.double()], 2) for x, y in zip(whole[:2], late[:2], strict=True)))
    lse = reference.segment_attention_with_lse(q.double(), [wide], 0.1)[1]
    share = 1.0 if sinks is None else torch.sigmoid(lse - sinks).view(1, 8, 1, 1)
    wanted = reference.segment_attention(q.double(), [wide], 0.1) * share
    assert_close(sink_logits.segment_attention(q, [codes, late], 0.1, sinks).double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_query_that_is_no_number_spoils_its_head_alone(backend: str) -> None:
    q, (codes, _) = random(3, 1, 18, 1, 64).bfloat16(), encode_levels(*random(1, 2, 1, 1, 70, 64), 4, None)
    q[0, 2, 0, 5] = float("nan")
    with use_backend(backend):
        out, _ = ops.coded_attention(q, [codes], 0.1)
    assert out.isfinite().all(-1).flatten().tolist() == [head != 2 for head in range(18)]


# Levels of few bits: the best ones for random directions, packed densely, and right on average with a residual bit.

GAUSSIAN = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # the least errors of a normal number (Max, 1960)


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_levels_are_the_best_known(bits: int) -> None:
    """In many channels a coordinate times sqrt(n) is a normal number: its error is integrated over the density."""
    levels = torch.tensor(best_levels(1 << 12, bits), dtype=torch.float64) * 64
    x = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    errors = (x - levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]) ** 2
    error = torch.trapezoid(errors * torch.exp(-(x**2) / 2), x) / (2 * torch.pi) ** 0.5
    assert float(error) == pytest.approx(GAUSSIAN[bits], rel=1e-3)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_large_channel_does_not_raise_the_error(dim: int, bits: int) -> None:
    """It is no larger than that of normal numbers. Bytes are dense, those of 3 bits too."""
    x = random(0, 2, 3, 400, dim)
    x[..., 3] += 10
    codec = turboquant(bits)
    stored = codec.encode(x, x)
    for back in codec.decode(stored, torch.float32):
        error = ((back - x).norm(dim=-1) / x.norm(dim=-1)).square().mean()
        assert 0.75 * GAUSSIAN[bits] < float(error) < 1.02 * GAUSSIAN[bits]
    sizes = [part.shape[3] * part.element_size() for part in stored.tokens]
    assert sizes == [dim * bits // 8, dim * bits // 8, 4]
    assert sum(sizes) == codec.layout(dim, torch.bfloat16).token_bytes


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_residual_bit_makes_products_right_on_average(bits: int) -> None:
    """Over many matrices the mean product with a query is the exact one; without the bit it is too small."""
    k, q = random(0, 1, 1, 40, 64), random(1, 64)
    k += 0.2 * q  # products that are not zero on average
    exact, products = k @ q, []
    for seed in range(400):
        written, _ = encode_levels(k, k, bits, seed)
        products.append(written.decoded(torch.float32)[0] @ q)
    every = torch.stack(products)
    spread = every.std(0) / 400**0.5
    assert float(((every.mean(0) - exact) / spread).abs().max()) < 4.5
    assert float((every.mean(0) - exact).mean() / exact.mean()) == pytest.approx(0, abs=0.01)
    plain = encode_levels(k, k, bits, None)[0].decoded(torch.float32)[0] @ q
    assert float((plain * exact).sum() / (exact**2).sum()) < 1 - GAUSSIAN[bits] / 2
    assert written.k.shape == written.v.shape


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_a_rotation_can_be_undone_and_spreads_what_is_large(dim: int) -> None:
    matrix = rotation(dim, 1, torch.device("cpu"))
    assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-5, rtol=0)
    assert not torch.equal(matrix, rotation(dim, 2, torch.device("cpu")))
    x = torch.zeros(dim)
    x[3] = 1
    assert float(rotate(x, 1).abs().max()) < 4.5 / dim**0.5
    assert_close(rotate_back(rotate(x, 1), 1, torch.float32), x, atol=1e-6, rtol=0)


@pytest.mark.parametrize("codec", [turboquant(3), rotated_integers(4, 8)], ids=str)
def test_a_rotated_query_reads_what_decoded_tokens_say(codec: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the tokens are decoded in pieces."""
    monkeypatch.setattr("kernels.coded.DECODED_AT_ONCE", 10)
    k, v, q = random(0, 2, 2, 24, 32), random(1, 2, 2, 24, 32), random(2, 2, 4, 1, 32)
    late = Segment(random(3, 2, 2, 5, 32), random(4, 2, 2, 5, 32))
    stored: Encoded = codec.encode(k, v)  # type: ignore[attr-defined]
    decoded = Segment(*codec.decode_whole(stored, torch.float32))  # type: ignore[attr-defined]
    found = segment_attention_with_lse(q, [codec.segment(stored, torch.float32), late], 0.2, None)  # type: ignore[attr-defined]
    for got, wanted in zip(found, segment_attention_with_lse(q, [decoded, late], 0.2, None), strict=True):
        assert_close(got, wanted, atol=1e-5, rtol=1e-5)
