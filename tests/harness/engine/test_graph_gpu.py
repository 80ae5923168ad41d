"""What only a GPU can show: real CUDA graphs give the tokens of steps that are launched one by one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from harness.engine.attach import attached
from harness.engine.batch.generation import Generation
from harness.engine.engine import Engine
from harness.engine.graph import CudaGraphs
from tests.methods.test_contract import NAMES, small
from tests.tiny import prompt, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_gives_the_tokens_of_single_launches(name: str) -> None:
    model, said = deepcopy(tiny("llama")).to("cuda"), []  # type: ignore[arg-type]
    with attached(model, small(name), budget=0.5, calibration=prompt(64, seed=9)) as kv:
        engines: list[Any] = [Engine(kv), Engine(kv, graphs=CudaGraphs(model.device))]
        for seed in range(3):  # the second and third take over the graph of the first, or the memory of the one before
            made: list[Generation] = [engine.generate(prompt(80, seed=seed), max_new_tokens=12) for engine in engines]
            assert made[0].tokens == made[1].tokens
            said.append(made[1])
    assert engines[1].plain_steps is None
    assert all(generation.capture_s for generation in said)
