"""Defines the budget: how many sealed prompt tokens one selecting head may read in a decode step.

A selecting head is a KV head, or a query head if a method lets each choose for itself (Quest,
SnapKV's `select_per`); a KV head then reads the union of its group. Sinks and windows at the
prompt's end are inside the budget. The current token and the generated ones are read in addition
and are reported, except under methods that evict while decoding, whose budget is all rows of a KV
head, prompt and answer. `PaperBudget` counts as a method's own paper does. This module imports no
torch, so that a budget on a command line can be refused without loading it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class BudgetError(ValueError):
    """Report a budget that makes no sense, or is too small for a method."""


def is_budget(asked: object) -> bool:
    """Return whether `asked` can be a budget: a share above 0 and up to 1, or a number of tokens
    from 1."""
    if isinstance(asked, bool):
        return False
    return (isinstance(asked, int) and asked >= 1) or (isinstance(asked, float) and 0 < asked <= 1)


def check_layers(name: str, layers: Sequence[int], num_layers: int) -> None:
    """Raise `BudgetError` if `layers` names a layer that a model of `num_layers` does not have.
    `name`: the setting that has this value, for the error message."""
    known = [layer for layer in layers if 0 <= layer < num_layers]
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise BudgetError(
                f"{name}={list(layers)} names layer {layer}, and the model has layers 0 to {num_layers - 1} that see "
                f"the whole text, which alone count: choose among those, as {name}={known or [0]}."
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """Hold a budget, the number of prompt tokens that a decode step may read: a share of the prompt
    as a float in (0, 1], or a number of tokens as an int >= 1 (all, if the prompt is not longer).

    Layers in `dense_layers` read everything. `generated` limits how many generated tokens each KV
    head keeps, the current one included; None keeps all. `mass`: of the tokens that a method may
    read, a step reads only as many as carry this share of their estimated weights; None reads all.
    """

    asked: int | float
    dense_layers: tuple[int, ...] = ()
    generated: int | None = None
    mass: float | None = None

    def __post_init__(self) -> None:
        if not is_budget(self.asked):
            raise BudgetError(
                f"budget={self.asked!r} is neither a share of the prompt (a float above 0 and up to 1, like 0.2) nor a "
                "number of tokens (a whole number from 1, like 512)."
            )
        if self.generated is not None and (isinstance(self.generated, bool) or self.generated < 1):
            raise BudgetError(
                f"budget_generated={self.generated} is no number of tokens: give a whole number from 1, or null for "
                "all."
            )
        if self.mass is not None and not 0 < self.mass <= 1:
            raise BudgetError(
                f"budget_mass={self.mass} is no share: give a number above 0 and up to 1, like 0.95."
            )

    def tokens(self, sealed: int, layer: int) -> int:
        """Return how many tokens of a prompt of `sealed` tokens a KV head of layer number `layer`
        may read: at least one, at most all."""
        if layer in self.dense_layers:
            return sealed
        return min(
            sealed, self.asked if isinstance(self.asked, int) else max(1, int(self.asked * sealed))
        )

    def rows(self, sealed: int, layer: int) -> int | None:
        """Return how many rows a KV head of layer number `layer` may hold, prompt and answer
        together, under a method whose budget counts both (`CountedAnswer`), after a prompt
        of `sealed` tokens. A share is a share of the prompt; a share of 1 gives None: any number."""
        if (tokens := self.tokens(sealed, layer)) < sealed:
            return tokens
        return (
            self.asked if isinstance(self.asked, int) and layer not in self.dense_layers else None
        )

    def prunes(self, layer: int) -> bool:
        """Return whether layer number `layer` reads only those of its chosen tokens that carry `mass`."""
        return self.mass is not None and layer not in self.dense_layers

    def covers(self, sealed: int, layer: int) -> bool:
        """Return whether a KV head of layer number `layer` may read all tokens of a prompt of
        `sealed` tokens."""
        return self.tokens(sealed, layer) >= sealed

    def least(self, needed: int, sealed: int, layer: int) -> int:
        """Return the smallest budget, as a number of tokens, with which a KV head of layer number
        `layer` may read `needed` tokens of a prompt of `sealed` tokens; error messages name it."""

        def read(asked: int) -> int:
            return replace(self, asked=asked).tokens(sealed, layer)

        return 1 + bisect_left(range(1, sealed), needed, key=read)

    def __str__(self) -> str:
        return str(self.asked)


@dataclass(frozen=True, slots=True)
class PaperBudget(Budget):
    """Hold a budget that is counted as a method's own paper counts it, perhaps without sinks or
    including an index; `count` (the method's `paper_tokens`) turns it into prompt tokens."""

    count: Callable[[Callable[[int], int], int], int] = field(kw_only=True)

    def tokens(self, sealed: int, layer: int) -> int:
        return min(sealed, self.count(lambda tokens: Budget.tokens(self, tokens, layer), sealed))


class Plan(NamedTuple):
    """Say how a budget is spent: on the first `sinks` and the last `local` prompt tokens always,
    and on `top` chosen ones between them."""

    sinks: int
    local: int
    top: int
