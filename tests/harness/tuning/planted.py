"""A method whose best parameter is known, and the task that knows it: only `gain=1` answers as the references do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from evals.base import Example, Score, TaskEnv
from evals.niah import Niah
from methods.base import AttnInput, CacheState, Grids, KVLayer, LayerSpec, Method
from methods.layers import Keep, Layer


@dataclass(frozen=True, kw_only=True)
class Planted(Method):
    """Keeps the prompt's end; a step's attention is worth `gain` of itself. `extra` tokens are beyond the budget."""

    tunable: ClassVar[Grids] = {"gain": (0.25, 0.5, 1.0, 4.0), "unused": (1, 2)}
    gain: float = 0.25
    unused: int = 1
    extra: int = 0

    def __post_init__(self) -> None:
        if self.gain == 4.0:
            raise ValueError("gain=4.0 is too loud")

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        return [Layer(spec, cache, self, PlantedKeep()) for spec in specs]


class PlantedKeep(Keep):
    method: Planted

    def size(self, budget: int) -> int:
        return budget + self.method.extra

    def keep(self, size: int) -> Tensor:
        rows = torch.arange(self.store.length - size, self.store.length)
        return rows.expand(self.request.batch, self.spec.num_kv_heads, -1)

    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) * self.method.gain


@dataclass(frozen=True)
class Echo(Niah):
    """Needles whose references are the outputs in the file `answers`; the score is how far an output agrees."""

    answers: str = ""
    by_seed: bool = True  # False: the same examples whatever the seed

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        known = json.loads(Path(self.answers).read_text()) if self.answers else {}
        for example in super().examples(env if self.by_seed else replace(env, seed=0)):
            yield replace(example, references=(known.get(example.id, ""),))

    def score(self, example: Example, output: str) -> Score:
        (wanted,) = example.references
        agreed = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(wanted, output, strict=False))))
        return Score(agreed / max(1, len(wanted), len(output)))
