"""KVzip: keeps what the model looks at when it repeats its prompt (arXiv 2505.23416).

The rule: after the prefill the model is asked to repeat the prompt. The prompt is then fed again as
its answer, in pieces of `chunk` tokens. A key's score is the largest attention weight that any
query of the repeated piece gives it, over the query heads of its KV head. The softmax runs over the
first tokens, the piece, and the fed tokens up to the query's own. The keys with the largest scores
of all layers and heads together stay (`share`), so the same keys answer whatever is asked later.

The chat template's beginning is not repeated and stays, as in the authors' code. The first `sinks`
tokens stay as well, as in kvpress. Here both count within the budget, and a budget without room for
more is recorded as a `fallback`. Under protocol=prompt the question is repeated, too. A prompt
whose repetition goes beyond the model's window is refused; the authors' code would read it. The
total that a layer keeps is a multiple of its number of heads, so it differs from the authors' total
by less than that number. Weights are computed in fp32. What a further turn brings stays, as in the
authors' code.

Held against attention/score.py of github.com/snu-mllab/KVzip at 5d84729, on 700 tokens that SmolLM2
repeats in three pieces, at a ratio of 0.2: all scores are equal. Of the 12,600 kept keys 12,589 are
the same, because the totals of layers differ by up to 2 keys; under share=head all are the same. A
test compares with kvpress's press."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels import ops
from kernels.sink_logits import softmax
from methods.abilities.kept_codec import KeptCodec
from methods.abilities.repeat import Piece, Repeat
from methods.adakv import whole_shares
from methods.base import (
    Ability,
    AttnInput,
    CacheState,
    Cost,
    KVLayer,
    LayerSpec,
    LayerWorkload,
)
from methods.layers import Evict, Layer, PolicyMethod
from methods.parts import costs

QUERIES, ON_GPU = 64, 512  # whose weights are computed at a time


class ZipKeep(Evict, capturable=True, of_each={}):
    """Score the stored keys while the model repeats the prompt. When that is over, let the keys stay
    that have the largest scores of all layers and heads."""

    method: KVzip
    scores: Tensor | None = None  # [B G S] fp32, from the first repeated piece to the seal
    further = False  # a turn has been sealed already
    always = 0  # first tokens that stay: sinks, and the beginning of the chat template

    def __init__(self, ranking: _Ranking) -> None:
        self.ranking = ranking
        ranking.policies.append(self)

    def repeated(self, x: AttnInput, piece: Piece) -> None:
        if self.scores is None:
            self.scores = self.store.k.new_zeros(self.store.k.shape[:3], dtype=torch.float32)
        first = max(piece.head, min(self.method.sinks, piece.first))
        keys = self.store.k
        near = torch.cat([keys[:, :, :first], keys[:, :, piece.first : piece.end], x.k], 2).float()
        scores = self.scores[:, :, piece.first : piece.end]
        columns = slice(first, first + scores.shape[2])
        at_once = ON_GPU if x.q.is_cuda else QUERIES
        for start in range(0, x.q.shape[2], at_once):
            q = x.q[:, :, start : start + at_once]
            seen = near.shape[2] - x.k.shape[2] + start
            torch.maximum(
                scores, self._largest(q, near[:, :, : seen + q.shape[2]], columns), out=scores
            )
        self.always = max(piece.head, self.method.sinks)
        self.scores[:, :, : min(self.always, self.layer.spendable() or self.always)] = torch.inf

    def _largest(self, q: Tensor, keys: Tensor, columns: slice) -> Tensor:
        """Return the largest weight that each of the `columns` of keys [B G n D] receives from the
        queries of the last t keys, q [B H t D], as [B G columns]."""
        q = q.unflatten(1, (keys.shape[1], -1)).float() * self.spec.scale
        logits = (q.flatten(2, 3) @ keys.mT).unflatten(2, q.shape[2:4])  # [B G g t n]
        own = logits[..., -q.shape[3] :]
        own.masked_fill_(torch.ones_like(own[0, 0, 0], dtype=torch.bool).triu(1), float("-inf"))
        return softmax(logits, self.spec.sink_logits)[..., columns].amax((2, 3))

    def size(self, budget: int) -> int:
        if not self.further:
            if budget <= self.always:
                self.layer.fallback = f"{budget} first tokens stay: {self.always} are sinks or begin the chat template"
            return budget
        if budget < self.store.length:
            self.layer.fallback = (
                "only the first prompt is repeated, and what later turns bring stays"
            )
        return self.store.length

    def evict(self, size: int) -> None:
        if self.scores is None:
            raise ValueError(
                "KVzip has the model repeat its prompt, and was not told the token ids of this one: pass input_ids "
                "without padding, or use harness.Engine."
            )
        keys = self.scores.shape[2]
        rows = list[Tensor]()
        for scores, count in zip(self.scores, self.ranking.counts(self, size), strict=True):
            if self.method.share == "head":
                rows += ops.top_k(scores.unsqueeze(0), size)[0].sort(-1).values
                continue
            best = scores.flatten().topk(count).indices.sort().values  # one head after the other
            ends = keys * torch.arange(1, len(scores), device=best.device)
            rows += (best % keys).tensor_split(torch.searchsorted(best, ends).tolist())
        self.layer.retain_per_head(rows)

    def close(self, evicted: int) -> None:
        self.scores = None

    def reopen(self) -> None:
        self.further = self.layer.seen > 0


class _Ranking:
    """Hold the policies of all layers, whose keys compete for one budget."""

    def __init__(self) -> None:
        self.policies: list[ZipKeep] = []
        self._counts: dict[int, list[int]] = {}  # by layer that has not been asked for

    def counts(self, asking: ZipKeep, size: int) -> list[int]:
        """Return how many keys the heads of a layer keep together, by sequence. `size`: how many a
        head of it may keep on average."""
        request, spec = asking.request, asking.spec
        if asking.method.share != "model":
            return [size * spec.num_kv_heads] * request.batch
        if not self._counts:
            self._share()
        return self._counts.pop(spec.index)

    def _share(self) -> None:
        """Rank the keys of all layers that do not read everything. A layer keeps as many as it has
        among the best, rounded so that its heads have whole numbers on average."""
        sharing = [
            (policy.spec.index, policy.scores, size)
            for policy in self.policies
            if policy.scores is not None and (size := policy.layer.spendable()) is not None
        ]
        self.policies.clear()
        groups, keys = sharing[0][1].shape[1:]
        total = groups * sum(size for _, _, size in sharing)
        self._counts = {index: [] for index, _, _ in sharing}
        for scores in zip(*(scores for _, scores, _ in sharing), strict=True):
            ranked = torch.stack([layer.flatten().to(scores[0].device) for layer in scores])
            best = ranked.flatten().topk(total, sorted=False).indices // ranked.shape[1]
            won = best.bincount(minlength=len(ranked)).tolist()
            shares = whole_shares([count / groups for count in won], [keys] * len(ranked))
            for count, share in zip(self._counts.values(), shares, strict=True):
                count.append(share * groups)


@dataclass(frozen=True, kw_only=True)
class KVzip(PolicyMethod):
    """Define KVzip, which keeps the keys that get most attention while the model repeats its prompt,
    by its parameters. `chunk`: tokens of the prompt that are repeated at a time. `sinks`: how many
    first tokens always stay. `share`: whether all layers and heads share one budget (model), the
    heads of each layer do (layer), or every head has its own (head)."""

    takes = {KeptCodec: None}
    window_names = {"sinks": "sinks"}
    tunable = {
        "chunk": (500, 1000, 2000, 4000),
        "share": ("model", "layer", "head"),
    }

    chunk: int = 2000
    sinks: int = 4
    share: Literal["model", "layer", "head"] = "model"

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(
                f"chunk={self.chunk} repeats nothing: give at least 1 token, 2000 in the released code."
            )
        if self.sinks < 1:
            raise ValueError(
                f"sinks={self.sinks} may leave a head without a key: give at least 1, as 4."
            )
        if self.share not in ("model", "layer", "head"):
            raise ValueError(f"share={self.share!r} is unknown: choose model, layer or head.")

    @property
    def abilities(self) -> tuple[Ability, ...]:  # type: ignore[override]
        return (Repeat(self.chunk),)

    @property
    def smallest_budget(self) -> int:
        return self.sinks + 1

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        ranking = _Ranking()
        return [Layer(spec, cache, self, ZipKeep(ranking)) for spec in specs]

    def cost(self, case: LayerWorkload) -> Cost:
        return costs.dense(case) if self.reads_whole(case) else costs.evict(case, case.budget)
