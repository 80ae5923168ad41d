"""kvpress: a press of NVIDIA's kvpress 0.5.5 chooses what stays of the prompt
(github.com/NVIDIA/kvpress).

`press` names a class of kvpress, or the import path of a user's own, and its parameters; presses
that take another press take a mapping of the same form:
`method=kvpress method.press='{name: AdaKVPress, press: {name: ExpectedAttentionPress}}'`. Its ratio
is set so that it keeps the budget. What else is done with a press, and how kvpress is installed, is in
docs/loops.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from harness.bridges.kvpress.building import (
    BY_ROWS,
    KVPressError,
    build,
    mappings,
    set_ratio,
    windows,
)
from harness.bridges.kvpress.keep import PressEvict
from harness.engine.hf import QueryProjection
from harness.models.rope import Fixed
from methods.base import (
    CacheState,
    Cost,
    CostError,
    KVLayer,
    LayerSpec,
    LayerWorkload,
    Method,
)
from methods.base.request import QUERIES, ROTATION
from methods.layers import Layer
from methods.parts import costs


@dataclass(frozen=True, kw_only=True)
class KVPress(Method):
    """Let a press of the package kvpress choose which tokens of the prompt stay in the cache.
    `press`: the press's name and parameters, as a mapping (`build` in
    harness/bridges/kvpress/building.py)."""

    # a layer's input is held until its seal; kvpress too compresses layer by layer
    closes_early = True
    no_latents = "presses compute with the keys and values of each KV head"

    press: dict[str, Any] = field(default_factory=lambda: {"name": "ExpectedAttentionPress"})

    def __post_init__(self) -> None:
        list(mappings(self.press))  # raises what is wrong with them
        object.__setattr__(self, "press", Fixed(deepcopy(self.press)))

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names of the modules that define a user's own presses; a run's identity
        contains a hash of their code."""
        modules = (each["name"].rpartition(".")[0] for each in mappings(self.press))
        return tuple(dict.fromkeys(filter(None, modules)))

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.press["name"] in BY_ROWS else (ROTATION, QUERIES)

    @cached_property
    def windows(self) -> int:
        """Return how many tokens the press's recent windows and sinks (first tokens) take. A press
        works only on prompts that are longer."""
        return windows(build(self.press))

    def reads_all(self, sealed: int, tokens: int, pruned: bool = False) -> bool:
        """Return whether nothing is left out of a prompt of `sealed` tokens: the budget of `tokens`
        covers it, or the press works only on a longer one."""
        return tokens >= sealed or sealed <= self.windows

    def whole_because(self, sealed: int, tokens: int) -> str:
        return f"all is read: the prompt of {sealed} tokens is no longer than the press's windows of {self.windows}"

    def check_model(self, spec: LayerSpec) -> None:
        """Raise `KVPressError` if the press cannot be made or cannot run here. Presses norm and
        rotate queries themselves, and know only rotations of a whole head in two halves; those of
        BY_ROWS need none of it."""
        build(self.press)
        if self.press["name"] in BY_ROWS:
            return
        projection = spec.project_query
        other = isinstance(projection, QueryProjection) and (
            projection.pairing.neighbours or projection.norms_whole or projection.finish
        )
        if other or (spec.rotary_dim or spec.head_dim) < spec.head_dim:
            raise KVPressError(
                "This model rotates a part of each head, or neighbouring channels together, or norms the queries of "
                f"all heads as one, or changes them after their rotation, which {self.press['name']} cannot do: choose "
                f"a method that is not kvpress, or one of {', '.join(BY_ROWS)}."
            )

    def cost(self, case: LayerWorkload) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case)
        if not set_ratio(build(self.press), 0.5):
            raise CostError(
                f"{self.press['name']} takes no ratio, so its budget cannot stand for bytes: count tokens "
                "(budget=0.2 budget_rule=read)."
            )
        return costs.evict(case, case.budget)

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        """Return the layers of a fresh cache, with a press for each sequence, which all layers
        share."""
        projection = specs[0].project_query
        if not isinstance(projection, QueryProjection):
            raise KVPressError(
                "A press needs the attention modules of a model: it cannot run on a layer alone."
            )
        presses = [build(self.press) for _ in range(cache.request.batch)]
        for press in presses:
            press.post_init_from_model(projection.model)
        return [Layer(spec, cache, self, PressEvict(presses)) for spec in specs]
