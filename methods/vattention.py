"""vAttention: reads the top tokens and a random sample of the others, as large as a bound on the
error asks (arXiv 2510.05688, ICLR 2026).

The rule: sinks, a window and the tokens with the largest true weights (the paper's oracle-top-k)
are read exactly. From the tokens between sinks and window a uniform sample is drawn with
replacement, and the terms of drawn tokens are divided by the probability of being drawn. The first
draws, a base sample, estimate the standard deviation s of a term and the softmax's denominator D.
By the central limit theorem, b = (z n s / (epsilon D))^2 draws from n tokens give D with a relative
error of at most epsilon with probability 1 - delta, where z is the quantile of 1 - delta/2. Every
head draws what it needs in every step, as far as the budget allows. Where the budget does not allow
it, nothing bounds the error; how often that happens is recorded (`capped_share`).

Measured on SmolLM2, with a prompt of 500 tokens and epsilon and delta at 0.05: with a base sample
of 24 tokens, 4.2 % of 9,000 steps of a head have a larger error, and a step reads 95 tokens besides
sinks and window. With the default base sample of 9 tokens, 7.5 % have a larger error. A budget of
100 tokens cuts 52 % of the samples short, and 25 % of the steps have a larger error.

Heads: as in the released code, each query head chooses (`select_per=query_head`). `kv_head` ranks
by the sum of a group's weights and draws for the head that needs most. The query heads of a group
share their draws, so a KV head reads only a few rows more than one query head. Latent attention
(MLA) has one row for all query heads, so there they choose as under `kv_head`.

Unlike the released code (sparse-attention-hub), s leaves out the top tokens, the quantile is
two-sided, the base sample is a part of the sample, and a row that is drawn twice counts twice.
Draws come from a counter (SplitMix64 of seed, layer, KV head and position), so a sequence draws the
same alone, in batches, in captured steps, and wherever its rows lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from kernels.sampled import MIX, Sample, signed
from methods.abilities.kept_codec import KeptCodec
from methods.base import Cost, LayerSpec, LayerWorkload, Plan
from methods.layers import Select
from methods.layers.layer import PolicyMethod
from methods.layers.weights import ChoiceWeights, always_lses
from methods.parts import costs


class VAttentionRead(Select, capturable=True):
    """Read in each step the middle tokens with the largest true weights, and a random sample of the
    others with weights that make up for those that were not drawn."""

    method: VAttention
    keys: Tensor | None = None  # [B G M D], the middle keys, if their rows have left the store

    def sent_away(self, tokens: Segment) -> None:
        self.keys = tokens.k.clone()

    def reopen(self) -> None:
        self.keys = None

    def select(self, q: Tensor, top: int) -> Tensor:
        """Return the top tokens and the draws of each choosing head, [B H|G top]; a token that was
        drawn again has no weight, and the first draw stands for all."""
        keys = self.middle().k if self.keys is None else self.keys
        among, heavy = keys.shape[2], self.method.top_of(top)
        grouped = q.view(q.shape[0], self.spec.num_kv_heads, self.spec.group, -1)
        logits, lses = ops.row_scores_with_lse(grouped, keys, self.spec.scale)
        always = always_lses(self.always_read(), grouped, self.spec).logsumexp(-1)
        lse = torch.logaddexp(always, lses.logsumexp(-1))  # of the whole softmax
        # one head alone, whose logits have the order of its weights
        if self.method.by_query_head(self.spec):
            logits, always, lse = (x.flatten(1, 2).unsqueeze(2) for x in (logits, always, lse))
            best = ops.top_k(logits.squeeze(2), heavy)
        else:
            weights = torch.add(-lse.unsqueeze(3), logits, alpha=self.spec.scale).exp_().sum(2)
            best = ops.top_k(weights, heavy)
        # the position of the current token, which captured steps have on the device, decides
        position = self.cache.counters.tensor(self.layer.seen, self.request.device)
        key = signed(self.method.seed * MIX[0] + self.spec.index * MIX[1])
        groups = self.spec.num_kv_heads
        drawn = ops.uniform_draws(position, key, groups, top - heavy, among)
        drawn = drawn.repeat_interleave(best.shape[1] // groups, 0).expand(len(q), -1, -1)
        rows = torch.cat([best, drawn], -1)
        sample = self.method.sample(among, self.spec.scale)
        added, wanted = ops.sampled_weights(logits, lse, always, rows, heavy, sample)
        self.cache.traffic.samples += wanted.numel()
        self.cache.traffic.tally("capped", (wanted > top - heavy).sum())
        assert self.weights is not None
        self.weights.log_weights = added
        return rows


@dataclass(frozen=True, kw_only=True)
class VAttention(PolicyMethod):
    """Define vAttention by its parameters: the error `epsilon` of the softmax's denominator and the
    probability `delta` of a larger one decide how many tokens are drawn. Of the budget after `sinks`
    and `window`, a share `top_ratio` are top tokens and the others the largest sample. `base_ratio`:
    the base sample, as a share of the tokens between sinks and window. `select_per`: whether query
    heads or KV heads choose."""

    policies = (VAttentionRead, ChoiceWeights)
    offloads = True
    takes = {KeptCodec: None}
    rows_stay = True
    window_names = {"sinks": "sinks"}
    tunable = {"epsilon": (0.05, 0.1, 0.2, 0.4), "top_ratio": (0.25, 0.5, 0.75)}

    epsilon: float = 0.05
    delta: float = 0.05
    sinks: int = 32
    window: int = 32
    top_ratio: float = 0.5
    base_ratio: float = 0.02
    select_per: Literal["query_head", "kv_head"] = "query_head"
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta", "top_ratio", "base_ratio"):
            if not 0 < (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must lie between 0 and 1.")
        if self.sinks < 0 or self.window < 0:
            raise ValueError(
                f"sinks={self.sinks} and window={self.window} are numbers of tokens, from 0."
            )
        if self.select_per not in ("query_head", "kv_head"):
            raise ValueError(
                f"select_per={self.select_per!r} is unknown: choose query_head or kv_head."
            )

    @cached_property
    def quantile(self) -> float:
        """Return the number of standard deviations that a normal variable exceeds, up or down, with
        probability `delta`."""
        return NormalDist().inv_cdf(1 - self.delta / 2)

    @property
    def smallest_budget(self) -> int:
        # a standard deviation needs two draws
        return self.sinks + self.window + ceil(2 / (1 - self.top_ratio))

    def split(self, budget: int) -> Plan:
        return Plan(self.sinks, self.window, budget - self.sinks - self.window)

    def by_query_head(self, spec: LayerSpec) -> bool:
        """Return whether each query head of a layer chooses its own tokens. The many that share latents
        choose together."""
        return self.select_per == "query_head" and not spec.values_in_keys

    def top_of(self, chosen: int) -> int:
        """Return how many of the chosen tokens of a step are top tokens; the others may be drawn."""
        return int(chosen * self.top_ratio)

    def sample(self, among: int, scale: float) -> Sample:
        """Return how tokens are drawn from `among`: with as many draws as it says, `among` times the
        mean of their terms, added to what is known, has a relative error above `epsilon` with
        probability `delta`."""
        least = max(2, int(among * self.base_ratio))
        return Sample(among, least, self.epsilon, self.quantile, scale)

    def cost(self, case: LayerWorkload) -> Cost:
        """Return the bytes that a layer's cache takes, moves and reads with the largest sample.
        Rows that are drawn twice are read once, so the expected number of different rows counts.
        For the top tokens of query heads, the union is estimated as for Quest's pages."""
        if self.reads_whole(case):
            return costs.dense(case)
        plan = self.split(case.budget)
        among, heavy = case.sealed - plan.sinks - plan.local, self.top_of(plan.top)
        if self.by_query_head(case.spec):
            choices = 1 + (case.spec.group - 1) / 4
            heavy_rows = among * (1 - (1 - heavy / among) ** choices)
        else:
            heavy_rows = heavy
        drawn = (among - heavy_rows) * (1 - (1 - 1 / among) ** (plan.top - heavy))
        keys = case.key_bytes
        index = Cost(among * keys if case.placement != "device" or case.codec is not None else 0)
        read = plan._replace(top=round(heavy_rows + drawn))
        return costs.select(case, read, index_bytes=0) + index.reading(case.sealed * keys)
