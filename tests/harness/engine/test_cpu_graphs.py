"""Captured steps of compiled kernels, which take several sequences as a GPU's do: what they give and what they hold."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from harness.engine.batch.running import RunningBatch
from harness.engine.engine import Engine
from kernels.dispatch import use_backend
from tests.harness.engine.test_together import attach_compiled
from tests.methods.test_contract import attach, small
from tests.tape import Tape
from tests.tiny import prompt

THREE = ("full", "snapkv", "pqcache")


class Remembered(Tape):
    """Knows which of its graphs are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[ref[Any]] = []

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        replay, result = super().capture(step)
        self.graphs.append(ref(replay.__self__))  # type: ignore[attr-defined]
        return replay, result

    @property
    def alive(self) -> int:
        return sum(graph() is not None for graph in self.graphs)


@contextmanager
def no_pass_for_cycles() -> Any:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.tokens
@torch.inference_mode()
@pytest.mark.parametrize("name", THREE)
def test_a_kept_step_reads_nothing_of_the_sequence_it_was_captured_for(name: str) -> None:
    with attach_compiled(name) as kv:
        plain, engine = Engine(kv), Engine(kv, graphs=(graphs := Remembered()))
        engine.generate(prompt(110), max_new_tokens=2)  # whose layers are checked, so that its step is not kept
        assert not graphs.alive
        for length in (119, 118, 117):  # the same size
            ids = prompt(length, seed=length)
            batch = RunningBatch(engine)
            slot = engine.join(batch, ids, max_new_tokens=8)
            layers = slot.cache.layers
            while batch.sequences:
                batch.step()
            assert slot.out.tokens == plain.generate(ids, max_new_tokens=8).tokens
            for layer in layers:
                for held in (layer.store, *layer.policies):  # type: ignore[attr-defined]
                    for x in vars(held).values():
                        if isinstance(x, Tensor):
                            x.fill_(torch.nan if x.is_floating_point() else 0)
    assert len(graphs.graphs) == 2


def test_memory_is_returned_when_sequences_and_engines_go() -> None:
    """A kept step holds its own alone, and one that is not kept goes with its sequence."""
    with attach(small("snapkv"), 0.5) as kv, no_pass_for_cycles():
        graphs = Remembered()
        engine = Engine(kv, graphs=graphs)
        engine.generate(prompt(60), max_new_tokens=4)
        batch = RunningBatch(engine)
        slot = engine.join(batch, prompt(80), max_new_tokens=4)
        layers = [ref(layer) for layer in slot.cache.layers]
        while batch.sequences:
            batch.step()
        del slot
        assert [layer() for layer in layers] == [None] * len(layers)
        kept = graphs.alive
        assert kept
        with use_backend("torch"):
            engine.generate(prompt(81), max_new_tokens=4)
        assert len(graphs.graphs) > kept == graphs.alive
        del engine, batch
        assert not graphs.alive
