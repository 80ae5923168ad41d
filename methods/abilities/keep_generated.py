"""Says which generated tokens stay when an answer has more than its budget (`BoundedAnswer`): the
newest, those with the best scores, or a random sample.

The random sample is that of Random Attention (arXiv 2609.03430; the mode `random_pp` of
github.com/SalesforceAIResearch/Random-Attention): the prompt stays, which is what a budget that
covers it says, the `NEWEST` rows stay as well, and of the other rows of the answer each KV head keeps
a sample of its own, drawn anew and uniformly each time that rows go. The authors let rows go when
`NEWEST` further ones have come and count the prompt in the budget; here it is an eighth of the
budget for generated tokens, which is the same at 8 * NEWEST."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from methods.base import Ability, BudgetError, Method, Plan
from methods.layers.indices import between_ends
from methods.layers.layer import Layer
from methods.layers.read import Read

NEWEST = 64  # rows that no draw lets go, or half of those that stay if these are fewer


def policies_of(method: Method) -> list[type]:
    """Return the classes of policies that `method` names for its layers."""
    return [kind for kind in getattr(method, "policies", ()) if isinstance(kind, type)]


@dataclass(frozen=True)
class KeepGenerated(Ability):
    """Keep the newest generated tokens. The setting `keep_generated` adds this ability or one of its
    kinds; without it a policy may have a rule of its own, `keep_generated(count, size)`."""

    def error(self, method: Method, why: str) -> ValueError:
        return BudgetError(
            f"{type(method).__name__} takes no keep_generated, for {why}: leave it out, or choose newest or random."
        )

    def choose(self, layer: Layer, count: int, size: int) -> Tensor:
        """Choose which `size` of the last `count` stored tokens of `layer` stay, [B heads size],
        numbered from 0 and ascending."""
        latest = torch.arange(count - size, count, device=layer.request.device)
        return latest.expand(layer.request.batch, layer.heads, -1)


@dataclass(frozen=True)
class KeepScored(KeepGenerated):
    """Keep the generated tokens that the method's own scores put first: a policy says so in
    `best_generated(count, size)`, or by the rule that it has anyway, `keep_generated(count, size)`.
    """

    @classmethod
    def refusal(cls, method: Method) -> str | None:
        kinds = policies_of(method)
        attend = [kind for kind in kinds if issubclass(kind, Read)] or kinds
        hooks = ("best_generated", "keep_generated")
        if any(hasattr(kind, hook) for kind in attend for hook in hooks):
            return None
        return "it does not score generated tokens"

    def choose(self, layer: Layer, count: int, size: int) -> Tensor:
        attends = layer.attends
        best = getattr(attends, "best_generated", None) or attends.keep_generated  # type: ignore[attr-defined]
        return best(count, size)


@dataclass(frozen=True)
class KeepRandom(KeepGenerated):
    """Keep the newest generated tokens and a random sample of the others, another in each head. A
    draw depends on `seed` (that of the run), the example, the layer and the length of the text so far.
    So a resumed run repeats it, and a sequence draws in a batch what it draws alone."""

    seed: int

    def choose(self, layer: Layer, count: int, size: int) -> Tensor:
        plan = Plan(0, min(NEWEST, size // 2), size - min(NEWEST, size // 2))
        place = f"{self.seed}/{layer.cache.example}/{layer.spec.index}/{layer.seen}"
        draw = torch.Generator().manual_seed(Random(place).getrandbits(63))
        numbers = torch.rand(1, layer.heads, count - plan.local, generator=draw)
        drawn = numbers.topk(plan.top).indices.to(layer.request.device)
        return between_ends(drawn, plan, count).expand(layer.request.batch, -1, -1)


RULES: dict[str, type[KeepGenerated]] = {
    "newest": KeepGenerated,
    "score": KeepScored,
    "random": KeepRandom,
}
