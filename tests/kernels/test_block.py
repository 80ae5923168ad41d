from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import block as reference
from kernels import ops
from kernels.block import TOKENS_AT_ONCE, DecoderBlock, Head, Linear
from kernels.dispatch import REFERENCE, use_backend
from kernels.ragged import Ragged
from tests.kernels.guarded import guarded
from tests.kernels.op_cases import converted
from tests.quick import every, mostly_slow, slow_if

HAS_GPU = torch.cuda.is_available()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# channels, heads, KV heads, head size, MLP channels, bias, norm of heads, channels that turn, sequences, tokens
SHAPES = {
    "smollm": (576, 9, 3, 64, 1536, False, False, 64, 1, 1),
    "odd": (50, 3, 1, 10, 37, True, False, 10, 2, 1),
    "qwen3": (128, 8, 2, 16, 160, True, True, 16, 3, 1),
    "partial-rotary": (96, 4, 4, 24, 100, False, False, 12, 8, 1),
    "wide-heads": (70, 5, 1, 256, 64, False, True, 256, 3, 1),
    "many-sequences": (96, 4, 2, 24, 100, True, False, 24, 37, 1),
    "gqa8-dim128-prompt": (64, 8, 1, 128, 96, False, False, 128, 2, 19),
    "dim96-prompt": (70, 4, 4, 96, 130, True, True, 72, 1, 17),
    "smollm-prompt": (576, 9, 3, 64, 1536, False, False, 64, 1, 37),
    "qwen3-prompt": (128, 8, 2, 16, 160, True, True, 16, 3, 5),
    "glm": (128, 8, 2, 16, 160, True, False, 8, 2, 1),
    "glm-prompt": (128, 8, 2, 16, 160, True, True, 8, 3, 5),
    "long-qwen3-prompt": (128, 8, 2, 16, 160, True, True, 16, 3, 155),
    "long-wide-prompt": (64, 2, 1, 32, 2080, True, True, 20, 2, 301),
    "long-odd-prompt": (50, 3, 1, 10, 37, True, False, 4, 2, 2200),
}
INTERPRETED = [shape for shape in SHAPES if not shape.startswith("long")]  # an interpreter is slow
SIMILAR = ("smollm-prompt", "qwen3-prompt")  # to its decode step, and to dim96-prompt


def drawn(shape: str, dtype: torch.dtype) -> tuple[DecoderBlock, Tensor, Tensor, Tensor]:
    """block, x [B T E], cos and sin [1|B T R]"""
    channels, heads, kv_heads, dim, inner, bias, normed, turned, batch, tokens = SHAPES[shape]
    draw = torch.Generator().manual_seed(3)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(dtype)

    def linear(rows: int, columns: int) -> Linear:
        return Linear(random(rows, columns) * columns**-0.5, random(rows) if bias else None)

    q, k, v = (linear(count * dim, channels) for count in (heads, kv_heads, kv_heads))
    norms = [random(dim) if normed else None for _ in range(2)]
    block = DecoderBlock(
        dim, 1e-5, random(channels), q, k, v, *norms, linear(channels, heads * dim), random(channels),
        linear(inner, channels), linear(inner, channels), linear(channels, inner),
    )  # fmt: skip
    angles = torch.rand(batch if batch < 4 else 1, tokens, turned // 2, generator=draw) * 6
    both = torch.cat([angles, angles], -1)
    if shape.startswith("glm"):
        block = replace(block, neighbours=True)
    return block, random(batch, tokens, channels), both.cos().to(dtype), both.sin().to(dtype)


def drawn_in_slices(shape: str, dtype: torch.dtype) -> tuple[DecoderBlock, Tensor, Tensor, Tensor]:
    """The same with q, k and v slices of one matrix, and gate and up of another: Phi-3."""
    block, *inputs = drawn(shape, dtype)
    (q, k, v), (gate, up) = slices(block.q, block.k, block.v), slices(block.gate, block.up)
    return replace(block, q=q, k=k, v=v, gate=gate, up=up), *inputs


def slices(*parts: Linear) -> list[Linear]:
    sizes = [len(part.weight) for part in parts]
    weights = torch.cat([part.weight for part in parts]).split(sizes)
    biases = [part.bias for part in parts if part.bias is not None]
    joined = torch.cat(biases).split(sizes) if biases else [None] * len(sizes)
    return [Linear(*pair) for pair in zip(weights, joined, strict=True)]


def results(backend: str, block: DecoderBlock, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Of all three operations, each from the reference's inputs, between guards; skips where the backend refuses."""
    x, cos, sin = converted((x, cos, sin), x.dtype, x.device)
    head = Head(1e-5, block.norm, Linear(block.up.weight, block.up.bias))
    q = reference.attention_inputs(x, block, cos, sin)[1]
    with use_backend(backend):
        if reason := ops.attention_inputs.refusal(backend, x, block, cos, sin):
            pytest.skip(reason)
        with guarded((x, cos, sin), backend):
            made = ops.attention_inputs(x, block, cos, sin)
            apart = ops.block_output_apart(x, q, block)  # plain torch's, where a backend has none
            return [*made, ops.block_output(x, q, block), ops.token_logits(x[:, -1:], head), *apart]


def close(ours: Tensor, theirs: Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[theirs.dtype]
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_block_equals_plain_torch(shape: str, dtype: str) -> None:
    inputs = drawn(shape, DTYPES[dtype])
    for ours, theirs in zip(results("cpu", *inputs), results(REFERENCE, *inputs), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, "bf16"))
@pytest.mark.parametrize("shape", slow_if(SIMILAR.__contains__, INTERPRETED))
def test_triton_block_equals_plain_torch(shape: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(shape, DTYPES[dtype])
    wanted = list(results(REFERENCE, *inputs))
    for device in TOKENS_AT_ONCE:
        monkeypatch.setitem(TOKENS_AT_ONCE, device, 16)
    for ours, theirs in zip(results("triton", *inputs), wanted, strict=True):
        close(ours, theirs)


LAYOUTS = ("one-tensor", "tables", "tables-of-heads")
WRITTEN = [*product(("odd", "glm", "smollm", "qwen3", "partial-rotary", "wide-heads"), LAYOUTS, (False, True))]


@pytest.mark.parametrize(
    "case",
    [*WRITTEN[:6], *every(5, WRITTEN[6:])],  # every layout of one shape, and every shape
    ids=str,
)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="kernels are compiled here, not interpreted")),
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device on this machine")]
        ),
    ],
)
def test_keys_and_values_are_written_where_they_are_made(case: tuple[str, str, bool], device: str) -> None:
    """To rows with others between them; of several sequences, or heads with memory of their own, to another row in
    each. All others stay as they are."""
    pytest.importorskip("triton")
    shape, layout, sliced = case
    block, *inputs = (drawn_in_slices if sliced else drawn)(shape, torch.float32)
    block, (x, cos, sin) = moved(block, device), converted(inputs, torch.float32, device)
    batch, groups = len(x), len(block.k.weight) // block.head_dim
    holders = {"one-tensor": 1, "tables": batch, "tables-of-heads": batch * groups}[layout]
    row = converted(torch.tensor([3]) if layout == "one-tensor" else torch.arange(holders) % 5, torch.int64, device)

    def stores() -> tuple[Tensor, Tensor]:
        count = 2 * batch * groups * 9 * block.head_dim
        room = torch.arange(count, dtype=x.dtype, device=device).view(2, batch, 9, groups, block.head_dim)
        keys, values = (part.transpose(1, 2)[:, :, 2:] for part in room)
        return keys, values

    def made(backend: str) -> list[Tensor]:
        keys, values = converted(stores(), x.dtype, device)
        held: list[Any] = [keys, values]
        if layout != "one-tensor":
            apart = [part.split(1) if layout == "tables" else _heads_of(part) for part in (keys, values)]
            held = [Ragged(parts) for parts in apart]
        with use_backend(backend), guarded((x, cos, sin, keys, values, row), backend):
            for added in (None, x.flip(0)):
                assert ops.attention_inputs_stored.refusal(backend, x, added, block, cos, sin, *held, row) is None
                made = ops.attention_inputs_stored(x, added, block, cos, sin, *held, row)
            return [*made, keys, values]

    ours, theirs = made("triton"), made(REFERENCE)
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)
    for side, before, new in zip(ours[5:], stores(), ours[3:5], strict=True):
        there = torch.arange(7, device=device).view(1, 1, 7, 1) == row.view(-1, groups if len(row) > batch else 1, 1, 1)
        assert torch.equal(side, torch.where(there, new, before))


def _heads_of(x: Tensor) -> list[Tensor]:
    """Return views [1 1 S D] of the heads of x [B G S D], one sequence after the other."""
    return [head for sequence in x.split(1) for head in sequence.split(1, 1)]


def moved(value: Any, device: str) -> Any:
    """A block, its parts or a tensor, on another device."""
    if is_dataclass(value):
        return type(value)(*(moved(getattr(value, field.name), device) for field in fields(value) if field.init))
    return value.to(device) if isinstance(value, Tensor) else value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_block_equals_plain_torch_on_the_gpu(shape: str, dtype: str) -> None:
    inputs = [moved(value, "cuda") for value in drawn(shape, DTYPES[dtype])]
    for ours, theirs in zip(results("triton", *inputs), results(REFERENCE, *inputs), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("shape", ["qwen3-prompt", "partial-rotary", "odd", "dim96-prompt"])
@pytest.mark.parametrize("make", mostly_slow([drawn, drawn_in_slices], drawn_in_slices))
def test_triton_rounds_where_torch_rounds(make: Callable[..., Any], shape: str) -> None:
    """float16 on the CPU: its interpreter cuts bfloat16 off. What differs is a sum that falls on an edge."""
    inputs = make(shape, torch.float16)
    for ours, theirs in zip(results("triton", *inputs), results(REFERENCE, *inputs), strict=True):
        close(ours, theirs)
        assert (ours == theirs).float().mean() > 0.99


def test_weights_of_another_dtype_are_refused_after_their_first_use_too() -> None:
    block, x, cos, sin = drawn("qwen3", torch.float32)
    results("cpu", block, x, cos, sin)
    half = x.bfloat16()
    reason = ops.attention_inputs.refusal("cpu", half, block, cos.bfloat16(), sin.bfloat16())
    assert "bfloat16" in reason
    assert ops.token_logits.refusal("cpu", half, Head(1e-5, block.norm, block.up)) is not None
