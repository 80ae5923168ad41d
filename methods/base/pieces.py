"""Splits work on a whole prompt into pieces, so that intermediate results take little memory."""

from __future__ import annotations

from collections.abc import Iterator

TOKENS_AT_ONCE = 512


def pieces(tokens: int, block: int = 1) -> Iterator[slice]:
    """Yield slices that together cover the indices below `tokens`, of about 512 each; the length of
    each but the last is a multiple of `block`."""
    size = -(-TOKENS_AT_ONCE // block) * block
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))
