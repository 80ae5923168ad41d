"""Ranks all rows anew while the answer grows: after every so many tokens of it, a method that evicts
at the seal does so again, as kvpress's DecodingPress does (`target_size`, `compression_interval`;
github.com/NVIDIA/kvpress)."""

from __future__ import annotations

from dataclasses import dataclass

from methods.abilities.bounded_answer import Bound, CountedAnswer, CountedBound
from methods.abilities.keep_generated import policies_of
from methods.base import KVLayer, Method
from methods.layers.policy import Keep
from methods.layers.read import Read


@dataclass(frozen=True)
class EvictEvery(CountedAnswer):
    """Count the rows of prompt and answer in the method's budget, and after every `extra_rows`
    tokens of the answer evict down to the budget by the method's own rule. In between, a KV head
    holds up to so many rows more. The setting `evict_every` adds it."""

    @classmethod
    def refusal(cls, method: Method) -> str | None:
        if cls in method.takes:
            return method.takes[cls]
        kinds = policies_of(method)
        if any(issubclass(kind, Read) for kind in kinds):
            return "a step of it chooses among the rows that stay"
        if not any(issubclass(kind, Keep) for kind in kinds):
            return "it has no rule by which rows of an answer can go"
        return None if method.dense_prefill else "its prompt attends by the budget already"

    def error(self, method: Method, why: str) -> ValueError:
        name, every = type(method).__name__, self.extra_rows
        return ValueError(
            f"{name} takes no evict_every={every}, for {why}: leave it out, or choose a method that "
            "evicts at the seal, as SnapKV."
        )

    def start(self, layer: KVLayer) -> Ranking:
        super().start(layer)
        return Ranking(self.extra_rows)


class Ranking(CountedBound, capturable=True, of_each={}):
    """Let a layer evict again whenever so many tokens of the answer have come."""

    what = "evict_every"
    began = 0  # tokens seen when the answer began

    def most_rows(self) -> int | None:
        rows = super().most_rows()
        return (
            None
            if rows is None
            else self.layer.keeps.size(rows - self.extra_rows) + self.extra_rows
        )

    def asked(self) -> Bound | None:
        if self.bound is not None:  # the answer has begun
            return self.bound
        most = self.most_rows()
        return None if most is None else Bound(0, most, most - self.extra_rows)

    def lasts(self, bound: Bound) -> int:
        # after the first of the rankings that finds more rows than the budget
        rankings = max(0, bound.kept - self.store.length) // self.extra_rows + 1
        return self.store.length + rankings * self.extra_rows

    def after_seal(self) -> bool:
        self.began = self.layer.seen
        return super().after_seal()

    def steps_between(self, bound: Bound) -> int:
        return self.extra_rows

    def idle_steps(self) -> int:
        return self.extra_rows - (self.layer.seen - self.began) % self.extra_rows

    def before_step(self) -> None:
        bound, layer = self.bound, self.layer
        assert bound is not None
        if self.store.length <= bound.kept or (layer.seen - self.began) % self.extra_rows:
            return
        before, sealed = layer.evicted, layer.sealed
        layer.keeps.evict(bound.kept)
        layer.keeps.close(layer.evicted - before)
        layer.sealed, layer.prompt_rows = sealed, layer.store.length
        layer.dropped.later = None
        of_prompt = (layer.positions >= 0) & (layer.positions < layer.dropped.end)
        layer.dropped.prompt_left = of_prompt.sum(-1).double().mean(1)
