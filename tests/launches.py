"""Counts what a captured decode step launches on a GPU, without one.

Triton's kernels are named in place of running, and each operation of torch beside them that makes or changes a tensor
is a launch. What a kernel would have written is zeros, which are rows, pages and codes that are there.

`python -m tests.launches` writes the table in docs/kernels.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

os.environ["TRITON_INTERPRET"] = "1"
from triton.runtime import interpreter

from harness import Engine, RunningBatch, attached
from harness.engine import forward
from harness.engine.forward import BlockForward
from kernels.dispatch import use_backend
from methods.base import Budget
from methods.kivi import Kivi
from methods.rkv import RKV
from methods.shadowkv import ShadowKV
from methods.tiers.codecs import codec_of
from methods.triattention import TriAttention
from tests.dispatched import NO_LAUNCH, DispatchRecorder, is_launch
from tests.generated_pages import DOCS, code, table, with_table
from tests.methods.test_contract import small
from tests.tiny import SHAPE, prompt

COUNTED = 2  # the layer whose launches count: the first two layers of some methods read everything
LENGTHS = (61, 74, 90, 83, 67, 72, 95, 88)  # of prompts
BUDGET = 0.5
SEQUENCES = (1, 4, 8)
METHODS = (
    "full", "streaming", "snapkv", "pyramidkv", "pqcache", "quest", "shadowkv", "h2o", "oracle", "lm_infinite",
    "infinigen", "rocketkv", "sparq", "adakv", "infllm", "kivi", "vattention", "kvzip", "ada_pyramid", "coded", "tova",
    "rkv", "triattention",
)  # fmt: skip
HEAD = ("methods", *(f"{count} sequence{'s' if count > 1 else ''}" for count in SEQUENCES))
OUTSIDE = "Outside of its layers a step launches N times"  # below the table
PAGE = DOCS / "kernels.md"


@cache
@torch.inference_mode(mode=False)
def joined_model() -> PreTrainedModel:
    """Return a tiny model whose weights lie as on a GPU, joined where they share an input."""
    torch.manual_seed(7)
    config = AutoConfig.for_model("llama", **SHAPE | {"num_attention_heads": 4, "num_hidden_layers": COUNTED + 2})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    forward.join_weights(model.get_decoder().layers)
    return model


class LaunchRecorder(DispatchRecorder):
    """Stands where CUDA graphs do (harness/engine/graph.py), and names the launches of each layer in order."""

    def __init__(self) -> None:
        super().__init__()
        self.by_layer: dict[int | None, list[str]] = {}  # None: outside of the layers
        self._layer: int | None = None

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        self.by_layer.clear()
        with use_backend("triton"), self._watching(), self:
            result = step()
        return step, result

    def drop(self, replay: Callable[[], Any]) -> None:
        """Keep what was named."""

    def has_run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]
    ) -> None:
        name = func.overloadpacket.__name__
        if name in NO_LAUNCH:
            out.zero_()
        elif is_launch(func, args, kwargs, out, changed):
            self._note(name)

    def _note(self, name: str) -> None:
        self.by_layer.setdefault(self._layer, []).append(name)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Learn of each kernel's launch, and of the layer that runs."""
        layer_of = BlockForward._layer

        def launch(executor: Any, *args: Any, **options: Any) -> None:
            self._note(executor.fn.__name__)

        def layer(of: BlockForward, index: int, *args: Any) -> Any:
            self._layer = index
            try:
                return layer_of(of, index, *args)
            finally:
                self._layer = None

        with patch.object(interpreter.GridExecutor, "__call__", launch), patch.object(BlockForward, "_layer", layer):
            yield


def attached_to(name: str) -> Any:
    """Attach a method, made small, to the model, in the codec whose name follows, or with a budget by mass. Without a
    hit cache, whose sequences attend one after the other."""
    name, _, asked = name.partition(" ")
    method = small(name)
    method = replace(method, hit_cache=False) if isinstance(method, ShadowKV) else method
    # every prompt fills more than one block
    method = replace(method, group=4, residual=20) if isinstance(method, Kivi) else method
    # rows go between some steps
    method = replace(method, buffer=9) if isinstance(method, RKV | TriAttention) else method
    budget = Budget(BUDGET, mass=0.9 if asked == "mass" else None) if method.uses_budget else None
    asked = asked.removeprefix("mass") or ("int4" if name == "coded" else "")
    codec = codec_of(asked) if asked else None
    return attached(joined_model(), method, budget=budget, calibration=prompt(64, seed=9), codec=codec)


@cache
def launches_of(name: str, sequences: int) -> dict[int | None, list[str]]:
    """Name the launches of each layer in a captured step of so many sequences, whose lengths all differ. None: those
    outside of the layers, which are embedding, angles, norm, head, the most likely tokens and counters."""
    recorder = LaunchRecorder()
    with attached_to(name) as kv, patch("methods.pqcache.queues", lambda device: True):  # it counts pairs on a GPU
        engine = Engine(kv, graphs=recorder)
        assert engine.forward is not None
        engine.forward.stores = True
        engine.generate(prompt(60), max_new_tokens=2)  # the first answer is checked, in plain steps
        batch = RunningBatch(engine)
        for length in LENGTHS[:sequences]:
            engine.join(batch, prompt(length, seed=length), max_new_tokens=16)
        batch.step()
        assert engine.plain_steps is None, engine.plain_steps
    return recorder.by_layer


def launches_table() -> str:
    """Return the table of launches per layer in docs/kernels.md."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for name in METHODS:
        alike.setdefault(tuple(len(launches_of(name, count)[COUNTED]) for count in SEQUENCES), []).append(code(name))
    return table(HEAD, [(", ".join(names), *map(str, counts)) for counts, names in alike.items()])


def launches_page(page: str) -> str:
    """Return docs/kernels.md with today's table, and below it the launches outside of the layers."""
    page, count = with_table(page, HEAD, launches_table()), len(launches_of("full", SEQUENCES[1])[None])
    page, found = re.subn(OUTSIDE.replace("N", r"\d+"), OUTSIDE.replace("N", str(count)), page)
    assert found == 1, f"the page has lost the line {OUTSIDE!r}"
    return page


if __name__ == "__main__":
    PAGE.write_text(launches_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
