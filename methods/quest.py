"""Quest: reads the pages whose keys could reach the largest logits (arXiv 2406.10774).

The rule: per page of 16 tokens, counted from the prompt's first, the smallest and largest key per
channel are kept. No key of a page can have a larger product with q than sum_c max(q_c * max_c, q_c
* min_c); the pages with the largest bounds are read exactly. The first layers read everything.

Heads: the released evaluation chooses for each query head, even where heads share keys
(`select_per=query_head`). The budget is then one query head's, and `read_positions` is the group's
union, each row of which moves once. `kv_head` ranks by the largest bound of the group. All query
heads of latent attention (MLA) share one row, so they choose together, by their mean bound.

The ends: `last_page` gives the prompt's last page one place without a comparison, as the CUDA code
does with the page of the current token; `false` lets it compete, as in the evaluation code, which
reads no less than 3 pages whatever the budget; here a budget below `min_pages` pages is an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from kernels import ops
from kernels.ragged import filled, leading
from kernels.reference import Segment
from methods.abilities.kept_codec import KeptCodec
from methods.abilities.mass import Mass
from methods.base import (
    Attended,
    AttnInput,
    CacheState,
    Cost,
    KVLayer,
    LayerSpec,
    LayerWorkload,
    Reading,
)
from methods.budget import check_layers
from methods.layers import PolicyMethod, Read
from methods.parts import costs


class QuestRead(Read[int], capturable=True, of_each={"bounds": 2}):
    """Read in each step as many pages of prompt tokens as the budget holds, those whose keys could
    reach the largest logits. The prompt's last page may be shorter. Each KV head chooses for
    itself, or each query head."""

    method: Quest
    bounds: Tensor  # [B G P 2D], the largest and the smallest key of each page
    # heads may read different numbers of tokens, because some chose a shorter last page
    uneven = False

    def split(self, budget: int) -> int:
        return self.method.pages(budget, self.sealed)

    def prepare(self, plan: int) -> None:
        self.bounds = page_bounds(self.store.k, self.method.page_size)
        self.uneven = not self.method.last_page and self.sealed % self.method.page_size != 0

    def select(self, q: Tensor, top: int) -> Tensor:
        """Return the tokens of the `top` best pages for each selecting head, q [B H 1 D] ->
        [B H|G K]. Where a head chose the shorter last page, numbers from `sealed` (the prompt's
        length) on stand for missing tokens."""
        groups = q.view(q.shape[0], self.spec.num_kv_heads, -1, q.shape[3])
        whole = filled(ops.page_scores(groups, self.bounds))  # [B G g P]
        size = self.method.page_size
        last = (self.sealed - 1) // size
        if self.method.by_query_head(self.spec):
            whole = whole.flatten(1, 2)
        else:
            whole = whole.mean(2) if self.spec.values_in_keys else whole.amax(2)
        if not self.method.last_page:
            return leading(
                ops.token_rows(ops.top_k(leading(whole, last + 1), top), size), top * size
            )
        pages = ops.top_k(leading(whole, last), top - 1)
        return leading(ops.token_rows(pages, size, last), self._tokens(top))

    def read(self, x: AttnInput, plan: int) -> Tensor:
        rows = self.chosen(x.q, plan)
        absent = self.absent(rows)
        there = rows if absent is None else rows.clamp(max=self.sealed - 1)
        away = self.layer.far is not None
        pages = self.fetch(there) if away else self.candidates()._replace(rows=there)
        if absent is not None:
            pages = pages._replace(log_weights=torch.where(absent, float("-inf"), 0.0))
        return self.attend(x.q, self.weighted(pages), *self.always_read())

    def always_read(self) -> list[Segment]:
        # what came after the seal
        return [self.store.since(0 if self.layer.far is not None else self.sealed)]

    def candidates(self) -> Segment:
        return self.store.between(0, self.sealed)

    def absent(self, rows: Tensor) -> Tensor | None:
        return rows >= self.sealed if self.uneven else None

    def rows_of(self, rows: Tensor, plan: int) -> Tensor:
        return rows.masked_fill(rows >= self.sealed, -1)

    def _tokens(self, pages: int) -> int:
        """Return how many tokens `pages` chosen pages hold; with `last_page` one of them is the
        prompt's last page, which may be shorter."""
        size, sealed = self.method.page_size, self.sealed
        last = sealed - (sealed - 1) // size * size
        return (pages - 1) * size + last if self.method.last_page else pages * size

    def attended_under(self, plan: int) -> Attended:
        return Attended(self._tokens(plan), self.layer.stored - self.sealed)

    @property
    def reading(self) -> Reading:
        if self.weights is not None or not self.uneven or self.plan is None or self.rows is None:
            return super().reading
        read = (self.rows < self.sealed).sum(-1).double().mean(1)
        return read, self.attended_under(self.plan).generated

    def away(self, plan: int) -> tuple[int, int]:
        return 0, self.sealed

    def together_refusal(self) -> str | None:
        if self.plan is not None and self.uneven:
            return "last_page=false lets heads read different numbers of tokens"
        return super().together_refusal()


@dataclass(frozen=True, kw_only=True)
class Quest(PolicyMethod):
    """Define Quest, which reads the pages whose keys could reach the largest logits, by its
    parameters. `page_size`: tokens of a page. `min_pages`: how many pages a budget must hold.
    `dense_layers`: layers that read everything. `select_per`: whether query heads or KV heads
    choose. `last_page`: whether the prompt's last page is always read."""

    policies = (QuestRead,)
    offloads = True
    rows_stay = True
    takes = {Mass: None, KeptCodec: None}
    tunable = {"page_size": (4, 8, 16, 32), "last_page": (True, False)}

    page_size: int = 16
    min_pages: int = 3
    dense_layers: tuple[int, ...] = (0, 1)
    select_per: Literal["query_head", "kv_head"] = "query_head"
    last_page: bool = True

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(
                f"page_size={self.page_size} must be at least 1 token; 16 in the paper."
            )
        if self.min_pages < 1:
            raise ValueError(
                f"min_pages={self.min_pages} must be at least 1; 3 in the released evaluation."
            )
        if self.select_per not in ("query_head", "kv_head"):
            raise ValueError(
                f"select_per={self.select_per!r} is unknown: choose query_head or kv_head."
            )

    @property
    def smallest_budget(self) -> int:
        return self.min_pages * self.page_size

    def by_query_head(self, spec: LayerSpec) -> bool:
        """Return whether each query head of a layer chooses its own pages. The many that share latents
        choose together, by the mean of their bounds."""
        return self.select_per == "query_head" and not spec.values_in_keys

    def pages(self, budget: int, sealed: int) -> int:
        """Return how many whole pages a budget of `budget` tokens holds; all, if it covers the prompt."""
        return budget // self.page_size if budget < sealed else ceil(sealed / self.page_size)

    def reads_whole(self, case: LayerWorkload) -> bool:
        return super().reads_whole(case) or case.spec.index in self.dense_layers

    def cost(self, case: LayerWorkload) -> Cost:
        """Return the bytes that a layer's cache takes, moves and reads. If query heads choose, the
        moved bytes are an expectation: g heads of a group read together what 1 + (g-1)/4 heads that
        chose independently would. On SmolLM2 135M (g=3, 1K of an essay) that is 0.95 to 1.02 times
        what moves, at budgets of 5 to 50 %. Heads that agree less move more, at most g times one
        head's bytes."""
        if self.reads_whole(case):
            return costs.dense(case)
        pages = ceil(case.sealed / self.page_size)
        listed = read = min(case.sealed, self.pages(case.budget, case.sealed) * self.page_size)
        if self.by_query_head(case.spec):
            choices = 1 + (case.spec.group - 1) / 4
            read = round(case.sealed * (1 - (1 - read / case.sealed) ** choices))
            listed *= case.spec.group
        bounds = 2 * pages * case.key_bytes
        held = Cost(case.dense_bytes + bounds).reading(bounds + read * case.row_bytes)
        return (
            held
            + costs.sent_away(case, case.sealed, read)
            + costs.estimates(case, case.sealed, listed)
        )

    def check_model(self, spec: LayerSpec) -> None:
        check_layers("method.dense_layers", self.dense_layers, spec.num_layers)

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        return super().start(specs, cache.with_dense(self.dense_layers))


def page_bounds(keys: Tensor, size: int) -> Tensor:
    """Return the largest and then the smallest value of each channel over the keys of each page of
    `size` tokens; the last page may be shorter. keys [B G S D] -> [B G P 2D]"""
    whole = keys.shape[2] // size * size
    parts = [keys[:, :, :whole].unflatten(2, (-1, size))]
    if whole < keys.shape[2]:  # padding the last page would raise its bound
        parts.append(keys[:, :, whole:].unsqueeze(2))
    return torch.cat([torch.cat([pages.amax(3), pages.amin(3)], -1) for pages in parts], 2)
