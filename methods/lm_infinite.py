"""LM-Infinite: reads a window of near tokens and the first ones, no distance beyond the window
(arXiv 2308.16137).

The rule: every query, those of the prompt as well, reads the n_local tokens before it at their true
distances, and the first `n_init` tokens; if these lie further back than the window, they are read
as if they stood exactly n_local before the query. So the prompt's outputs differ from Full's, and a
prefill cannot be shared with this method.

Here n_init and n_local together are the budget. A prefill in several chunks spends the budget of the
tokens so far. Keys are stored in their true rotation, and the first ones are rotated again in each
step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.reference import Segment
from kernels.sink_logits import with_sink
from methods.base import (
    AttnInput,
    Cost,
    LayerWorkload,
)
from methods.base.pieces import pieces
from methods.layers import Keep, Policy, RotatingMethod
from methods.parts import costs
from methods.parts.rope_table import RopeTable


class LMInfiniteKeep(
    Keep, capturable=True, of_each={"rope_table": None, "first_keys": None, "n_local": None}
):
    """Keep the first tokens and a window of recent ones. Keys are stored in their true rotation;
    the first ones are rotated again for each query that is further than the window from them."""

    method: LMInfinite
    n_local: int | None = None  # length of the window; None: everything is read
    first_keys: Tensor  # [B G n_init D] before their rotation, fp32
    # [B G n_init D], copied for joint steps of several sequences
    first_values: Tensor | None = None

    def __init__(self, rope_table: RopeTable) -> None:
        self.rope_table = rope_table

    def prefill(self, x: AttnInput) -> Tensor:
        self.rope_table.note(x)
        self.n_local = self._window_so_far()
        if self.n_local is None:
            return self.layer.attend_prompt(x.q)
        k, v, q = self.store.k, self.store.v, x.q
        count, scale = min(self.method.n_init, k.shape[2]), self.spec.scale
        # the tokens after the first ones have no gap up to the last query
        place = k.shape[2] - count - q.shape[2]
        out, lse = ops.windowed_attention(
            q, k[:, :, count:], v[:, :, count:], scale, place, self.n_local
        )
        # 0, 1 and so on, or higher where the conversation's history was cut
        places = self.layer.stored_positions()[0, 0, :count]
        k, v = k[:, :, :count], v[:, :, :count]
        self.first_keys = self.rope_table.unrotate(k, places)
        if not count:
            return with_sink(out, lse, self.spec.sink_logits)
        begin, end = x.start - int(places[0]), x.start + q.shape[2]
        turned = self.rope_table.rotate(self.first_keys, torch.zeros_like(places[:1])).to(q.dtype)
        for part in pieces(q.shape[2]):
            some, first = q[:, :, part], begin + part.start
            at = torch.arange(x.start + part.start, x.start + part.stop, device=q.device)
            far_q = self.rope_table.move(some, at, self.n_local)
            # the first tokens where they stand, and those further away as if n_local away
            near, near_lse = ops.windowed_attention(some, k, v, scale, first, self.n_local)
            far, far_lse = ops.windowed_attention(
                far_q, turned, v, scale, first - self.n_local, end
            )
            merged, both_lse = ops.merge_attention_with_lse(
                [near, far, out[:, :, part]], [near_lse, far_lse, lse[:, :, part]]
            )
            out[:, :, part] = with_sink(merged, both_lse, self.spec.sink_logits)
        return out

    def keep(self, size: int) -> Tensor:
        return self.first_and_last(self.method.n_init, size)

    def close(self, evicted: int) -> None:
        self.n_local = self._window_so_far()

    def decode(self, x: AttnInput) -> Tensor:
        if self.n_local is None:
            return super().decode(x)
        self.rope_table.note(x)
        first = self.rope_table.rotate_behind(self.first_keys, x.start, self.n_local, x.k.dtype)
        count = self.method.n_init
        values = self.store.between(0, count).v if self.first_values is None else self.first_values
        return self.layer.attend(x.q, Segment(first, values), self.store.since(count))

    def form(self) -> Hashable:
        """Return whether everything is read, which must be equal for sequences that share a decode
        step."""
        return self.n_local is None

    def link(self, members: Sequence[Policy], joint: Mapping[int, Policy]) -> None:
        """Copy the first tokens' values of all sequences into one tensor, with zeros for free
        slots, as their keys are."""
        if self.n_local is not None:
            values = [member.store.between(0, self.method.n_init).v for member in members]
            free = self.request.batch - sum(map(len, values))
            self.first_values = pad(torch.cat(values), (0, 0, 0, 0, 0, 0, 0, free))

    def joined(self) -> dict[str, Tensor]:
        values = self.first_values
        return super().joined() | ({} if values is None else {"first_values": values})

    def _window_so_far(self) -> int | None:
        tokens = self.layer.spendable()
        return None if tokens is None else max(1, tokens - self.method.n_init)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.rope_table.note_past(self.spec, self.layer.seen)


@dataclass(frozen=True, kw_only=True)
class LMInfinite(RotatingMethod):
    """Define LM-Infinite, which reads a window of recent tokens and the first ones, by its
    parameter `n_init`: how many first tokens are always read. The paper's authors got the same
    results with 10 and 100."""

    dense_prefill = False
    window_names = {"sinks": "n_init"}
    policies = (LMInfiniteKeep,)
    tunable = {"n_init": (1, 4, 10, 32, 100)}

    n_init: int = 10

    def __post_init__(self) -> None:
        if self.n_init < 0:
            raise ValueError(
                f"n_init={self.n_init} is negative: give the number of first tokens that are always read."
            )

    @property
    def smallest_budget(self) -> int:
        return self.n_init + 1

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        """Return the tokens read when the budget is counted as in LM-Infinite's paper: it sets the
        window's length, so the first tokens come on top. `budget(n)`: the budget in tokens for a
        prompt of n; `sealed`: the prompt's length."""
        return self.n_init + budget(sealed - self.n_init)

    def cost(self, case: LayerWorkload) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case) + costs.rope_table(case)
        first = costs.FP32 * self.n_init * case.spec.num_kv_heads * case.spec.head_dim
        return costs.evict(case, case.budget) + costs.rope_table(case) + Cost(first)
