"""Chooses which row of a full cache the next token takes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ragged import Ragged, counts_of, filled

NEWEST, LEFT, READ, END = range(4)  # columns of `counts`


def pick_overwritten(
    logits: Tensor | Ragged, lse: Tensor, scale: float, places: Tensor, row: Tensor, counts: Tensor
) -> None:
    """Choose the row that the next token takes: that of the stored token to which the newest one
    attends least, summed over all query heads; of equal ones the latest, and never the newest
    itself. TOVA (arXiv 2401.06104)

    logits [B G g S]: products of the newest token's queries with all keys, lse [B H]: the
    log-sum-exp of each query's whole softmax. These change in place, all int64: row [B], the row
    that the newest token has taken, and then the one that the next takes; places [B S], where in
    the text the token of each row stands; and counts [B 4], of which the first three go on by this
    step: where the newest token stands; how many tokens before the position in the fourth column
    are stored; and how many of these all steps have read."""
    scores = filled(logits).flatten(1, 2)
    weights = (scores * scale - lse.unsqueeze(-1)).exp().sum(1)  # [B S]
    places, own = places[:, : weights.shape[1]], row.unsqueeze(1)
    counts[:, LEFT] -= (places.gather(1, own).squeeze(1) < counts[:, END]).long()
    counts[:, READ] += counts[:, LEFT]
    counts[:, NEWEST] += 1
    places.scatter_(1, own, counts[:, NEWEST : NEWEST + 1])
    weights.scatter_(1, own, torch.inf)
    if (sizes := counts_of(logits, weights.device)) is not None:
        numbers = torch.arange(weights.shape[1], device=weights.device)
        weights.masked_fill_(numbers >= sizes.unsqueeze(1), torch.inf)
    least = weights.amin(1, keepdim=True)
    row.copy_(places.masked_fill(weights > least, -1).argmax(1))
