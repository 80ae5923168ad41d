"""What an operation of kernels/ops.py must read, write and compute at least, by the sizes of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.engine.trace import INDEX_BYTES
from kernels.block import Linear
from kernels.ragged import sequence_by_sequence


def _segments(q: Tensor, segments: Any, scale: float) -> int:
    """Keys and values, each once; rows that several query heads choose for themselves count for each."""
    total = 0
    for k, v, rows, _ in segments:
        tokens = k.shape[0] * k.shape[1] * k.shape[2] if rows is None else rows.numel()
        total += tokens * (k.shape[3] + v.shape[3]) * k.element_size()
    return total


def _whole(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _weights(*linears: Linear) -> int:
    return _whole(*(part for one in linears for part in (one.weight, one.bias) if part is not None))


_READ: dict[str, Callable[..., int]] = {
    "segment_attention": _segments,
    "segment_attention_with_lse": _segments,
    "merge_attention": lambda outs, lses: _whole(*outs),
    "coded_attention": lambda q, coded, scale: _whole(*coded[:4]),
    "decode_rows": lambda coded, rows, blocks, dtype: (
        blocks.numel() * sum(x.shape[3] * x.element_size() for x in coded[:4])
    ),
    **INDEX_BYTES,
    "gather_rows": lambda x, rows: rows.numel() * x.shape[3] * x.element_size(),
    "gather_tiers": lambda far, rows, held, slots: rows.numel() * far.shape[3] * far.element_size(),
    "put_rows": lambda x, rows, values: _whole(values),
    "rebuild_keys": lambda u, basis, positions, cos, sin: (
        positions.numel() * (u.shape[2] + cos.shape[1] + sin.shape[1]) * u.element_size() + _whole(basis)
    ),
    "attention_inputs": lambda x, block, cos, sin: _weights(block.q, block.k, block.v),
    "attention_inputs_stored": lambda x, added, block, *_: _weights(block.q, block.k, block.v),
    **dict.fromkeys(
        ("block_output", "block_output_apart"),
        lambda x, attended, block: _weights(block.o, block.gate, block.up, block.down),
    ),
    "token_logits": lambda x, head: _weights(head.linear),
}


_AT_ONCE = ("attention_inputs_stored",)  # reads weights once for all sequences


def bytes_read(name: str, arguments: tuple[Any, ...]) -> int:
    """By the arguments' sizes: every tensor once, unless `_READ` knows better. What a cache may save still counts."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    return _READ[name](*arguments) if name in _READ else _whole(*tensors)


def work(name: str, arguments: tuple[Any, ...], result: Any) -> tuple[int, int, int]:
    """Bytes that a call reads and writes, and floating-point operations, of all its sequences together."""
    calls = [arguments] if name in _AT_ONCE else sequence_by_sequence(arguments)
    written = calls if name == "put_rows" else [(result,)]
    return (
        sum(bytes_read(name, call) for call in calls),
        sum(_whole(*(x for x in tree_leaves(call[-1]) if isinstance(x, Tensor))) for call in written),
        sum(flop(name, call) for call in calls),
    )


def _rows_of(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _attended(q: Tensor, segments: Any, scale: float) -> int:
    """Two products of a query head with each of its tokens, keys first."""
    group = q.shape[1] // segments[0].k.shape[1]
    total = 0
    for k, v, rows, _ in segments:
        tokens = _rows_of(k) * group if rows is None else rows.numel() * (q.shape[1] // rows.shape[1])
        total += 2 * tokens * (k.shape[3] + v.shape[3])
    return total * q.shape[2]


def _products(x: Tensor, *linears: Linear) -> int:
    return 2 * _rows_of(x) * sum(one.weight.numel() for one in linears)


_COMPUTED: dict[str, Callable[..., int]] = {
    "segment_attention": _attended,
    "segment_attention_with_lse": _attended,
    **dict.fromkeys(
        ("row_scores", "page_scores", "live_scores"), lambda q, x, *live: 2 * _rows_of(q) * x.shape[2] * x.shape[3]
    ),
    **dict.fromkeys(
        ("channel_scores", "channel_sums"),
        lambda q, x, channels: 2 * _rows_of(q) * channels.shape[-1] * x.shape[3],
    ),
    "rebuild_keys": lambda u, basis, positions, cos, sin: 2 * positions.numel() * u.shape[2] * basis.shape[3],
    "attention_inputs": lambda x, block, cos, sin: _products(x, block.q, block.k, block.v),
    "attention_inputs_stored": lambda x, added, block, *_: _products(x, block.q, block.k, block.v),
    **dict.fromkeys(
        ("block_output", "block_output_apart"),
        lambda x, attended, block: _products(x, block.o, block.gate, block.up, block.down),
    ),
    "token_logits": lambda x, head: _products(x, head.linear),
}


def flop(name: str, arguments: tuple[Any, ...]) -> int:
    """Floating-point operations of its products; 0 of what does no more than a few per byte that it reads."""
    return _COMPUTED[name](*arguments) if name in _COMPUTED else 0
