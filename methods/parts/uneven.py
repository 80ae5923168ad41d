"""Attends where the sequences of a batch read different numbers of chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kernels.reference import Segment


def one_by_one(
    attend: Callable[..., Tensor], q: Tensor, segments: Sequence[Segment], counts: Sequence[int], *, fetched: bool
) -> Tensor:
    """Call `attend` for each sequence alone, without the rows that only others asked for. q
    [B H 1 D] -> [B H 1 D]

    `fetched`: the chosen rows are the first segment; else they are those of the segment that has
    `rows`."""
    alone = (_alone(b, count, segments, fetched) for b, count in enumerate(counts))
    return torch.cat([attend(q[b : b + 1], *read) for b, read in enumerate(alone)])


def limited(segments: Sequence[Segment], counts: Tensor, *, fetched: bool) -> Iterator[Segment]:
    """Yield the segments, with only the first `counts` [B] of the chosen rows. `fetched`: as in
    `one_by_one`."""
    for number, segment in enumerate(segments):
        chosen = segment.rows is not None or (number == 0 and fetched)
        yield segment._replace(live=counts) if chosen else segment


def _alone(b: int, count: int, segments: Sequence[Segment], fetched: bool) -> Iterator[Segment]:
    for number, (k, v, rows, _) in enumerate(segments):
        k, v = k[b : b + 1], v[b : b + 1]
        if rows is not None:
            yield Segment(k, v, rows[b : b + 1, :, :count])
        elif number == 0 and fetched:
            yield Segment(k[:, :, :count], v[:, :, :count])
        else:
            yield Segment(k, v)
