"""What only a GPU can show: which backend is chosen, long inputs, no waiting for the host, capture in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.block import DecoderBlock, Head, Linear
from kernels.dispatch import use_backend
from kernels.reference import Segment
from tests.kernels import coded_cases
from tests.kernels.op_cases import draw, pick, random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
LONG = 131_072
Call = Callable[[Tensor], Any]
Made = Callable[..., Tensor]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def maker(dtype: torch.dtype, wide: bool = False) -> Made:
    """Random tensors by seed and shape. `wide`: the same values, rounded to `dtype`, in fp32."""

    def made(seed: int, *shape: int) -> Tensor:
        rounded = random(seed, *shape).to("cuda", dtype)
        return rounded.float() if wide else rounded

    return made


def decode_steps(count: int, dtype: torch.dtype, wide: bool = False) -> Iterator[tuple[str, Call]]:
    """Operations of a decode step over `count` tokens, 8 KV heads of 128, as functions of a query [1 32 1 128]."""
    made = maker(dtype, wide)
    k, v = made(1, 1, 8, count + 40, 128)[:, :, 40:], made(2, 1, 8, count + 40, 128)[:, :, 40:]
    rows = pick(3, 1, 8, count, 2048).to("cuda")
    segments = [Segment(k[:, :, :32], v[:, :, :32]), Segment(k, v, rows), Segment(k[:, :, -65:], v[:, :, -65:])]
    by_channel, channels = k.transpose(2, 3).contiguous(), pick(4, 1, 8, 128, 16).to("cuda")
    centroids = made(5, 1, 8, 2, 64, 64)
    codes = torch.randint(64, (1, 8, count, 2), generator=draw(6)).to("cuda", torch.uint8)
    u, basis = made(7, 1, count, 160), made(8, 1, 8, 160, 128)
    angles = random(9, count, 64).repeat(1, 2).to("cuda")
    places = pick(10, 1, 8, 64, 4).to("cuda")

    def grouped(q: Tensor) -> Tensor:
        return q.view(1, 8, 4, 128)

    def best(scores: Tensor) -> Tensor:
        return scores.gather(-1, ops.top_k(scores, 300)).sort(-1).values

    def put(values: Tensor) -> Tensor:
        held = torch.zeros_like(k[:, :, :64])
        ops.put_rows(held, places, values)
        return held

    yield "all tokens", lambda q: ops.segment_attention(q, [Segment(k, v)], 0.09)
    yield "chosen tokens", lambda q: ops.segment_attention_with_lse(q, segments, 0.09)
    yield "rows", lambda q: ops.row_scores(grouped(q), k)
    yield "channel sums", lambda q: ops.channel_sums(grouped(q)[..., :16], by_channel, channels)
    yield "weights", lambda q: ops.group_weights(ops.row_scores(grouped(q), k), 0.09, "sum")
    yield "codes", lambda q: ops.pq_weights(q, centroids, codes, 0.09)
    yield "keys", lambda _: ops.rebuild_keys(u, basis, rows, 1, angles.cos(), angles.sin())
    yield "margins", lambda q: ops.group_margins(ops.row_scores(grouped(q), k), None, count - 9, 5.0, count)[0]
    yield "best", lambda q: best(ops.row_scores(grouped(q), k))
    yield "gathered rows", lambda _: ops.gather_rows(k, rows)
    yield "gathered codes", lambda _: ops.gather_rows(codes, rows).float()
    yield "put rows", lambda q: put(grouped(q))
    written = coded_cases.coded(coded_cases.Shape(4, 1, 32, 8, 128, count // 32 * 32, 32, 4))
    written = written._replace(**{name: getattr(written, name).to("cuda") for name in written._fields[:4]})
    chosen = rows % (count // 32 * 32)
    yield "attention over codes", lambda q: ops.coded_attention(q, [written], 0.09)
    yield "decoded rows", lambda q: ops.decode_rows(written, chosen, chosen // 32, q.dtype)
    yield from block_steps(made)


def block_steps(made: Made) -> Iterator[tuple[str, Call]]:
    """A decoder block around its attention and the head, as functions of a token of 32 * 128 channels.

    8 query and 2 KV heads of 128; every size is a power of four, so that scaled weights are exact in any dtype.
    """

    def linear(seed: int, rows: int, columns: int) -> Linear:
        return Linear(made(seed, rows, columns) * columns**-0.5)

    q, k, v = linear(11, 1024, 4096), linear(12, 256, 4096), linear(13, 256, 4096)
    norms = made(14, 4096), made(15, 128), made(16, 128), made(17, 4096)
    block = DecoderBlock(
        128, 1e-5, norms[0], q, k, v, *norms[1:3], linear(18, 4096, 1024), norms[3], linear(19, 1024, 4096),
        linear(20, 1024, 4096), linear(21, 4096, 1024),
    )  # fmt: skip
    cos, sin = made(22, 1, 1, 128), made(23, 1, 1, 128)

    def token(q: Tensor) -> Tensor:
        return q.view(1, 1, 4096)

    yield "attention inputs", lambda q: ops.attention_inputs(token(q), block, cos, sin)
    yield "block output", lambda q: ops.block_output(token(q), q[:, :8], block)
    yield "logits", lambda q: ops.token_logits(token(q), Head(1e-5, block.norm, block.gate))


def query(seed: int, dtype: torch.dtype) -> Tensor:
    return 3 * random(seed, 1, 32, 1, 128).to("cuda", dtype)


def parts(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_triton_is_chosen_without_being_asked_for(dtype: torch.dtype) -> None:
    ops.forget_used()
    for _, step in decode_steps(3000, dtype):
        step(query(20, dtype))
    assert set(map(tuple, ops.used_backends().values())) == {("triton",)}


def test_long_inputs(dtype: torch.dtype) -> None:
    """Against plain torch in fp32, from the same rounded inputs."""
    q = query(21, dtype)
    for (name, step), (_, twin) in zip(decode_steps(LONG, dtype), decode_steps(LONG, dtype, wide=True), strict=True):
        with use_backend("torch"):
            wanted = parts(twin(q.float()))
        for one, other in zip(parts(step(q)), wanted, strict=True):
            limit = max(2 * torch.finfo(one.dtype).eps, 5e-5) * other.abs().max().item()
            error = (one.double() - other.double()).abs().max().item()
            assert error <= limit, f"{name}: {error:.3g}"


def test_long_prompts_by_torchs_kernels_equal_tritons(dtype: torch.dtype) -> None:
    """By cuDNN, whole and in chunks, where it takes them; others and windows by FlashAttention."""
    made = maker(dtype)
    for new, count in ((4096, 4096), (4096, 11264), (1000, 5000)):
        q, k, v = made(1, 1, 32, new, 128), made(2, 1, 8, count, 128), made(3, 1, 8, count, 128)
        got = []
        for backend in ("fused", "triton"):
            with use_backend(backend):
                whole = ops.prefill_attention(q, k, v, 0.1)
                got.append((whole, *ops.windowed_attention(q, k, v, 0.1, count - new, 700)))
        torch.testing.assert_close(*got, atol=2e-2, rtol=2e-2)


def test_no_decode_operation_waits_for_the_host(dtype: torch.dtype) -> None:
    steps, q = list(decode_steps(5000, dtype)), query(22, dtype)
    for _, step in steps:
        step(q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _, step in steps:
            step(q)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_replays_with_another_query(dtype: torch.dtype) -> None:
    q, other = query(23, dtype), query(24, dtype)
    for name, step in decode_steps(5000, dtype):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(q)
        torch.cuda.current_stream().wait_stream(side)
        held, graph = q.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = parts(step(held))
        held.copy_(other)
        graph.replay()
        for one, wanted in zip(captured, parts(step(other)), strict=True):
            assert torch.equal(one, wanted), name
