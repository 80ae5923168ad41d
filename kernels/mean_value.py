"""Defines in plain torch attention in which the mean of all values stands for tokens that are not
read (SparQ)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from kernels.sink_logits import lse_with_sink, with_sink


def attention_with_mean(
    q: Tensor, segments: Sequence[Segment], scale: float, chosen: int, lses: Tensor, sink_logits: Tensor | None,
    value_sum: Tensor, v: Tensor, count: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from one token per sequence to all segments, and let the mean of all values stand for
    the tokens that are not read (SparQ, arXiv 2312.04985). An approximate softmax over all tokens
    says which share these have. Return attention [B H 1 D], and the share [B G g 1] of the
    approximate softmax on tokens that are read.

    q [B G 2g D]: each group's g queries, followed by as many approximate ones, which attend to the
    same tokens. Segment number `chosen` holds tokens that were chosen among more; lses [B G g P]
    are the log-sum-exps of all these, in P parts, with the approximate queries. sink_logits [H] or
    None: one more token in each softmax, which is always read and has no value. value_sum [B G 1 D]
    (fp32): the sum of all values but the newest, v [B G 1 D], which is added to it in place. count
    [1] or [B]: how many values there are, with the newest."""
    batch, groups, both, dim = q.shape
    group = both // 2
    outs, lse = ops.segment_attention_with_lse(q.view(batch, -1, 1, dim), segments, scale)
    query = q[:, :, group:].reshape(batch, -1, 1, dim)
    others = [*segments[:chosen], *segments[chosen + 1 :]]
    _, always = ops.segment_attention_with_lse(query, others, scale)
    lse = lse.view(batch, groups, both)
    read = lse[..., group:]
    out = outs.view(batch, groups, both, -1)[:, :, :group].reshape(batch, groups * group, 1, -1)
    if sink_logits is not None:
        out = with_sink(out, lse[..., :group].flatten(1), sink_logits)
        read = lse_with_sink(read.flatten(1), sink_logits).view_as(read)
        always = lse_with_sink(always, sink_logits)
    every = torch.cat([lses, always.view(batch, groups, group, 1)], -1) - read.unsqueeze(-1)
    # a part of the tokens has no more than all; of large logits in 16 bits the two are rounded differently
    covered = every.exp().sum(-1, keepdim=True).reciprocal().clamp(max=1)
    value_sum += v
    return with_mean(out, covered, value_sum, count), covered


def with_mean(out: Tensor, covered: Tensor, value_sum: Tensor, count: Tensor) -> Tensor:
    """Mix the mean of all values into attention out [B H 1 D], in the part of each query head's
    softmax that is not `covered` [B G g 1]. value_sum [B G 1 D]: the sum of all values, `count` [1]
    or [B] many. -> [B H 1 D]"""
    mean = value_sum.float() / count.view(-1, 1, 1, 1)
    read = out.view(*covered.shape[:3], -1)
    return torch.lerp(mean, read.float(), covered.float()).to(out.dtype).view_as(out)
