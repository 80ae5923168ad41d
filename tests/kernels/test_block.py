from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import ops
from kernels.block import Block, Head, Linear
from kernels.dispatch import use_backend

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# channels, heads, KV heads, head size, MLP channels, bias, norm of heads, channels that turn, sequences, tokens
SHAPES = {
    "smollm": (576, 9, 3, 64, 1536, False, False, 64, 1, 1),
    "odd": (50, 3, 1, 10, 37, True, False, 10, 2, 1),
    "qwen3": (128, 8, 2, 16, 160, True, True, 16, 3, 1),
    "partial-rotary": (96, 4, 4, 24, 100, False, False, 12, 8, 1),
    "many-sequences": (96, 4, 2, 24, 100, False, False, 24, 9, 1),
    "smollm-prompt": (576, 9, 3, 64, 1536, False, False, 64, 1, 37),
    "qwen3-prompt": (128, 8, 2, 16, 160, True, True, 16, 3, 5),
    "long-odd-prompt": (50, 3, 1, 10, 37, True, False, 4, 2, 2200),
}


def drawn(shape: str, dtype: torch.dtype) -> tuple[Block, Tensor, Tensor, Tensor]:
    """block, x [B T E], cos and sin [1|B T R]"""
    channels, heads, kv_heads, dim, inner, bias, normed, turned, batch, tokens = SHAPES[shape]
    draw = torch.Generator().manual_seed(3)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw).to(dtype)

    def linear(rows: int, columns: int) -> Linear:
        return Linear(random(rows, columns) * columns**-0.5, random(rows) if bias else None)

    q, k, v = (linear(count * dim, channels) for count in (heads, kv_heads, kv_heads))
    norms = [random(dim) if normed else None for _ in range(2)]
    block = Block(
        dim, 1e-5, random(channels), q, k, v, *norms, linear(channels, heads * dim), random(channels),
        linear(inner, channels), linear(inner, channels), linear(channels, inner),
    )  # fmt: skip
    angles = torch.rand(batch if batch < 4 else 1, tokens, turned // 2, generator=draw) * 6
    both = torch.cat([angles, angles], -1)
    return block, random(batch, tokens, channels), both.cos().to(dtype), both.sin().to(dtype)


def close(ours: Tensor, theirs: Tensor) -> None:
    tolerance = 2e-5 if theirs.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_block_equals_plain_torch(shape: str, dtype: str) -> None:
    block, x, cos, sin = drawn(shape, DTYPES[dtype])
    if (reason := ops.attention_inputs.refusal("cpu", x, block, cos, sin)) is not None:
        pytest.skip(reason)
    head = Head(1e-5, block.norm, Linear(block.up.weight, block.up.bias))
    made: dict[str, list[Tensor]] = {}
    for backend in ("cpu", "torch"):
        with use_backend(backend):
            normed, q, k, v = ops.attention_inputs(x, block, cos, sin)
            made[backend] = [normed, q, k, v, ops.block_output(x, q, block), ops.token_logits(x, head)]
    for ours, theirs in zip(made["cpu"], made["torch"], strict=True):
        assert ours.shape == theirs.shape
        close(ours, theirs)


def test_float16_is_left_to_torch() -> None:
    block, x, *_ = drawn("qwen3", torch.float32)
    reason = ops.block_output.refusal("cpu", x.half(), x, block)
    assert reason is not None
    assert "float16" in reason or "import failed" in reason
