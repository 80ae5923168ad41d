"""Counts the bytes that an operation of kernels/ops.py must read at least, from the sizes of its
arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import Signature, signature
from math import prod
from typing import Any

from torch import Tensor

from harness.engine.trace import INDEX_BYTES
from kernels import ops
from kernels.block import DecoderBlock, Linear
from kernels.dispatch import REFERENCE
from kernels.partial import Guess, NewPartial
from kernels.reference import Segment
from kernels.top_p import KeyCodes


@cache
def parameters(name: str) -> Signature:
    """Return the parameters of an operation, as its reference names them."""
    op = next(op for op in ops.ALL if op.name == name)
    return signature(op.backend(REFERENCE).run)


def _segments(segments: Any) -> int:
    """Return the bytes that attention over `segments` reads: codes with their ranges, or keys and values. A `Segment`
    holds keys, values, the indices of the tokens to read, or None for all, and perhaps log-weights: tokens whose
    log-weight is minus infinity are not read. A token that several query heads of a group choose separately counts once
    for each."""
    total = 0
    for segment in segments:
        if not isinstance(segment, Segment):
            total += _whole(*segment)
            continue
        k, v, _, _, added = segment
        tokens = (
            len(k) * prod(segment.lists) if added is None else int((added > float("-inf")).sum())
        )
        total += tokens * (k.shape[3] + v.shape[3]) * k.element_size() + _whole(added)
    return total


def _whole(*values: Any) -> int:
    """Return the bytes of those values that are tensors, or hold some, as the codes of a codec do."""
    held = (_whole(*x) for x in values if isinstance(x, tuple | list))
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor)) + sum(held)


def _decoded(
    coded: Any, rows: Tensor | None, blocks: Tensor | None, dtype: Any, recent: Any = None
) -> int:
    """Return the bytes of the codes and ranges of all tokens, or of those in `rows`, whose blocks
    are `blocks`, and of the exact values that replace decoded ones."""
    exact = 0 if recent is None else _whole(recent[0])
    if blocks is None:
        return _whole(*coded) + exact
    of_token = _whole(*(x[0, 0, 0] for x in coded if isinstance(x, Tensor)))
    return int(blocks.numel()) * of_token + exact


def _weights(*linears: Linear) -> int:
    return _whole(*(part for linear in linears for part in (linear.weight, linear.bias)))


def _partial_products(guess: Guess | None, new: NewPartial | None) -> int:
    return _whole(*(each.basis for each in (guess, new) if each is not None))


def _gather_rows(x: Tensor, rows: Tensor, *_: Any) -> int:
    return rows.numel() * x.shape[3] * x.element_size()


def _estimated_logits(q: Tensor, keys: KeyCodes, rows: Tensor) -> int:
    return sum(_gather_rows(x, rows) for x in keys)


def _rebuild_keys(
    u: Tensor, basis: Tensor, chunks: Tensor, size: int, cos: Tensor, sin: Tensor, *_: Any
) -> int:
    of_token = u.shape[2] + cos.shape[1] + sin.shape[1]
    return chunks.numel() * size * of_token * u.element_size() + _whole(basis)


_COUNTED: dict[str, Callable[..., int]] = {
    "decode_rows": _decoded,
    "estimated_logits": _estimated_logits,
    "gather_rows": _gather_rows,
    "gather_tiers": _gather_rows,
    "partial_products": _partial_products,
    "rebuild_keys": _rebuild_keys,
    "token_logits": lambda x, head: _weights(head.linear),
    **INDEX_BYTES,
}
# the arguments that an operation reads, where it does not read all
_SOME = {
    "encode_codes": ["k", "v"],
    "put_rows": ["values"],
}
_OF_BLOCK = {  # the weights of a decoder layer that an operation reads
    "attention_inputs": ["q", "k", "v"],
    "attention_inputs_stored": ["q", "k", "v"],
    "block_output": ["o", "gate", "up", "down"],
    "block_output_apart": ["o", "gate", "up", "down"],
}


def bytes_read(name: str, arguments: tuple[Any, ...]) -> int:
    """Return the least bytes that an operation of kernels/ops.py reads: every tensor among its
    `arguments` once, unless a rule above says that it needs only a part of them. Reads that a
    hardware cache may save are counted, too."""
    if name in _COUNTED:
        return _COUNTED[name](*arguments)
    given = parameters(name).bind_partial(*arguments).arguments
    if name in _OF_BLOCK:
        block: DecoderBlock = given["block"]
        return _weights(*(getattr(block, part) for part in _OF_BLOCK[name]))
    if "segments" in given:
        return _segments(given["segments"])
    if name.startswith("merge_attention"):
        return _whole(*given["outs"])
    read = [given[part] for part in _SOME.get(name, given)]
    return _whole(*read)
