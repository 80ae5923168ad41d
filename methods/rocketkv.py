"""RocketKV: evicts a part of the prompt for good, then selects among the rest in each step (arXiv
2502.14051).

The rule: the first stage, at the seal, is SnapKV with votes pooled over far more tokens, and one
choice per KV head. The second stage, in each step, is hybrid sparse attention. For each page of
kept tokens the largest and the smallest value of each channel of its keys are stored (as in Quest).
A step reads these only in the channels where the group's query heads are largest (as in SparQ).
Softmax weights of these products are summed over the group, and the tokens of the best pages are
read exactly. The window's tokens count towards what the first stage keeps.

The budget: the paper's counts, in tokens, all that a step reads: half of it to find tokens, half to
attend to them. Ours counts only the latter, so a budget of b is the paper's t = 2b. c = S/t is what
the paper calls the compression ratio. `budget_rule=paper` gives t, of which half is selected.

The split: the first stage keeps S/c**split tokens; split=null takes the paper's min(0.2 + 0.06 log2
c, 0.8). What remains of c is divided evenly between pages and channels if `page_size` and `r` are
null. A page may be read in part, by its first tokens. A large budget leaves parts of the method
without work: from 19 % of the prompt on, a page has one token, and from 50 % on neither stage
leaves anything out. A layer's `fallback` says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, log2, sqrt

from torch import Tensor

from kernels import ops
from kernels.ragged import leading
from methods.abilities.kept_codec import KeptCodec
from methods.base import Cost, LayerSpec, LayerWorkload, Plan
from methods.layers import Select
from methods.parts import costs
from methods.quest import page_bounds
from methods.snapkv import SnapKeep, SnapKV
from methods.tiers.rows import room_for


class RocketKeep(SnapKeep, capturable=True, of_each={"last": None}):
    """Evict a part of the prompt for good, when it is complete: the first of RocketKV's two
    stages."""

    method: RocketKV

    def size(self, budget: int) -> int:
        return self.method.keeps(budget, self.layer.seen)


class RocketRead(Select, capturable=True, of_each={"bounds": 3, "channels": None}):
    """Select in each step among the tokens that the first stage has kept, by a few channels of the
    bounds of their pages: the second of RocketKV's two stages. There are no sinks and no window:
    all kept tokens compete."""

    method: RocketKV
    # [B G 2D P], the largest key of each page, then the smallest; [B G D P] for pages of one token
    bounds: Tensor
    size: int
    channels: int

    def split(self, budget: int) -> Plan:
        return Plan(0, 0, budget)

    def index(self, keys: Tensor) -> None:
        assert self.plan is not None
        top, kept, head_dim = self.plan.top, keys.shape[2], self.spec.head_dim
        self.layer.fallback = self.method.left_out(top, kept, self.layer.seen, head_dim)
        self.size, self.channels = self.method.pages(top, kept, head_dim)
        by_channel = (keys if self.size == 1 else page_bounds(keys, self.size)).mT
        *sizes, pages = by_channel.shape
        self.bounds = keys.new_empty((*sizes, room_for(pages, keys.device)))[..., :pages].copy_(
            by_channel
        )

    def select(self, q: Tensor, top: int) -> Tensor:
        groups = q.view(q.shape[0], self.spec.num_kv_heads, self.spec.group, -1)
        # per page the largest key where the group's q is positive, else the smallest, which is stored after the largest
        channels, picked, _ = ops.pick_channels(
            groups, self.channels, self.spec.scale, False, self.size > 1
        )
        # of each token
        weights = ops.channel_weights(picked, self.bounds, channels, 1.0, "sum", self.size)
        return ops.top_k(leading(weights, self.sealed), top)

    def form(self) -> int | None:
        """Return the tokens of a page. Sequences must share it to take steps together, because
        bounds of pages of one token have another shape; None if everything is read."""
        return None if self.plan is None else self.size


@dataclass(frozen=True, kw_only=True)
class RocketKV(SnapKV):
    """Define RocketKV, which evicts a part of the prompt and selects among the rest in each step,
    by its parameters: SnapKV's and three more. `split` says how much of the compression eviction
    does, from 0 (it evicts nothing) to 1 (all). `page_size`: tokens of a page. `r`: channels of a
    page's bounds that are read. None lets the budget decide."""

    policies = (RocketKeep, RocketRead)
    offloads = True
    takes = {KeptCodec: None}
    tunable = {**SnapKV.tunable, "kernel": (1, 3, 7, 15, 31, 63, 95)}

    kernel: int = 63
    split: float | None = None
    page_size: int | None = None
    r: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select_per != "kv_head":
            raise ValueError(
                "select_per=query_head is SnapKV's alone: RocketKV chooses once per KV head."
            )
        if self.split is not None and not 0 <= self.split <= 1:
            raise ValueError(f"split={self.split} is not a share: give 0 to 1, or null.")
        for name, value in (("page_size", self.page_size), ("r", self.r)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1; null lets the budget decide.")

    @property
    def smallest_budget(self) -> int:
        """Return half of the window and one token: the first stage keeps at least twice the budget,
        and that must hold the window and one token more."""
        return self.window // 2 + 1

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        """Return the tokens read when the budget is counted as in RocketKV's paper: half of it,
        since finding tokens takes as much of it as attending to them. `budget(n)`: the budget in
        tokens for a prompt of n; `sealed`: the prompt's length."""
        tokens = budget(sealed)
        return tokens if tokens >= sealed else tokens // 2

    def keeps(self, budget: int, seen: int) -> int:
        """Return how many of `seen` prompt tokens the first stage keeps; in each step the second
        stage then selects `budget` of them."""
        ratio = max(1.0, seen / (2 * budget))
        split = min(0.2 + 0.06 * log2(ratio), 0.8) if self.split is None else self.split
        return min(seen, max(2 * budget, int(seen / ratio**split)))

    def pages(self, budget: int, kept: int, head_dim: int) -> tuple[int, int]:
        """Return how many tokens a page has, and how many channels of its bounds are read, so that
        scoring `kept` tokens costs about as much as reading the `budget` selected ones."""
        ratio = max(1.0, kept / (2 * budget))
        size = self.page_size or min(floor(ratio), ceil(sqrt(ratio)))
        return size, self.r or min(head_dim, max(1, round(head_dim * size / ratio)))

    def left_out(self, budget: int, kept: int, seen: int, head_dim: int) -> str | None:
        """Return, as a sentence for reports, which parts of the method do nothing because the
        budget is so large, for a prompt of `seen` tokens of which `kept` stay; None if all work.
        Parts that a parameter switches off are not named."""
        size, _ = self.pages(budget, kept, head_dim)
        without = [
            *["eviction"] * (kept == seen and self.split != 0),
            *["pages (each has one token)"] * (size == 1 and self.page_size != 1),
        ]
        return f"so large a budget leaves out {' and '.join(without)}" if without else None

    def cost(self, case: LayerWorkload) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case)
        kept = self.keeps(case.budget, case.sealed)
        size, channels = self.pages(case.budget, kept, case.spec.head_dim)
        bounds = ceil(kept / size) * case.key_bytes * (1 if size == 1 else 2)
        # of each channel one bound
        scored = ceil(kept / size) * channels * case.key_bytes // case.spec.head_dim
        read = case.budget * case.row_bytes + scored
        held = (costs.evict(replace(case, codec=None), kept) + Cost(bounds)).reading(read)
        return held + costs.sent_away(case, kept, case.budget)

    def check_model(self, spec: LayerSpec) -> None:
        if self.r is not None and self.r > spec.head_dim:
            raise ValueError(
                f"r={self.r} is more than the model's head size {spec.head_dim}: choose at most that."
            )
