"""TriAttention: keeps the rows to which another text's queries would look from further on (arXiv
2604.04921).

The rule: before their rotation the queries of a head lie around a centre. A row's score is the logit
that this centre, of a calibration text, gives it from 1, 2, 4, ... 65536 tokens after the text, on
average; plus in each frequency the norm of the key times what the centre lacks of the queries' mean
norm. In each query head scores get mean 0 and variance 1. A prompt that fits into the budget stays.

These are the defaults of the released code (github.com/WeianMao/triattention), which computes the
logits as a series, from keys that it rotates back; a longer prompt is ranked with the answer, its
`allow_prefill_compression`. Held against its `score_keys_for_round` at c3744ee6: in three layers of
random tokens, with and without groups, all heads keep the same rows after each of six rankings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import ops
from kernels.rope import rotate, unrotate
from methods.abilities.bounded_answer import CountedAnswer
from methods.abilities.last_queries import EvictsWhileDecoding
from methods.abilities.merge import Merge
from methods.base import Ability, AttnInput, CacheState, KVLayer, LayerSpec, Plan
from methods.base.request import ROTATION
from methods.layers import Keep, Layer, between_ends

FARTHEST = 65536  # positions after the text, the last over which scores are averaged


class TriKeep(Keep, capturable=True, of_each={}):
    """Keep the rows that have the best scores on average over the layers."""

    method: TriAttention
    whole = 0  # rows of a prompt that is not longer than the budget, which all stay
    mean: Tensor | None = None  # [B G S] fp32, in the first layer, until the last has chosen
    ranked = 0  # tokens of the text for which `mean` was computed

    def __init__(self, policies: list[TriKeep]) -> None:
        self.policies = policies  # of all layers that evict, in their order
        policies.append(self)

    def keep(self, size: int) -> Tensor:
        first = self.policies[0]
        if first.mean is None or first.ranked != self.layer.seen:
            # a layer that is timed alone (bench layer) has others beside it that hold nothing
            filled = [policy for policy in self.policies if policy.store.length]
            scores = [policy.scores() for policy in filled]
            first.mean = torch.stack([x.to(scores[0].device) for x in scores]).mean(0)
            first.ranked = self.layer.seen
        plan = Plan(self.whole, 0, size - self.whole)
        best = ops.top_k(first.mean.to(self.store.k.device), plan.top)
        if self is self.policies[-1]:
            first.mean = None
        return between_ends(best, plan, self.store.length)

    def scores(self) -> Tensor:
        """Return the scores of all rows that may go, [B G S] fp32."""
        centre, missing = self.request.prepared[self.spec.index]  # type: ignore[index]
        keys = self.store.k[:, :, self.whole :].float()
        offsets = 2 ** torch.arange(FARTHEST.bit_length(), device=keys.device)
        cos, sin = (x.float() for x in self.spec.rope(self.layer.seen + offsets))
        far = rotate(centre[None, :, None].expand(-1, -1, len(offsets), -1), cos, sin)
        # [G g D] and [G g R/2]
        far, missing = (x.unflatten(0, (keys.shape[1], -1)) for x in (far[0].mean(1), missing))
        pairs = keys[..., : 2 * missing.shape[2]].unflatten(3, (2, -1))
        stretch = (cos[0, 0].square() + sin[0, 0].square()).sqrt()[: missing.shape[2]]
        logits = far @ keys.mT + (missing * stretch) @ pairs.norm(dim=3).mT  # [B G g S]
        spread = logits.std(-1, unbiased=False, keepdim=True).clamp(min=1e-6)
        return ((logits - logits.mean(-1, keepdim=True)) / spread).amax(2)

    def close(self, evicted: int) -> None:
        self.whole = 0 if self.layer.evicted else self.store.length

    def reopen(self) -> None:
        self.whole = 0


@dataclass(frozen=True, kw_only=True)
class TriAttention(EvictsWhileDecoding):
    """Define TriAttention, which keeps rows by what queries of another text would give them from further
    on, by its parameters. `buffer`: how many rows come on top of the budget before rows are
    dropped. `calibration_tokens`: how long the other text is."""

    needs = (ROTATION,)
    takes = {Merge: "it holds no queries, whose weights say what is merged"}

    buffer: int = 128
    calibration_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("buffer", "calibration_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not enough: give at least 1 token."
                )

    @property
    def window(self) -> int:
        return 0

    @property
    def abilities(self) -> tuple[Ability, ...]:  # type: ignore[override]
        return (CountedAnswer(self.buffer),)

    def prepare(
        self, specs: Sequence[LayerSpec], observe: Callable[[int], Iterator[AttnInput]]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Return for each layer, by its number, the centres of the queries of a calibration text
        before their rotation [H D], and in each frequency the mean norm of these queries less that
        of their centre [H R/2], fp32."""
        return {
            spec.index: centred(x)
            for spec, x in zip(specs, observe(self.calibration_tokens), strict=True)
        }

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        budget, alike = cache.request.budget, list[TriKeep]()
        dense = () if budget is None else budget.dense_layers
        return [
            Layer(spec, cache, self, TriKeep([] if spec.index in dense else alike))
            for spec in specs
        ]


def centred(x: AttnInput) -> tuple[Tensor, Tensor]:
    """Return the mean of queries before their rotation [H D], and the mean of their norms in each
    frequency less the norm of that mean [H R/2]."""
    queries = unrotate(x.q.float(), x.cos.float(), x.sin.float())[0]  # [H T D]
    width = x.cos.shape[-1]

    def norms(queries: Tensor) -> Tensor:
        return queries[..., :width].unflatten(-1, (2, -1)).norm(dim=-2)

    centre = queries.mean(1)
    return centre, norms(queries).mean(1) - norms(centre)
