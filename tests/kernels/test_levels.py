"""Levels of few bits: the best ones for random directions, packed densely, and right on average with a residual bit."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kernels.levels import best_levels, encode_levels
from kernels.reference import Segment
from kernels.rotated import rotate, rotate_back, rotation
from kernels.sink_logits import segment_attention_with_lse
from methods.tiers.codec import Encoded, rotated_integers, turboquant

GAUSSIAN = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # the least errors of a normal number (Max, 1960)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    x = drawn(2, 3, 400, dim)
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
    k, q = drawn(1, 1, 40, 64), drawn(64, seed=1)
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
    monkeypatch.setattr("kernels.coded.LEVELS_AT_ONCE", 10)
    k, v, q = drawn(2, 2, 24, 32), drawn(2, 2, 24, 32, seed=1), drawn(2, 4, 1, 32, seed=2)
    late = Segment(drawn(2, 2, 5, 32, seed=3), drawn(2, 2, 5, 32, seed=4))
    stored: Encoded = codec.encode(k, v)  # type: ignore[attr-defined]
    decoded = Segment(*codec.decode_whole(stored, torch.float32))  # type: ignore[attr-defined]
    found = segment_attention_with_lse(q, [codec.segment(stored, torch.float32), late], 0.2, None)  # type: ignore[attr-defined]
    for got, wanted in zip(found, segment_attention_with_lse(q, [decoded, late], 0.2, None), strict=True):
        assert_close(got, wanted, atol=1e-5, rtol=1e-5)
