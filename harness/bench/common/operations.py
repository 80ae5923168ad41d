"""Counts the bytes that an operation of kernels/ops.py must read at least, from the sizes of its
arguments."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from harness.engine.trace import INDEX_BYTES
from kernels.block import Linear
from kernels.reference import Segment


def _segments(q: Tensor, segments: Any, scale: float) -> int:
    """Return the bytes of the keys and values that attention over `segments` reads. A segment holds
    keys, values, the indices of the tokens to read, or None for all, and perhaps log-weights: tokens
    whose log-weight is minus infinity are not read. A token that several query
    heads of a group choose separately counts once for each."""
    total = 0
    for segment in segments:
        k, v, _, _, added = segment
        tokens = len(k) * prod(segment.lists) if added is None else int((added > float("-inf")).sum())
        total += tokens * (k.shape[3] + v.shape[3]) * k.element_size() + (0 if added is None else _whole(added))
    return total


def _whole(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _decoded(coded: Any, rows: Tensor | None, blocks: Tensor | None, dtype: Any, recent: Any = None) -> int:
    """Return the bytes of the codes and ranges of all tokens, or of those in `rows`, whose blocks
    are `blocks`, and of the exact values that replace decoded ones."""
    exact = 0 if recent is None else _whole(recent[0])
    if blocks is None:
        return _whole(*coded[:4]) + exact
    return int(blocks.numel()) * sum(x.shape[3] * x.element_size() for x in coded[:4]) + exact


def _weights(*linears: Linear) -> int:
    return _whole(*(part for linear in linears for part in (linear.weight, linear.bias) if part is not None))


_READ: dict[str, Callable[..., int]] = {
    "segment_attention": _segments,
    "segment_attention_with_lse": _segments,
    "attention_with_mean": lambda q, segments, scale, *_: _segments(q, segments, scale),
    "merge_attention": lambda outs, lses: _whole(*outs),
    "partial_products": lambda guess, new: _whole(*(x.basis for x in (guess, new) if x is not None)),
    "merge_attention_with_lse": lambda outs, lses: _whole(*outs),
    "coded_attention": lambda q, segments, scale: sum(
        _segments(q, [part], scale) if isinstance(part, Segment) else _whole(*part[:4]) for part in segments
    ),
    "encode_codes": lambda k, v, bits, group: _whole(k, v),
    "decode_rows": _decoded,
    **INDEX_BYTES,
    "gather_rows": lambda x, rows: rows.numel() * x.shape[3] * x.element_size(),
    "gather_tiers": lambda far, rows, held, slots: rows.numel() * far.shape[3] * far.element_size(),
    "put_rows": lambda x, rows, values: _whole(values),
    "rebuild_keys": lambda u, basis, chunks, size, cos, sin: (
        chunks.numel() * size * (u.shape[2] + cos.shape[1] + sin.shape[1]) * u.element_size() + _whole(basis)
    ),
    "attention_inputs": lambda x, block, cos, sin: _weights(block.q, block.k, block.v),
    "attention_inputs_stored": lambda x, added, block, *_: _weights(block.q, block.k, block.v),
    **dict.fromkeys(
        ("block_output", "block_output_apart"),
        lambda x, attended, block: _weights(block.o, block.gate, block.up, block.down),
    ),
    "token_logits": lambda x, head: _weights(head.linear),
}


def bytes_read(name: str, arguments: tuple[Any, ...]) -> int:
    """Return the least bytes that an operation of kernels/ops.py reads: every tensor among its
    `arguments` once, unless `_READ` has a rule for an operation that needs only a part of them.
    Reads that a hardware cache may save are counted, too."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    return _READ[name](*arguments) if name in _READ else _whole(*tensors)
