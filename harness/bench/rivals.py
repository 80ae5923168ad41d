"""The alternatives that a user would take in place of an operation: transformers' attention,
torch's own gather and scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harness.bench.common.measure import Call
from harness.bench.op_cases import OpCase
from kernels import ops
from kernels.coded import Coded
from kernels.reference import Segment


class Rival(NamedTuple):
    name: str
    call: Call
    keeps_scores: bool = False  # a score of every query for every key, in memory


def rival(case: OpCase) -> Rival | None:
    """Return what a user would run in place of an operation of ours, such as transformers'
    attention or torch's gather: its name in the table and a call to time, on the arguments of
    `case`. Return None if there is no usual alternative."""
    make = _RIVALS.get(case.op)
    return None if make is None else make(*case.args)


def _attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Rival:
    if len(segments) == 1 and segments[0].rows is None:
        k, v = segments[0][:2]
        return Rival("transformers sdpa", lambda: sdpa(q, k, v, scale))

    sides = [[(s, s.k) for s in segments], [(s, s.v) for s in segments]]

    def chosen() -> Tensor:
        keys, values = (
            torch.cat([_taken(x, s.rows, segments) for s, x in side], 2) for side in sides
        )
        return sdpa(q, keys, values, scale)

    return Rival("gather + sdpa", chosen)


def _over_codes(q: Tensor, segments: Sequence[Coded], scale: float) -> Rival:
    """Return the alternative to attention over one segment of quantised keys and values: dense
    attention over the same keys and values, decoded to the dtype of `q` beforehand. Decoding is not part of
    the call that is timed."""
    k, v = ops.decode_rows(segments[0], None, None, q.dtype)
    return Rival(
        "Full, not coded", lambda: ops.segment_attention_with_lse(q, [Segment(k, v)], scale)
    )


def _taken(x: Tensor, rows: Tensor | None, segments: Sequence[Segment]) -> Tensor:
    """Return the keys or values of one segment [B H K D]: those of `x` [B G S D] at the token
    indices `rows` (per KV head or per query head), or all of `x` if `rows` is None. The heads of
    such a whole `x` are repeated until there are as many as in any of `segments`, so that all
    segments can be concatenated."""
    heads = max(x.shape[1] if s.rows is None else s.rows.shape[1] for s in segments)
    if rows is None:
        return x.repeat_interleave(heads // x.shape[1], 1)
    return gathered(x, rows.reshape(*x.shape[:2], -1)).view(*rows.shape, -1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, first: int, window: int) -> Rival:
    places = torch.arange(first, first + q.shape[2], device=q.device).unsqueeze(1)
    behind = places - torch.arange(k.shape[2], device=k.device)
    seen = (behind >= 0) & (behind < window)
    return Rival(
        "sdpa with a mask",
        lambda: scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True),
    )


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]))


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return the attention output [B T H D] of transformers with torch's SDPA kernel."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    out: Tensor = sdpa_attention_forward(groups, q, k, v, None, scaling=scale)[0]
    return out


def eager(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention output [B T H D] of transformers in plain torch, and its weights [B H T
    S]."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    new, stored = q.shape[2], k.shape[2]
    mask = torch.full((1, 1, new, stored), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
    groups: Any = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    return eager_attention_forward(groups, q, k, v, mask.triu(stored - new + 1), scaling=scale)


_RIVALS: dict[str, Callable[..., Rival]] = {
    "segment_attention": _attention,
    "coded_attention": _over_codes,
    "prefill_attention": lambda *args: Rival("transformers sdpa", lambda: sdpa(*args)),
    "prefill_attention_with_column_sums": lambda *args: Rival(
        "transformers eager", lambda: eager(*args)[1].sum(2), True
    ),
    "column_sums": lambda q, k, scale: Rival(
        "transformers eager", lambda: eager(q, k, k, scale)[1].sum(2), True
    ),
    "windowed_attention": _windowed,
    "gather_rows": lambda x, rows: Rival("torch.gather", lambda: gathered(x, rows)),
    "put_rows": lambda x, rows, values: Rival(
        "torch.scatter_", lambda: x.scatter_(2, rows.unsqueeze(-1).expand(values.shape), values)
    ),
}
