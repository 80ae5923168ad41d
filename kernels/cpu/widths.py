"""Names the sizes of heads that compiled attention over codes and logits from them are built for."""

from __future__ import annotations

import torch

WIDTHS = {torch.float32: 16, torch.bfloat16: 32}  # channels of a cache line
_LINES = (1, 2, 3, 4, 6, 8)  # cache lines of a head
MOST_LINES = _LINES[-1]


def width_of(dim: int, dtype: torch.dtype) -> int:
    """Return the channels of the least such head that `dim` channels fit into."""
    lanes = WIDTHS[dtype]
    return next(lines for lines in _LINES if lines * lanes >= dim) * lanes
