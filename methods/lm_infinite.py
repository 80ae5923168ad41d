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
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.reference import Segment
from kernels.sink_logits import with_sink
from methods.base import (
    AttnInput,
    CacheState,
    Cost,
    Grids,
    KVLayer,
    LayerSpec,
    LayerWorkload,
    Method,
)
from methods.base.pieces import pieces
from methods.base.request import ROTATION
from methods.layers import Keep, Layer, Policy
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
        count = min(self.method.n_init, self.store.length)
        self.first_keys = self.rope_table.unrotate(
            self.store.k[:, :, :count], self._first_places(count)
        )
        k, v, q = self.store.k, self.store.v, x.q
        # the tokens after the first ones have no gap up to the last query
        place = k.shape[2] - count - q.shape[2]
        out: Tensor
        out, lse = ops.windowed_attention(
            q, k[:, :, count:], v[:, :, count:], self.spec.scale, place, self.n_local
        )
        for part in pieces(q.shape[2]):
            first, first_lse = self._first(q[:, :, part], x.start + part.start, self.n_local)
            merged, both_lse = ops.merge_attention_with_lse(
                [first, out[:, :, part]], [first_lse, lse[:, :, part]]
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

    def _first_places(self, count: int) -> Tensor:
        """Return the positions in the text of the first `count` stored tokens: 0, 1 and so on,
        unless the conversation's history was cut."""
        return self.layer.stored_positions()[0, 0, :count]

    def _first(self, q: Tensor, start: int, n_local: int) -> tuple[Tensor, Tensor]:
        """Attend from queries at positions from `start` on to the first tokens alone. Where these
        are further away than `n_local`, they are read as if they were n_local away. Return the
        attention [B H T D] and its log-sum-exp [B H T]."""
        count = self.first_keys.shape[2]
        places = torch.arange(start, start + q.shape[2], device=q.device)
        distance = places.unsqueeze(1) - self._first_places(count)
        turned = self.rope_table.rotate(self.first_keys, torch.zeros_like(places[:1])).to(q.dtype)
        far = self._logits(self.rope_table.move(q, places, n_local), turned)
        logits = torch.where(distance >= n_local, far, self._logits(q, self.store.k[:, :, :count]))
        logits = logits.masked_fill(distance < 0, float("-inf"))
        weights = logits.softmax(-1).to(q.dtype).flatten(2, 3)  # [B G g*T n_init]
        return (weights @ self.store.v[:, :, :count]).view_as(q), logits.logsumexp(-1).flatten(1, 2)

    def _logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the products of queries and keys times the layer's scale, q [B H T D], k [B G S D]
        -> [B G g T S], for g query heads of a group."""
        folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]).float() @ k.float().transpose(
            -1, -2
        )
        return folded.view(*k.shape[:2], self.spec.group, q.shape[2], -1) * self.spec.scale

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.rope_table.note_past(self.spec, self.layer.seen)


@dataclass(frozen=True, kw_only=True)
class LMInfinite(Method):
    """Define LM-Infinite, which reads a window of recent tokens and the first ones, by its
    parameter `n_init`: how many first tokens are always read. The paper's authors got the same
    results with 10 and 100."""

    dense_prefill: ClassVar[bool] = False
    window_names: ClassVar[Mapping[str, str]] = {"sinks": "n_init"}
    needs = (ROTATION,)
    tunable: ClassVar[Grids] = {"n_init": (1, 4, 10, 32, 100)}

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

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        tables = RopeTable.of_layers(specs, cache)
        return [
            Layer(spec, cache, self, LMInfiniteKeep(table))
            for spec, table in zip(specs, tables, strict=True)
        ]
