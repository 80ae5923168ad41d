"""R-KV: keeps what is attended to and says nothing twice, while long answers are written (arXiv
2505.24133).

The rule: a token's score is `mix_lambda` times its importance minus (1 - mix_lambda) times its
redundancy. Each KV head keeps the tokens with the best scores, and the window.

Importance: the weights that the last `window` queries give to the token. They come from the largest
logit among the query heads of the KV head, are averaged over the queries, and of `kernel`
neighbours the largest counts.

Redundancy: the mean cosine similarity of the token's key to all keys, as a softmax over the tokens.
One similarity is left out for each key: that to the last of the keys that are more than `SIMILAR`
like it. So of tokens that repeat one another the last one stays.

The budget counts all rows of a KV head, prompt and answer. `buffer` rows may come on top; once
these are full, as many rows stay as the budget says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kernels import ops
from kernels.reference import unit_vectors
from methods.abilities.bounded_answer import CountedAnswer
from methods.abilities.last_queries import EvictsWhileDecoding, LastQueries
from methods.base import Ability, Plan
from methods.base.pieces import pieces
from methods.base.state import queues
from methods.layers import between_ends

# cosine similarity of two keys from which the later token may stand for the earlier one
SIMILAR = 0.5


class RKVKeep(LastQueries, capturable=True, of_each={"last": None}):
    """Keep the window, and of the other tokens those that the last queries attend to and whose keys
    are least like other keys."""

    method: RKV

    def keep(self, size: int) -> Tensor:
        plan = Plan(0, self.method.window, size - self.method.window)
        others, mix = self.store.length - plan.local, self.method.mix_lambda
        scores = mix * self._importance(others) - (1 - mix) * redundancy(self.store.k)[..., :others]
        return between_ends(ops.top_k(scores, plan.top), plan, self.store.length)

    def _importance(self, others: int) -> Tensor:
        """Return the pooled weights that the last queries give to the first `others` stored tokens,
        all but the window, [B G others] fp32."""
        assert self.queries is not None
        # [B G g w D]
        grouped = self.queries.unflatten(1, (self.spec.num_kv_heads, -1))
        # all queries of a group at once, so that its keys are read once
        logits = ops.row_scores(grouped.flatten(2, 3), self.store.k[:, :, :others])
        logits = logits.unflatten(2, grouped.shape[2:4]).amax(2)
        weights = (logits * self.spec.scale).softmax(-1).mean(2)
        return max_pool1d(weights, self.method.kernel, stride=1, padding=self.method.kernel // 2)


def redundancy(keys: Tensor) -> Tensor:
    """Return how much each key repeats others, keys [B G S D] -> [B G S] fp32: its mean cosine
    similarity to all keys, as a softmax over the tokens. Each key leaves out two similarities: that
    to itself, and that to the last key that is more than `SIMILAR` like it (the first key, if none
    is)."""
    # on a CPU one KV head after the other, whose memory serves the next
    at_once = keys.shape[1] if queues(keys.device) else 1
    parts = (_similarity(keys[:, part]) for part in pieces(keys.shape[1], at_once=at_once))
    return torch.cat([*parts], 1).softmax(-1).float()


def _similarity(keys: Tensor) -> Tensor:
    """Return the mean cosine similarity of each key to all keys, without the two that each key
    leaves out (see `redundancy`), keys [B G S D] -> [B G S] fp64."""
    units, last = unit_vectors(keys), ops.last_alike(keys, SIMILAR)
    itself = last == torch.arange(keys.shape[2], device=keys.device)
    with_last = torch.einsum("bgsd,bgsd->bgs", units, ops.gather_rows(units, last))
    left_out = with_last.masked_fill(itself, 0)
    sums = (units @ units.sum(2).unsqueeze(-1)).squeeze(-1) - units.norm(dim=-1).square()
    # in fp64, where the order in which a GPU adds changes nothing that is left in fp32
    return sums.double().scatter_add(2, last, -left_out.double()) / keys.shape[2]


@dataclass(frozen=True, kw_only=True)
class RKV(EvictsWhileDecoding):
    """Define R-KV, which keeps tokens that are attended to and unlike others, by its parameters.
    `window`: by how many of the last queries the choice is made, whose tokens stay. `buffer`: how many
    rows come on top of the budget before rows are dropped. `mix_lambda`: the weight of attention
    against redundancy, from 0 to 1. `kernel`: over how many neighbours weights are pooled, an odd
    number (1: none)."""

    policies = (RKVKeep,)
    tunable = {
        "mix_lambda": (0.01, 0.1, 0.5, 1.0),
        "window": (4, 8, 16, 32),
        "kernel": (1, 7, 15),
    }

    window: int = 8
    buffer: int = 128
    mix_lambda: float = 0.1
    kernel: int = 7

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(
                f"window={self.window} leaves no query to choose by: give at least 1, 8 as released."
            )
        if self.buffer < 1:
            raise ValueError(
                f"buffer={self.buffer} has no room for a new token: give at least 1, 128 as released."
            )
        if not 0 <= self.mix_lambda <= 1:
            raise ValueError(
                f"mix_lambda={self.mix_lambda} is no weight: give 0 to 1, 0.1 in the paper."
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"kernel={self.kernel} has no middle: give an odd number of tokens to pool, like 7."
            )

    @property
    def smallest_budget(self) -> int:
        return self.window + 1

    @property
    def abilities(self) -> tuple[Ability, ...]:  # type: ignore[override]
        return (CountedAnswer(self.buffer),)
