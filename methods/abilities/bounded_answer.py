"""Bounds how many rows a layer holds while the answer grows: once the bound is reached, rows go
before a new token comes in. Either the generated tokens have a budget of their own, or the method's
budget counts the rows of prompt and answer together (TOVA, R-KV)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from methods.abilities.keep_generated import KeepGenerated, KeepScored
from methods.base import SELDOM, Ability, BudgetError, KVLayer, Method
from methods.layers.ability_state import AbilityState
from methods.layers.layer import Layer
from methods.layers.policy import Keep
from methods.layers.returned import unwritten


class Bound(NamedTuple):
    """Limit the rows that a store holds while the model decodes: if `most` rows are stored from row
    number `first` on, only `kept` of them stay before a new token comes in."""

    first: int
    most: int
    kept: int


@dataclass(frozen=True)
class BoundedAnswer(Ability):
    """Let each KV head keep at most `generated` generated tokens, the current one included. A policy
    says in `keep_generated(count, size)` which `size` of the last `count` stay, [B G size],
    numbered from 0 and ascending; by default the latest. `KeepGenerated` is in its place. The
    setting `budget_generated` adds it, as `Budget.generated`."""

    generated: int

    def error(self, method: Method, why: str) -> ValueError:
        name = type(method).__name__
        return BudgetError(
            f"{name} takes no budget of generated tokens, for {why}: leave out budget_generated."
        )

    def start(self, layer: KVLayer) -> AnswerBound:
        return AnswerBound()


@dataclass(frozen=True)
class CountedAnswer(Ability):
    """Count the rows of prompt and answer in the method's budget. When a new token has no room,
    `Keep.keep` is asked again. `extra_rows`: how many rows a KV head may hold beyond the budget
    before rows are dropped down to it."""

    budgets = "rows of prompt and answer"
    extra_rows: int = 0

    def start(self, layer: KVLayer) -> CountedBound:
        assert isinstance(layer, Layer)
        if layer.reads is not None or not isinstance(layer.keeps, Keep):
            raise ValueError(
                f"The budget of {type(layer.method).__name__} counts prompt and answer, so one Keep policy must say "
                "what stays of both, and none may choose what a step reads: leave out its other policies."
            )
        return CountedBound(self.extra_rows)


class AnswerBound(AbilityState, capturable=True, of_each={}):
    """Let generated tokens go when they are more than their budget."""

    what = "budget_generated"
    bound: Bound | None = None  # from the seal to the next turn; None: all tokens that come stay

    def asked(self) -> Bound | None:
        """Return the bound that the budget asks for in this layer; None for none."""
        budget = self.request.budget
        if budget is None or budget.generated is None or self.spec.index in budget.dense_layers:
            return None
        most = budget.generated
        return Bound(self.store.length, most, most - max(1, most // 8))

    def reached(self) -> Bound | None:
        """Return the bound for the answer that follows. None if the cache has no room for more
        tokens than the bound allows, so that it is never reached."""
        bound, request = self.asked(), self.request
        longest = self.store.length + request.capacity - self.layer.seen
        if bound is None or request.grows or longest > self.lasts(bound):
            return bound
        return None

    def lasts(self, bound: Bound) -> int:
        """Return how many rows a KV head holds when rows go for the first time."""
        return bound.first + bound.most

    @property
    def ranks(self) -> bool:
        """Return whether the method's own scores say which rows go."""
        return isinstance(self.rule, KeepScored)

    @property
    def rule(self) -> KeepGenerated | None:
        """Return the rule that settings give for what stays of an answer; None for the method's."""
        given = self.request.abilities
        return next((one for one in given if isinstance(one, KeepGenerated)), None)

    def after_seal(self) -> bool:
        self.bound = bound = self.reached()
        self.layer.most = None if bound is None else bound.first + bound.most
        if bound is not None and (room := self.layer.room(self.store.length)) < self.store.free:
            self.store.resize(room)
        return bound is not None

    def reopen(self) -> None:
        self.bound = None

    def capture_refusal(self) -> str | None:
        if self.bound is None or (steps := self.steps_between(self.bound)) >= SELDOM:
            return None
        return f"{self.what} lets tokens go every {steps} steps"

    def steps_between(self, bound: Bound) -> int:
        """Return how many steps lie between two before which rows go."""
        return bound.most - bound.kept

    def idle_steps(self) -> int:
        assert self.bound is not None
        return self.bound.first + self.bound.most - self.store.length

    def before_step(self) -> None:
        bound, layer = self.bound, self.layer
        assert bound is not None
        count = self.store.length - bound.first
        if count < bound.most:
            return
        with unwritten(layer) if self.cache.checks.take("drop") else nullcontext():
            given, rows = self.choose(count, bound.kept)
        layer.check_rows(
            f"{given} returned", rows, count, heads=(layer.heads,), count=bound.kept, ascending=True
        )  # fmt: skip
        for policy in layer.policies:
            policy.forget(count, rows)
        self.let_go(count, rows)

    def choose(self, count: int, size: int) -> tuple[str, Tensor]:
        """Choose which `size` of the last `count` stored tokens stay. Return the name of the
        function that chose, for an error message, and the chosen rows."""
        attends = self.layer.attends
        given = f"{type(attends).__name__}.keep_generated"
        if self.rule is None and hasattr(attends, "keep_generated"):
            return given, attends.keep_generated(count, size)
        return given, (self.rule or KeepGenerated()).choose(self.layer, count, size)

    def let_go(self, count: int, rows: Tensor) -> None:
        """Drop those of the last `count` stored tokens (the generated ones, or all) that rows [B
        heads K] do not name. The rows ascend and are numbered from the first of these `count`."""
        layer, kept = self.layer, rows.shape[2]
        places = layer.stored_positions()[..., -count:].gather(2, rows)
        layer.evicted += count - kept
        layer.store.keep_of_last(count, rows)
        if layer.stored > kept:
            layer.dropped.later = places
            return
        layer.positions = places
        layer.prompt_rows = kept
        layer.dropped.prompt_left = (places < layer.dropped.end).sum(-1).double().mean(1)


class CountedBound(AnswerBound, capturable=True, of_each={}):
    """Let tokens of prompt and answer go when they are more than the method's budget."""

    what = "the budget"
    ranks = True

    def __init__(self, extra_rows: int) -> None:
        self.extra_rows = extra_rows

    def most_rows(self) -> int | None:
        """Return how many rows of prompt and answer a KV head may hold after the tokens seen so far;
        None for any number."""
        budget, smallest = self.request.budget, self.method.smallest_budget
        rows = None if budget is None else budget.rows(self.layer.seen, self.spec.index)
        return None if rows is None or rows < smallest else rows + self.extra_rows

    def before_seal(self) -> None:
        self.layer.most = self.most_rows()  # what stays of the prompt gets no more room than this

    def asked(self) -> Bound | None:
        most = self.most_rows()
        return None if most is None else Bound(0, most, min(most - 1, most - self.extra_rows))

    @property
    def overwrites(self) -> bool:
        """Return whether one row goes before each step, and the new token can be written there."""
        assert self.bound is not None
        return self.steps_between(self.bound) == 1 and getattr(
            self.layer.keeps, "overwrites", False
        )

    def capture_refusal(self) -> str | None:
        return None if self.bound is None or self.overwrites else super().capture_refusal()

    def idle_steps(self) -> int:
        return super().idle_steps() - self.overwrites

    def before_step(self) -> None:
        super().before_step()
        assert self.bound is not None
        if self.store.length == self.bound.most - 1 and self.overwrites:
            self.layer.keeps.overwrite()
            self.layer.acting = [state for state in self.layer.acting if state is not self]

    def choose(self, count: int, size: int) -> tuple[str, Tensor]:
        keeps = self.layer.keeps
        return f"{type(keeps).__name__}.keep", keeps.keep(size)
