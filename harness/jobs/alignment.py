"""`budget_rule=moved_bytes|device_bytes` and `budget=64MiB`: the user's `budget` stands for bytes, and
each method gets the number of tokens that costs it as many.

A budget of T tokens stands for the bytes of T tokens' keys and values in every layer. A method then
gets the token budget whose cost, by the formula that the method declares (`Method.cost`), comes
closest to these bytes without exceeding them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import torch
from torch import Tensor

from harness.models.base import ModelInfo
from methods.base import Budget, BudgetError, LayerSpec, LayerWorkload, Method
from methods.layers.window import whole_layers
from methods.tiers.codec import Codec

AlignedBytes = Literal["moved_bytes", "device_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedBudget(Budget):
    """A token budget that is derived from bytes: it grants the method as many prompt tokens as cost
    no more bytes (moved per step or held on the device, as `measure` says) than the keys and values
    of `asked` tokens. If even the fewest tokens cost more, or even all cost less, the nearest
    number is granted; for prompt lengths of the run itself, call `refuse` to raise an error
    instead."""

    measure: AlignedBytes
    method: Method
    specs: Sequence[LayerSpec]
    placement: str
    element_bytes: int
    codec: Codec | None = None
    most_bytes: int | None = None  # if the budget is given in bytes
    solved: dict[tuple[int, int], int] = field(default_factory=dict, compare=False)

    def tokens(self, sealed: int, layer: int) -> int:
        asked = Budget.tokens(self, sealed, layer)
        if self.is_fixed(sealed, asked):
            return asked
        if (sealed, asked) not in self.solved:
            self.solved[sealed, asked] = self.solve(sealed, asked)
        return self.solved[sealed, asked]

    def solve(self, sealed: int, asked: int) -> int:
        """Return how many of `sealed` prompt tokens to read, so that the bytes are at most those of
        the keys and values of `asked` tokens; the least or the most possible where no number gives
        that."""
        least = self.method.smallest_budget
        more = range(least + 1, sealed)
        return least + bisect_right(
            more, self.target(asked), key=lambda tokens: self.paid(sealed, tokens)
        )

    def paid(self, sealed: int, tokens: int) -> int:
        """Return the bytes, summed over the layers, that the method moves per step or holds on the
        device (`measure` says which) when it reads `tokens` of `sealed` prompt tokens."""
        how = (sealed, tokens, self.placement, self.element_bytes)
        costs = [
            self.method.cost(
                LayerWorkload(spec, *how, codec=self.codec, estimated=self.mass is not None)
            ).read_by(1 + spec.borrowers)
            for spec in self.specs
        ]
        return sum(
            cost.moved_bytes_per_step if self.measure == "moved_bytes" else cost.device_bytes
            for cost in costs
        )

    def target(self, tokens: int) -> int:
        """Return the bytes that the keys and values of so many tokens take, summed over the layers,
        or over those that read them if moved bytes count."""
        moves = self.measure == "moved_bytes"
        rows = (
            LayerWorkload(spec, 1, 1, self.placement, self.element_bytes).row_bytes
            * (1 + moves * spec.borrowers)
            for spec in self.specs
        )
        return tokens * sum(rows)

    def is_fixed(self, sealed: int, asked: int) -> bool:
        """Return True if there is no token count to choose: the budget covers the whole prompt of
        `sealed` tokens, or the prompt is hardly longer than the method's smallest budget."""
        return asked >= sealed or sealed <= self.method.smallest_budget + 1

    def refuse(self, sealed: int) -> None:
        """Raise `BudgetError` if no token budget costs the bytes that were asked for, on a prompt
        of `sealed` tokens."""
        asked = Budget(self.asked).tokens(sealed, 0)
        least, most = (
            self.paid(sealed, tokens) for tokens in (self.method.smallest_budget, sealed - 1)
        )
        if self.is_fixed(sealed, asked) or least <= self.target(asked) <= most:
            return
        token = self.target(1)
        does = "moves" if self.measure == "moved_bytes" else "holds on the device"
        low, high = -(-least // token), most // token  # whole tokens, as a budget counts them
        setting = f"budget_rule={self.measure}"
        unit = "tokens' keys and values"
        way_out = "use budget_rule=read"
        if self.most_bytes is not None:
            low, high = low * token, (high + 1) * token - 1
            setting = f"budget={self.most_bytes}B"
            unit = "bytes"
            way_out = "give the budget in tokens"
        between = "choose in between, or " * (low < high)
        raise BudgetError(
            f"{setting}: with placement={self.placement} {type(self.method).__name__} {does}, of {sealed} prompt "
            f"tokens, {low} to {high} {unit}, and the budget asks for {asked} tokens': {between}{way_out}."
        )


def shapes(info: ModelInfo, device: str | None = None) -> list[LayerSpec]:
    """Return one `LayerSpec` per layer of a model that is not loaded and is to run on `device`. It
    suffices to compute a method's cost; it has no weights, so nothing can run with it."""
    sinks = torch.zeros(info.served.num_heads) if info.sink_logits else None
    place = None if device is None else torch.device(device)
    likes = [
        info.still_layers[0] if index in info.still_layers else -1
        for index in range(info.num_layers)
    ]
    borrowers = info.borrowers or (0,) * info.num_layers
    layers = zip(info.layer_heads, info.layer_windows, likes, borrowers, strict=True)
    return whole_layers(
        [
            LayerSpec(
                index,
                info.num_layers,
                **heads._asdict(),
                scale=heads.head_dim**-0.5,
                rope=_not_loaded,
                project_query=_not_loaded,
                window=window,
                rope_like=like,
                borrowers=borrowed,
                sink_logits=sinks,
                device=place,
                rotary_dim=info.rotary_dim,
            )
            for index, (heads, window, like, borrowed) in enumerate(layers)
        ]
    )


def _not_loaded(x: Tensor) -> NoReturn:
    raise AssertionError("a cost needs no weights")
