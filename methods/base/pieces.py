"""Splits work on a whole prompt into pieces, which bounds the memory between two operations."""

from __future__ import annotations

from collections.abc import Iterator

TOKENS_AT_ONCE = 512


def pieces(tokens: int, block: int = 1) -> Iterator[slice]:
    """Yield slices that together cover `tokens`; each but the last is a multiple of `block`
    long."""
    size = -(-TOKENS_AT_ONCE // block) * block
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))
