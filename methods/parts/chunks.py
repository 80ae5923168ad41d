"""Cuts a prompt into chunks of tokens, each of which is represented by its mean key (ShadowKV,
arXiv 2410.21465)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cosine_similarity


def landmarks(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean key of each chunk, and the lowest cosine of one of its keys to it.
    [B G N c D] -> [B G N D], [B G N] (fp32)"""
    means = keys.float().mean(3)
    return means, cosine_similarity(keys.float(), means.unsqueeze(3), dim=-1).amin(3)


def chunked(x: Tensor, count: int, size: int) -> Tensor:
    """Return the first `count` chunks as rows. [B G S D] -> [B G N c*D]"""
    return x[:, :, : count * size].unflatten(2, (count, size)).flatten(3)
