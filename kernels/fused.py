"""Computes prefill attention in 16 bits by the kernels that come with torch: FlashAttention, and
cuDNN for long prompts on Hopper and datacenter Blackwell.

torch's own choice among them (`scaled_dot_product_attention`) aligns causal masks at the top left
and returns no log-sum-exp. A later chunk of a prompt needs the bottom right, and sinks and windows
that are merged need the log-sum-exp; FlashAttention's operations below it have both. cuDNN's has
the log-sum-exp alone, so a later chunk attends to itself and to the tokens before it apart, as
torch's context parallelism does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from kernels import ops

# cuDNN makes a plan for each new shape, which takes a good part of a second: it is left to chunks that are long and
# often have the same length. The tokens before them are cut into lengths that are powers of two, which share plans.
# tokens: the shortest chunk, and what its length and place are multiples of
_PLANNED, _STEP = 4096, 1024
_PARTS = 8  # that one launch merges
_CUDNN_FIRST = 9, 10  # major compute capabilities on which cuDNN is faster than FlashAttention-2
_DTYPES = torch.bfloat16, torch.float16
# private, so its arguments are looked up
_windowed: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)
_NEEDED = {"max_q", "max_k", "is_causal", "scale", "window_size_left", "window_size_right"}
_HAS_WINDOWS = (
    _windowed is not None and {x.name for x in _windowed.default._schema.arguments} >= _NEEDED
)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last T of S tokens. q [B H T D], k, v [B G S D] ->
    [B H T D], which lies in memory as [B T H D]"""
    lengths = _planned(q, k, v)
    if not lengths:
        return _flash(q, k, v, scale, causal=True)[0]
    *before, own = zip(k.split(lengths, 2), v.split(lengths, 2), strict=True)
    parts = [_cudnn(q, *part, scale, causal=False) for part in before]
    outs, lses = zip(*parts, _cudnn(q, *own, scale, causal=True), strict=True)
    return ops.merge_attention(outs, lses) if before else outs[0]


def prefill_attention_refuses(q, k, v, scale):
    if not 1 < q.shape[2] <= k.shape[2]:
        return f"takes several queries and no more than keys, got {q.shape[2]} and {k.shape[2]}"
    return _unfit(q, k, v)


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int
) -> tuple[Tensor, Tensor]:
    """Compute attention in which query t sees the last `window` keys up to key `first` + t, and its
    log-sum-exp, as kernels/windowed.py defines it. q [B H T D], k, v [B G S D] -> [B H T D],
    [B H T] (fp32)"""
    stored, left, right = _window(q, k, first, window)
    k, v = k[:, :, :stored], v[:, :, :stored]
    if left >= stored - 1 and (right == 0 or first >= stored - 1):
        return _flash(q, k, v, scale, causal=right == 0)
    out, lse, *_ = _windowed.default(
        *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], stored, 0.0, right == 0, False, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def windowed_attention_refuses(q, k, v, scale, first, window):
    if not _HAS_WINDOWS:
        return "needs windows in torch's FlashAttention, which this version has not"
    stored, left, _ = _window(q, k, first, window)
    if q.shape[2] == 1 or first < 0 or left < 0 or not stored:
        return "takes several queries that all see a key"
    return _unfit(q, k, v)


def _window(q: Tensor, k: Tensor, first: int, window: int) -> tuple[int, int, int]:
    """Return how many keys any query may see, and how many keys to the left and to the right of its
    own each sees. The last query's own key is the last one, as FlashAttention counts."""
    stored = min(k.shape[2], first + q.shape[2])
    right = first - (stored - q.shape[2])
    return stored, window - 1 - right, right


def _planned(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """Return the lengths of the parts into which cuDNN cuts the keys; the chunk's own keys are the
    last part. Return an empty list if cuDNN should not compute this chunk."""
    new, before = q.shape[2], k.shape[2] - q.shape[2]
    if (
        new < _PLANNED or new % _STEP or before % _STEP
        or torch.cuda.get_device_capability(q.device)[0] not in _CUDNN_FIRST
        or not can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, True))
    ):  # fmt: skip
        return []
    powers = range((before // _STEP).bit_length())
    lengths = [_STEP << power for power in reversed(powers) if before // _STEP >> power & 1]
    return [*lengths, new] if len(lengths) < _PARTS else []


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend by cuDNN, and return the log-sum-exp too. Its causal mask lets the first query see the
    first key. It plans anew for other strides, and those of a store depend on its room, so keys and
    values are copied first: 1 % of the time."""
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse, *_ = cudnn(
        q, k.contiguous(), v.contiguous(), None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(q.shape[:3])


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend by FlashAttention, and return the log-sum-exp too. Its causal mask lets the last query
    see the last key."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    out, lse, *_ = flash(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _unfit(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why FlashAttention cannot run on this device or these tensors, or None."""
    if not q.is_cuda or q.dtype not in _DTYPES:
        return f"takes bfloat16 and float16 on a CUDA device, got {q.dtype} on {q.device}"
    if q.shape[1] % k.shape[1] or q.shape[3] % 8:
        return f"takes whole groups of heads of a multiple of 8 channels, got {list(q.shape)} and {list(k.shape)}"
    if not can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True)):
        return "needs FlashAttention in torch, for this card and these shapes"
    return None
