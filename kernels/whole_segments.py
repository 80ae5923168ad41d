"""Helps backends whose kernel reads one whole segment: they attend to one after the other and merge
the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.ragged import RAGGED, Ragged
from kernels.reference import Segment, merge_attention

_WIDEST = 256  # channels of a head
_DTYPES = (torch.bfloat16, torch.float16)
ReadSegment = Callable[[Tensor, Segment, Tensor | None, float], tuple[Tensor, Tensor]]


def attend(read: ReadSegment, q: Tensor, segments: Sequence[Segment], scale: float) -> tuple[Tensor, Tensor]:
    """Attend to the union of segments. q [B H 1 D] -> [B H 1 D], log-sum-exp [B H]

    read: takes q, a segment and how many of its tokens are there ([B] int32, None: all) and returns
    the same of it."""
    outs, lses = [], []
    for segment in segments:
        if not segment.k.shape[2]:
            continue
        live = None if segment.live is None else segment.live.to(torch.int32).expand(len(q)).contiguous()
        out, lse = read(q, segment, live, scale)
        outs.append(out)
        # Where no token is there, these kernels give plus infinity, which would outweigh all other segments
        lses.append(lse if live is None else lse.masked_fill(live.unsqueeze(1) == 0, float("-inf")))
    if len(outs) == 1:
        return outs[0], lses[0]
    return merge_attention(outs, lses), torch.stack(lses).logsumexp(0)


def refusal(q: Tensor, segments: Sequence[Segment]) -> str | None:
    """Return why such a kernel cannot serve a call."""
    for segment in segments:
        if segment.rows is not None:
            return "reads whole segments, got rows that were chosen"
        if isinstance(segment.k, Ragged):
            return RAGGED
    if not q.is_cuda or q.dtype not in _DTYPES:
        return f"takes bfloat16 and float16 on a CUDA device, got {q.dtype} on {q.device}"
    width = q.shape[3]
    return f"takes heads of a multiple of 8 up to {_WIDEST}, got {width}" if width % 8 or width > _WIDEST else None
