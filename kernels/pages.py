"""Defines in plain torch the operations on pages, chunks and blocks of tokens: bounds of their
logits, and the names of their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, appended, by_sequence, filled
from kernels.reference import row_scores


@by_sequence
def page_scores(q: Tensor, bounds: Tensor) -> Tensor:
    """Bound the product of each query with the keys of each page: sum_c max(q_c * largest_c, q_c *
    smallest_c). q [B G g D], bounds [B G P 2D], the largest and then the smallest value of each
    channel -> [B G g P] (fp32)

    Quest (arXiv 2406.10774).
    """
    return row_scores(by_sign(q), bounds)


def by_sign(q: Tensor) -> Tensor:
    """Return the positive parts of all channels of q followed by the negative parts, so that one
    product with a page's largest and smallest keys bounds its logits. [... D] -> [... 2D]"""
    return torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)


def token_rows(chunks: Tensor | Ragged, size: int, last: int | PerSequence | None = None) -> Tensor:
    """Return the tokens of the chunks with the numbers `chunks`, each of `size` consecutive tokens,
    followed by those of the chunk `last` if it is given. chunks [B heads K] -> [B heads K * size],
    or [B heads (K + 1) * size]

    For several sequences with different K, entries after the tokens of a shorter one are any
    existing tokens."""
    whole = filled(chunks) if last is None else appended(chunks, last)
    within = torch.arange(size, device=whole.device)
    return torch.add(within, whole.unsqueeze(-1), alpha=size).flatten(2)
