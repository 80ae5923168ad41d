"""Splits work on a whole prompt into pieces, so that intermediate results take little memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

TOKENS_AT_ONCE = 512
ON_GPU = 8192  # there each operation costs a launch, and memory is read no slower for it


def tokens_at_once(device: torch.device) -> int:
    """Return how many tokens of a prompt to work on at once on `device`."""
    return ON_GPU if device.type == "cuda" else TOKENS_AT_ONCE


def pieces(tokens: int, block: int = 1, at_once: int = TOKENS_AT_ONCE) -> Iterator[slice]:
    """Yield slices that together cover the indices below `tokens`, of about `at_once` each; the
    length of each but the last is a multiple of `block`."""
    size = -(-at_once // block) * block
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))
