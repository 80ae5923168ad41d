"""Computes a decoder block around its attention, in plain torch.

The blocks are pre-norm, with RMSNorm, rotary embedding and a gated SiLU MLP: Llama, Mistral, Qwen2,
Qwen3, Phi-3, GLM. Results are rounded where transformers' modules round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kernels import ops
from kernels.matmul import multiplies_bfloat16
from kernels.ragged import Ragged
from kernels.rope import halves, rotate

# tokens of a prompt: bounds the memory between torch's products
TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 8192}
MOST_INNER = 9216  # channels of the MLP
_PANEL = 32  # outputs computed together; sums also go over multiples of it


def fits_compiled(widths: Sequence[int], inner: int, dtype: torch.dtype) -> bool:
    """Return whether the compiled matrix products pay off for a prompt on the CPU, in a decoder
    block with such `widths` (channels in and out of its projections) and `inner` channels in the
    MLP. They keep no results in memory from one product to the next, so estimates of peak memory
    ask this too."""
    whole = not any(width % _PANEL for width in (*widths, inner))
    most = MOST_INNER if dtype is torch.float32 or multiplies_bfloat16() else inner
    return whole and inner <= most and dtype in (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Linear:
    """Multiply the last dimension of a tensor by a weight matrix, and add a bias if there is
    one."""

    weight: Tensor  # [out in]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DecoderBlock:
    """Hold the weights of one decoder layer: E channels, H query heads and G KV heads of D channels
    each, F channels in the MLP."""

    head_dim: int
    eps: float
    norm: Tensor  # [E]
    q: Linear
    k: Linear
    v: Linear
    q_norm: Tensor | None  # [D], in Qwen3
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor  # [E]
    gate: Linear
    up: Linear
    down: Linear
    # whether neighbouring channels of a head turn together; they leave as halves (GLM)
    neighbours: bool = False
    # addresses of these weights, as backends pass them to their calls, under their names; `replace` takes none over
    prepared: dict[str, bytes] = field(init=False, repr=False, default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Head:
    """Hold the weights of a model's end: the final norm and the projection to the vocabulary."""

    eps: float
    norm: Tensor  # [E]
    linear: Linear
    # addresses of these weights, as backends pass them to their calls, under their names; `replace` takes none over
    prepared: dict[str, bytes] = field(init=False, repr=False, default_factory=dict)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [... E] by its root mean square and multiply by weight [E]. -> [... E]"""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def attention_inputs(
    x: Tensor, block: DecoderBlock, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what attention needs from the block's input: norm x, project it to q, k and v, and
    rotate q and k. x [B T E], cos, sin [1|B T R] -> normed [B T E], q [B H T D], k, v [B G T D]"""
    normed = rms_norm(x, block.norm, block.eps)
    q, k, v = (
        part(normed).unflatten(-1, (-1, block.head_dim)).transpose(1, 2)
        for part in (block.q, block.k, block.v)
    )
    if block.q_norm is not None and block.k_norm is not None:
        q, k = rms_norm(q, block.q_norm, block.eps), rms_norm(k, block.k_norm, block.eps)
    if block.neighbours:
        q, k = (halves(x, cos.shape[-1]) for x in (q, k))
    return normed, rotate(q, cos, sin), rotate(k, cos, sin), v


def attention_inputs_stored(
    x: Tensor,
    added: Tensor | None,
    block: DecoderBlock,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor | Ragged,
    values: Tensor | Ragged,
    row: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `attention_inputs` (norm, projection and rotation) of x + `added`, one token of each
    sequence, and also write its k and v into a cache: into `row` ([1] for all sequences, or [B],
    int64) of `keys` and `values` [B G S D]. If every KV head has memory of its own, these are
    [B*G 1 S D] and `row` [B*G]. Return x + `added`, normed, q, k and v."""
    x = x if added is None else x + added
    normed, q, k, v = ops.attention_inputs(x, block, cos, sin)
    rows = row.view(-1, 1, 1).expand(*keys.shape[:2], 1)
    ops.put_rows(keys, rows, k.reshape(*rows.shape, -1))
    ops.put_rows(values, rows, v.reshape(*rows.shape, -1))
    return x, normed, q, k, v


def block_output(x: Tensor, attended: Tensor, block: DecoderBlock) -> Tensor:
    """Compute what follows attention in a decoder block: the output projection and the MLP, each
    with its residual. x [B T E], the block's input; attended [B H T D] -> [B T E]"""
    return summed(x, attended, block, _terms)


def summed(
    x: Tensor,
    attended: Tensor,
    block: DecoderBlock,
    terms: Callable[[Tensor, Tensor, DecoderBlock], tuple[Tensor, Tensor]],
) -> Tensor:
    """Compute `block_output` for some tokens at a time, as the sum of the two `terms` that a function
    of x [N E] and attended [N H*D] returns."""
    heads, out = attended.transpose(1, 2).flatten(2), x.new_empty(x.shape)
    rows = (part.flatten(0, 1).split(TOKENS_AT_ONCE[x.device.type]) for part in (x, heads, out))
    for some, seen, to in zip(*rows, strict=True):
        torch.add(*terms(some, seen, block), out=to)
    return out


def block_output_apart(x: Tensor, attended: Tensor, block: DecoderBlock) -> tuple[Tensor, Tensor]:
    """Compute what follows attention in a decoder block, as `block_output` does, without the last
    addition: return the residual stream and the MLP's output, [B T E] each.
    `attention_inputs_stored` of the next block adds them together with its norm."""
    return _terms(x, attended.transpose(1, 2).flatten(2), block)


def _terms(x: Tensor, attended: Tensor, block: DecoderBlock) -> tuple[Tensor, Tensor]:
    """Return the two terms of a block's last sum: the residual stream after attention, and the
    MLP's output. x [B T E], attended [B T H*D] -> [B T E] each"""
    x = x + block.o(attended)
    normed = rms_norm(x, block.mlp_norm, block.eps)
    return x, block.down(silu(block.gate(normed), inplace=True).mul_(block.up(normed)))


def token_logits(x: Tensor, head: Head) -> Tensor:
    """Apply the final norm to x and project it to the vocabulary. x [B T E] -> [B T V]"""
    return head.linear(rms_norm(x, head.norm, head.eps))
