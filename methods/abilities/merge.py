"""CaM: merges values of rows that go while the answer grows into rows that stay (ICML 2024,
https://openreview.net/forum?id=LCTmppB165).

The rule: when a row goes, its value is shared out evenly among the next `NEIGHBOURS` rows that
stay, or it is dropped. A draw decides. The chance that the value is shared out is the attention
that the row has received in the steps of the answer, divided by the mean of what these neighbours
have received, and at most 1. As in kvpress's CAMPress, keys are left alone, the weights of the
query heads of a KV head are averaged, and the attention from the prompt's own queries does not
count. A draw depends on layer and position alone, so a run can be repeated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import ops
from kernels.sink_logits import column_sums
from methods.abilities.bounded_answer import CountedBound
from methods.base import Ability, KVLayer, LayerSpec, Method
from methods.layers.ability_state import AbilityState
from methods.layers.layer import Layer

NEIGHBOURS = 32  # kept rows into which a value is merged, as in kvpress


@dataclass(frozen=True)
class Merge(Ability):
    """Merge values of rows that a method drops while the answer grows by `rule`, which is "cam". Its
    `Keep` policy has the last queries in `queries`. The setting `merge` adds it."""

    rule: str

    @classmethod
    def refusal(cls, method: Method) -> str | None:
        drops = any(ability.budgets for ability in method.abilities)
        return method.takes.get(cls) if drops else "no rows go while its answer grows"

    def error(self, method: Method, why: str) -> ValueError:
        name = type(method).__name__
        return ValueError(
            f"{name} takes no merge={self.rule}, for {why}: leave it out, or choose TOVA or R-KV."
        )

    def check_model(self, spec: LayerSpec) -> None:
        if spec.values_in_keys:
            raise ValueError(
                f"merge={self.rule} merges values and leaves keys alone, and in latent attention (MLA) one row is "
                "both: leave it out."
            )

    def start(self, layer: KVLayer) -> Merging:
        assert isinstance(layer, Layer)
        return Merging()


class Merging(AbilityState, capturable=True, of_each={}):
    """Hold the attention that each row of a layer has received in the steps of the answer."""

    received: Tensor | None = None  # [B G S] fp32; None before the first step
    noted = 0  # tokens that were seen when the last weights were added

    def after_seal(self) -> bool:
        self.received = None
        self.noted = self.layer.seen  # the prompt's last query is not of the answer
        return any(
            isinstance(state, CountedBound) and state.bound is not None
            for state in self.layer.states
        )

    def before_step(self) -> None:
        """Add the weights of the last step, whose query the layer's policy has kept."""
        if self.noted == self.layer.seen:
            return
        self.noted = self.layer.seen
        queries = self.layer.keeps.queries[:, :, -1:]
        # [B H S]
        weights = column_sums(queries, self.store.k, self.spec.scale, self.spec.sink_logits)
        weights = weights.unflatten(1, (self.spec.num_kv_heads, -1)).mean(2)
        if self.received is not None:
            known = self.received.shape[2]
            weights[..., :known] += self.received
        self.received = weights

    def forget(self, count: int, rows: Tensor) -> None:
        """Merge the values of the rows that are about to go: of all `count` stored rows, only rows
        [B G K] stay."""
        self.before_step()
        if self.received is None:
            return
        gone = (
            torch.ones_like(self.received)
            .scatter_(2, rows, 0)
            .argsort(dim=2, descending=True, stable=True)
        )
        gone = gone[..., : count - rows.shape[2]].contiguous()  # [B G E], ascending
        after = torch.searchsorted(rows.contiguous(), gone, right=True)
        # among the rows that stay
        places = after.unsqueeze(3) + torch.arange(NEIGHBOURS, device=rows.device)
        there = places < rows.shape[2]  # [B G E N]
        number = there.sum(3)
        places = places.clamp(max=rows.shape[2] - 1).flatten(2)
        beside = self.received.gather(2, rows.gather(2, places)).view(there.shape) * there
        chances = self.received.gather(2, gone) / (beside.sum(3) / number.clamp(min=1))
        drawn = self.draws(chances.nan_to_num(nan=0.0, posinf=1.0).clamp(0, 1))
        share = drawn / number.clamp(min=1)
        values = self.store.v
        moved = ops.gather_rows(values, gone) * share.unsqueeze(3)
        moved = (moved.unsqueeze(3) * there.unsqueeze(4)).flatten(2, 3)  # [B G E*N D]
        kept = ops.gather_rows(values, rows).float()
        merged = kept.scatter_add_(2, places.unsqueeze(3).expand(moved.shape), moved.float())
        self.layer.write(rows, v=merged.to(values.dtype))
        self.received = self.received.gather(2, rows)

    def draws(self, chances: Tensor) -> Tensor:
        """Draw a number for each chance [B G E]: 1 with that chance, else 0. All sequences get the
        same draws."""
        seed = self.layer.seen * self.spec.num_layers + self.spec.index
        draw = torch.Generator().manual_seed(seed)
        return (
            torch.rand(1, *chances.shape[1:], generator=draw).to(chances.device) < chances
        ).float()
