"""Attention of a prompt against loops: within a window, with column sums, sink logits, by torch's own operation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import ops, reference, sdpa, sink_logits, windowed
from kernels.dispatch import use_backend
from kernels.reference import Segment
from kernels.windowed import windowed_attention
from tests.allocations import Allocations
from tests.kernels.op_cases import WINDOWS, random, stored


@pytest.mark.parametrize("name", WINDOWS)
def test_query_by_query(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed, "_QUERIES_AT_ONCE", 7)
    new, count, first, window = WINDOWS[name]
    q, k, v = random(1, 2, 6, new, 16), random(2, 2, 2, count, 16), random(3, 2, 2, count, 16)
    given = random(4, 2, 6, new)
    out, lse = windowed.windowed_attention(q, k, v, 0.3, first, window)
    sums = windowed.windowed_sums(q, k, given, 0.3, first, window)
    wanted = torch.zeros_like(sums)
    for head in range(6):
        for t in range(new):
            seen = [j for j in range(count) if 0 <= first + t - j < window]
            if not seen:
                assert lse[:, head, t].tolist() == [float("-inf")] * 2
                assert not out[:, head, t].any()
                continue
            logits = 0.3 * torch.einsum("bd,bsd->bs", q[:, head, t], k[:, head // 3, seen])
            assert_close(out[:, head, t], torch.einsum("bs,bsd->bd", logits.softmax(-1), v[:, head // 3, seen]))
            assert_close(lse[:, head, t], logits.logsumexp(-1))
            wanted[:, head, seen] += (logits - given[:, head, t, None]).exp()
    assert_close(sums, wanted)


SHAPES = [(1, 4, 4, 64, 33, 33), (2, 6, 2, 96, 51, 17), (1, 5, 1, 128, 40, 1), (1, 2, 2, 16, 1, 1)]


def _loop(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    (batch, heads, new, _), (groups, stored) = q.shape, k.shape[1:3]
    out, sums = torch.zeros_like(q, dtype=torch.float64), torch.zeros(batch, heads, stored, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // (heads // groups)].double(), v[b, h // (heads // groups)].double()
            for t in range(new):
                seen = stored - new + t + 1
                weights = ((keys[:seen] @ q[b, h, t].double()) * scale).softmax(0)
                sums[b, h, :seen] += weights
                out[b, h, t] = weights @ values[:seen]
    return out, sums


@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["blocks", "whole"])
@pytest.mark.parametrize("shape", SHAPES)
def test_column_sums_equal_a_loop(shape: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windowed, "_WEIGHTS_AT_ONCE", at_once)
    monkeypatch.setattr(windowed, "_LEAST_QUERIES", 7)
    batch, heads, groups, dim, stored, new = shape
    q = 3 * torch.randn(batch, new, heads, dim).transpose(1, 2)
    k, v = torch.randn(2, batch, groups, stored + 3, dim)[:, :, :, :stored]
    wanted_out, wanted_sums = _loop(q, k, v, 0.1)
    out, sums = ops.prefill_attention_with_column_sums(q, k, v, 0.1)
    assert_close(out.double(), wanted_out, atol=2e-5, rtol=0)
    assert_close(sums.double(), wanted_sums, atol=2e-5, rtol=0)
    assert_close(ops.column_sums(q, k, 0.1), sums)


@pytest.mark.bf16
def test_sums_are_single_precision_whatever_the_inputs() -> None:
    """The weights may be rounded as the product rounds them; in bfloat16 their sum would stand still at 256."""
    q, k = torch.randn(1, 2, 600, 32).bfloat16(), torch.randn(1, 1, 600, 32).bfloat16()
    sums = ops.column_sums(q, k, 0.05)
    assert sums.dtype == torch.float32
    assert_close(sums.sum(-1), torch.full((1, 2), 600.0), atol=0, rtol=5e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_beyond_what_16_bits_hold(dtype: torch.dtype) -> None:
    """Qwen2's keys have biases that large. They shift all logits of a query alike, by up to 180,000."""
    (q, k, v), scale = (random(seed, 1, heads, 90, 32) for seed, heads in ((1, 4), (2, 2), (3, 2))), 0.2
    q[..., :2], k[..., :2] = 3, 30_000
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out, sums = _loop(q, k, v, scale)
    last, step, near = q[:, :, -1:], [Segment(k[:, :, :40], v[:, :, :40]), Segment(k[:, :, 40:], v[:, :, 40:])], 2e-2
    lse = (last.double().view(1, 2, 2, -1) @ k.double().mT * scale).logsumexp(-1).view(1, 4)
    whole = windowed_attention(q.double(), k.double(), v.double(), scale, 0, 90)[1]
    for backend in ("torch", "sdpa", "cpu"):
        for op, args, *wanted in (
            (ops.prefill_attention, (q, k, v, scale), out),
            (ops.prefill_attention, (q[:, :, 50:], k, v, scale), out[:, :, 50:]),
            (ops.prefill_attention_with_column_sums, (q, k, v, scale), out, sums),
            (ops.column_sums, (q, k, scale), sums),
            (ops.windowed_attention, (q, k, v, scale, 0, 90), out, whole),
            (ops.windowed_sums, (q, k, whole, scale, 0, 90), sums),
            (ops.segment_attention, (last, step, scale), out[:, :, -1:]),
            (ops.segment_attention_with_lse, (last, step, scale), out[:, :, -1:], lse),
        ):
            if backend not in op.targets or op.refusal(backend, *args):
                continue
            with use_backend(backend):
                got = op(*args)
            for one, right in zip([got] if isinstance(got, Tensor) else got, wanted, strict=True):
                assert_close(one.double(), right.double(), atol=near, rtol=near, msg=f"{op.name} {backend}")


NEW, STORED = 700, 6000


def chunk(heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return random(1, 1, heads, NEW, 16), stored(2, 1, heads // 2, STORED, 16), stored(3, 1, heads // 2, STORED, 16)


def test_a_chunk_of_several_blocks_builds_no_mask() -> None:
    args = chunk()
    with torch.inference_mode(), Allocations() as counted:
        got = sdpa.prefill_attention(*args, 0.25)
    assert_close(got, reference.prefill_attention(*args, 0.25), atol=1e-5, rtol=1e-4)
    assert counted.peak < NEW * STORED  # bytes of the whole mask


def test_a_window_takes_bounded_memory() -> None:
    """Many heads and keys make the blocks of queries shorter."""
    args = chunk(heads=8)
    with torch.inference_mode(), Allocations() as counted:
        got, _ = windowed_attention(*args, 0.25, STORED - NEW, STORED)
    assert_close(got, reference.prefill_attention(*args, 0.25), atol=1e-5, rtol=1e-4)
    assert counted.peak < 3 * 256 * 8 * STORED * 4  # bytes of three blocks of weights of 256 queries


SINKS = torch.tensor([-3.0, 0.0, 2.5, 40.0])  # the last takes nearly all
GROUPS, GROUP = 2, 2
backends = pytest.mark.parametrize("backend", ["torch", "cpu"])


def by_definition(q: Tensor, k: Tensor, scale: float, window: int) -> Tensor:
    """Return the weights [B H T S] of a softmax over tokens and sink, without the sink's."""
    k = k.repeat_interleave(GROUP, 1)
    new, stored = q.shape[2], k.shape[2]
    behind = torch.arange(stored - new, stored).unsqueeze(1) - torch.arange(stored)
    logits = (q @ k.mT * scale).masked_fill((behind < 0) | (behind >= window), float("-inf"))
    sinks = SINKS.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]


@backends
@pytest.mark.parametrize("new", [1, 5, 40])
@pytest.mark.parametrize("window", [3, 40])
def test_prompts(backend: str, new: int, window: int) -> None:
    q, k, v = random(1, 2, 4, new, 16), random(2, 2, 2, 40, 16), random(3, 2, 2, 40, 16)
    weights = by_definition(q, k, 0.3, window)
    wanted = weights @ v.repeat_interleave(GROUP, 1)
    with use_backend(backend):
        assert_close(sink_logits.windowed_attention(q, k, v, 0.3, window, SINKS), wanted)
        if window == 40:
            assert_close(sink_logits.causal_attention(q, k, v, 0.3, SINKS), wanted)
            assert_close(sink_logits.column_sums(q, k, 0.3, SINKS), weights.sum(2))


@backends
def test_a_step_over_segments(backend: str) -> None:
    q, k, v = random(1, 2, 4, 1, 16), random(2, 2, 2, 30, 16), random(3, 2, 2, 30, 16)
    rows = torch.arange(5, 20).expand(2, 2, -1)
    segments = [Segment(k[:, :, :5], v[:, :, :5]), Segment(k, v, rows=rows), Segment(k[:, :, 20:], v[:, :, 20:])]
    with use_backend(backend):
        wanted = by_definition(q, k, 0.3, 30) @ v.repeat_interleave(GROUP, 1)
        assert_close(sink_logits.segment_attention(q, segments, 0.3, SINKS), wanted)
