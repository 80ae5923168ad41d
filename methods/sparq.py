"""SparQ: finds each step's tokens by approximate logits from a few channels of the keys (arXiv
2312.04985).

The rule: per KV head, the r channels are taken in which the query heads are largest (sum of |q|
over the group); q and k are multiplied in these alone. Dividing by the root of the share of |q|
that they cover makes the logits of different query heads comparable; they are summed over the group
without a softmax, and the best tokens are read exactly. `mean_value` mixes the mean of all values
into the output, in the part that the approximate softmax gives to tokens that are not read.

Storage: `channel_copy` keeps the searched keys a second time, one channel per row, so that scoring
reads r/D of them instead of picking from all, for 1.5 times the memory. With placement=host, keys,
values and that copy lie on the host; each step moves r channels of the keys and the selected rows.
Without the copy a GPU reads the numbers of these channels one by one over the bus, 32 bytes for
each. While a selection is reused (`reuse_steps`), so is its share of unread tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernels import ops
from kernels.mean_value import with_mean
from kernels.reference import Segment
from methods.abilities.kept_codec import KeptCodec
from methods.base import AttnInput, Cost, CostError, LayerSpec, LayerWorkload, Plan, Takes
from methods.layers import Select
from methods.layers.windowed import Windowed
from methods.parts import costs
from methods.pools import rows_for
from methods.pools.batched import BatchedHostRows
from methods.tiers.rows import Rows


class SparQRead(
    Select, capturable=True, of_each={"by_channel": 3, "value_sum": None, "covered": None}
):
    """Read in each step the prompt tokens with the largest approximate logits, which come from a
    few channels of queries and keys. With `mean_value`, the mean of all values stands for the
    tokens that are not read; the sum of values and the share of unread tokens are kept for that
    alone."""

    method: SparQ
    by_channel: Rows | BatchedHostRows | Tensor | None = None  # the middle keys [B G D M]
    value_sum: Tensor  # [B G 1 D] fp32, over every token so far
    # of the selection that is being read for the first time: each group's queries, and behind them the same in the
    # picked channels alone, not scaled, [B G 2g D], and the log-sum-exps that parts of the middle tokens get from
    # the latter, [B G g P], in fp32
    approximate: tuple[Tensor, Tensor] | None = None
    value: Tensor | None = None  # [B G 1 D], of the newest token, while a step attends
    covered: Tensor  # [B G g 1] fp32, the share of the approximate softmax on the tokens read

    def index(self, keys: Tensor) -> None:
        if self.method.channel_copy:
            self.by_channel = rows_for(keys.transpose(2, 3), self.cache, self.spec.index)
        if self.method.mean_value:
            self.value_sum = self.store.v.sum(2, keepdim=True, dtype=torch.float32)

    def select(self, q: Tensor, top: int) -> Tensor:
        groups = q.view(q.shape[0], self.spec.num_kv_heads, self.spec.group, -1)
        mean_value = self.method.mean_value
        channels, picked, both = ops.pick_channels(
            groups, self.method.r, self.spec.scale, mean_value, False
        )
        sums, lse = self._scores(picked, channels)
        if both is not None:
            self.approximate = both, lse
        return ops.top_k(sums, top)

    def attend(self, q: Tensor, *segments: Segment) -> Tensor:
        """Attend to segments under one softmax, q [B H 1 D] -> [B H 1 D]. With `mean_value`, mix in
        the mean of all values. After a selection, the approximate queries (zero in all but the
        picked channels) attend to the same rows in the same pass, to measure how much of their
        softmax lies on the rows read (`covered`)."""
        (value, self.value), count = (self.value, None), self.store.count(self.layer.away)
        if value is None:
            return super().attend(q, *segments)
        if self.approximate is None:
            self.value_sum += value
            return with_mean(super().attend(q, *segments), self.covered, self.value_sum, count)
        (both, middle), self.approximate = self.approximate, None
        # which segment `select` chose
        chosen, sinks = 1 if self.layer.far is None else 0, self.spec.sink_logits
        out, self.covered = ops.attention_with_mean(
            both, segments, self.spec.scale, chosen, middle, sinks, self.value_sum, value, count
        )
        return out

    def read(self, x: AttnInput, plan: Plan) -> Tensor:
        self.value = x.v if self.method.mean_value else None
        return super().read(x, plan)

    def lend(self, x: AttnInput) -> Tensor:
        # the sum of all values holds the step's own already
        return super().lend(replace(x, v=torch.zeros_like(x.v)))

    def _scores(self, picked: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the approximate logits of the middle tokens, which are all between sinks and
        window, summed over each group's query heads, [B G M], and each head's log-sum-exps of parts of
        the tokens, [B G g P].
        picked [B G g r]: queries in the channels [B G r]. Keys may lie on the host; then at most
        these channels of them move."""
        copy, far, fetch = self.by_channel, self.layer.far, self.cache.fetch
        if isinstance(copy, BatchedHostRows):
            keys = fetch(partial(copy.in_place, channels.shape[2])).wait()
        elif far is not None and (copy is None or isinstance(copy, Rows)):
            keys = (
                far.channels(channels)
                if copy is None
                else fetch(partial(copy.gather, channels)).wait()
            )
            channels = torch.arange(channels.shape[2], device=channels.device).expand_as(channels)
        elif isinstance(copy, Rows):
            keys = fetch(partial(copy.first, self.spec.head_dim)).wait()
        else:
            keys = self.middle().k.mT if copy is None else copy
        return ops.channel_sums(picked, keys, channels)

    def forget(self, count: int, rows: Tensor) -> None:
        """Subtract the values of dropped tokens from the sum of all values, whose mean stands for
        tokens that are not read: of the last `count` tokens all but `rows` [B G K] are dropped."""
        if self.plan is not None and self.method.mean_value:
            last = self.store.v[:, :, -count:]
            self.value_sum += ops.gather_rows(last, rows).sum(2, keepdim=True, dtype=torch.float32)
            self.value_sum -= last.sum(2, keepdim=True, dtype=torch.float32)

    def reopen(self) -> None:
        self.by_channel = None  # the next seal copies the keys of a longer prompt

    def together_refusal(self) -> str | None:
        if self.layer.far is not None and not self.method.channel_copy:
            return "channels are picked from the keys of one sequence after the other"
        return super().together_refusal()


@dataclass(frozen=True, kw_only=True)
class SparQ(Windowed):
    """Define SparQ, which finds tokens by a few channels of their keys, by its parameters. `r`: how
    many channels of a key are read. `mean_value`: whether the mean of all values stands for unread
    tokens. `channel_copy`: whether keys are stored a second time, channel by channel. `sinks`,
    `recent_ratio`: how many first and last tokens are always read."""

    policies = (SparQRead,)
    offloads = True
    rows_stay = True
    tunable = {
        **Windowed.tunable,
        "r": (4, 8, 16, 32),
        "mean_value": (True, False),
    }

    r: int = 16
    sinks: int = 0
    recent_ratio: float = 0.25
    mean_value: bool = True
    channel_copy: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r < 1:
            raise ValueError(
                f"r={self.r} must be at least 1: it is the number of channels of a key that are read."
            )

    @property
    def takes(self) -> Takes:  # type: ignore[override]
        # without it, channels are read from plain keys
        return {KeptCodec: None} if self.channel_copy else {}

    def cost(self, case: LayerWorkload) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case)
        plan, spec = self.split(case.budget), case.spec
        # of the middle keys
        column = spec.num_kv_heads * (case.sealed - plan.sinks - plan.local) * case.element_bytes
        copy = column * spec.head_dim if self.channel_copy else 0
        means = (
            costs.FP32 * (spec.num_kv_heads * spec.head_dim + spec.num_heads)
            if self.mean_value
            else 0
        )
        channels = Cost(copy).reading(self.r * column)
        return (
            costs.select(case, plan, means) + channels + costs.offload(case, copy, self.r * column)
        )

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        """Return the tokens read when the budget is counted as in SparQ's paper: its k is a share
        of the whole prompt and includes the window. Sinks come on top, as in the comparison of
        methods in the paper of PQCache (arXiv 2407.12820). `budget(n)`: the budget in tokens for a
        prompt of n; `sealed`: the prompt's length."""
        return self.sinks + budget(sealed)

    def at_communication(self, share: float, head_dim: int) -> SparQ:
        """Return this method reading a `share` of a key's `head_dim` channels to choose tokens. The
        paper of PQCache (arXiv 2407.12820) compares methods at the same share."""
        r = int(share * head_dim)
        if not 1 <= r <= head_dim:
            raise CostError(
                f"comm={share} would give SparQ r={r} channels of a key of {head_dim}: choose {1 / head_dim} to 1."
            )
        return replace(self, r=r)

    def check_model(self, spec: LayerSpec) -> None:
        if self.r > spec.head_dim:
            raise ValueError(
                f"r={self.r} is more than the model's head size {spec.head_dim}: choose at most that."
            )
