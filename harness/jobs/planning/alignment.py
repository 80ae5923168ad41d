"""`align=moved_bytes|device_bytes`: `budget` names bytes, and each method reads as many tokens as it gets for them.

A budget of T tokens stands for their keys and values in every layer. A method then gets the token budget with which
its own cost, by the formula it declares, comes closest to these bytes without exceeding them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from harness.models.base import DTYPE_BYTES, ModelInfo
from methods.base import Budget, BudgetError, LayerSpec, LayerWorkload, Method
from methods.tiers.codec import Codec

FIELDS = {"moved_bytes": "moved_bytes_per_step", "device_bytes": "device_bytes"}
VERBS = {"moved_bytes": "moves", "device_bytes": "holds on the device"}
AlignedBytes = Literal["moved_bytes", "device_bytes"]


class Alignment(NamedTuple):
    """Says what is made equal, for which method, over which layers."""

    measure: AlignedBytes
    method: Method
    specs: Sequence[LayerSpec]
    placement: str
    element_bytes: int
    codec: Codec | None = None
    most_bytes: int | None = None  # as budget_bytes says it, in place of tokens

    def paid(self, sealed: int, tokens: int) -> int:
        """Return the bytes of all layers when the method reads `tokens` of `sealed`."""
        cases = (
            LayerWorkload(spec, sealed, tokens, self.placement, self.element_bytes, codec=self.codec)
            for spec in self.specs
        )
        return sum(int(getattr(self.method.cost(case), FIELDS[self.measure])) for case in cases)

    def target(self, tokens: int) -> int:
        """Return the bytes of the keys and values of `tokens`, all layers."""
        rows = (LayerWorkload(spec, 1, 1, self.placement, self.element_bytes).row_bytes for spec in self.specs)
        return tokens * sum(rows)

    def solve(self, sealed: int, asked: int) -> int:
        """Return the tokens to read of `sealed` for the bytes of `asked`; the nearest end of the range where none will
        do."""
        least = self.method.smallest_budget
        more = range(least + 1, sealed)
        return least + bisect_right(more, self.target(asked), key=lambda tokens: self.paid(sealed, tokens))

    def is_fixed(self, sealed: int, asked: int) -> bool:
        """Say whether there is nothing to solve: all is read, or all but one in any case."""
        return asked >= sealed or sealed <= self.method.smallest_budget + 1

    def refuse(self, sealed: int, asked: int) -> None:
        """Raise where no token budget costs what was asked for."""
        if self.is_fixed(sealed, asked):
            return
        least, most = (self.paid(sealed, tokens) for tokens in (self.method.smallest_budget, sealed - 1))
        if least <= self.target(asked) <= most:
            return
        name = type(self.method).__name__
        if self.most_bytes is not None:
            raise BudgetError(
                f"budget_bytes={self.most_bytes}: with placement={self.placement} {name} holds on the device, of "
                f"{sealed} prompt tokens, {_bytes_of(least, most, self.target(1))}"
            )
        raise BudgetError(
            f"align={self.measure}: with placement={self.placement} {name} {VERBS[self.measure]} "
            f"{_range_of(least / self.target(1), most / self.target(1), asked)}"
        )


@dataclass(frozen=True, slots=True)
class AlignedBudget(Budget):
    """Counts a budget in bytes: those of `asked` tokens. Lengths that a run is not about, as within a chunked prefill,
    are not refused."""

    alignment: Alignment = field(kw_only=True)
    solve: Callable[[int, int], int] = field(kw_only=True, compare=False)

    def tokens(self, sealed: int, layer: int) -> int:
        asked = Budget.tokens(self, sealed, layer)
        return asked if self.alignment.is_fixed(sealed, asked) else self.solve(sealed, asked)

    def refuse(self, sealed: int) -> None:
        plain = Budget(self.asked)
        self.alignment.refuse(sealed, plain.tokens(sealed, 0))


def aligned(
    budget: Budget,
    measure: AlignedBytes,
    method: Method,
    info: ModelInfo,
    dtype: str,
    placement: str,
    codec: Codec | None = None,
    most_bytes: int | None = None,
) -> Budget:
    """Return `budget` in bytes in place of tokens, over the layers that it rules. `most_bytes`: what it was made of."""
    specs = tuple(spec for spec in shapes(info) if spec.index not in budget.dense_layers)
    alignment = Alignment(measure, method, specs, placement, DTYPE_BYTES[dtype], codec, most_bytes)
    return AlignedBudget(
        budget.asked,
        budget.dense_layers,
        generated=budget.generated,
        alignment=alignment,
        solve=cache(alignment.solve),
    )


def _bytes_of(least: int, most: int, token: int) -> str:
    """Return what can be had in bytes, of which a budget counts whole tokens, and the way out."""
    low, high = -(-least // token) * token, (most // token + 1) * token - 1
    if low > high:
        return f"{least} bytes whatever it reads: set budget in place of budget_bytes."
    return f"{low} to {high} bytes: choose as many, or set budget in place of budget_bytes."


def per_token(info: ModelInfo, dtype: str) -> int:
    """Return the bytes of a token's keys and values, over the layers that a budget rules."""
    return sum(LayerWorkload(spec, 1, 1, "device", DTYPE_BYTES[dtype]).row_bytes for spec in shapes(info))


def _range_of(least: float, most: float, asked: int) -> str:
    """Return what can be had, in tokens' keys and values, and the way out."""
    if ceil(least) >= int(most):
        return f"as much as {most:.4g} tokens' keys and values whatever it reads: use align=tokens."
    legal = f"the keys and values of {ceil(least)} to {int(most)} tokens"
    return f"{legal}, and budget asks for {asked}: choose one in that range, or align=tokens."


def shapes(info: ModelInfo) -> list[LayerSpec]:
    """Return what a method is told of the layers of a model that is not loaded: enough for a cost, nothing that
    runs."""
    count = info.num_whole_layers
    heads = (count, info.num_heads, info.num_kv_heads, info.head_dim, info.head_dim**-0.5)
    sinks = torch.zeros(info.num_heads) if info.sink_logits else None
    return [LayerSpec(index, *heads, _not_loaded, _not_loaded, sink_logits=sinks) for index in range(count)]


def _not_loaded(x: Tensor) -> NoReturn:
    raise AssertionError("a cost needs no weights")
