"""What a GPU promises of captured steps: real CUDA graphs give the tokens of steps that are launched one by one.

On a machine without one the same bodies run with the recorder of steps in the place of graphs, and with what a stream
beside the model's is given as late as CUDA may do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")


from harness import Engine, attached
from harness.engine.batch.running_sequence import Generation
from harness.engine.graph import CudaGraphs
from kernels.dispatch import use_backend
from methods.base import Method
from tests.fake_cuda import side_stream
from tests.harness.engine.test_graph import CAPTURED
from tests.harness.engine.test_together import in_a_batch
from tests.methods.test_contract import NAMES, in_places, small
from tests.methods.test_no_waiting import ON_GPU, as_on_a_gpu, devices
from tests.tape import Tape
from tests.tiny import fresh, prompt, tiny

HEADS = [(3, 1, 64), (5, 5, 80), (6, 3, 96), (7, 1, 128), (9, 3, 256)]  # query heads, KV heads, their size
# PQCache with as many centroids as keys: of tokens that share theirs, backends may choose either
SHAPED: list[Method] = [small("full"), replace(small("pqcache"), b=8), small("sparq"), small("shadowkv")]  # type: ignore[call-arg]
COMING = [(name, "host") for name in ("full_offloaded", "infinigen", "pqcache", "shadowkv")]
PLACES = in_places("device", "host")
QUICK = [*((name, "device") for name in ("snapkv", "tova", "rkv")), *(place for place in PLACES if place[1] == "host")]


def placed(on_cpu: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Take some methods on a CPU, and all on a GPU."""
    cases = [pytest.param("cpu", *place) for place in on_cpu]
    cases += [pytest.param("cuda", *place, marks=ON_GPU) for place in PLACES]
    return pytest.mark.parametrize(("device", "name", "placement"), cases)


@cache
def model_on(device: str, heads: tuple[int, int, int] | None = None) -> Any:
    if heads is None:
        return deepcopy(tiny("llama")).to(device)  # type: ignore[arg-type]
    of_heads = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    return fresh("llama", **of_heads, hidden_size=32 * heads[0], num_hidden_layers=2).to(device)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody asks the device. It has two streams if rows lie on the host; what memory they share, plain torch shows."""
    if not torch.cuda.is_available():
        as_on_a_gpu(monkeypatch)
        if request.node.callspec.params.get("placement") == "host":
            with side_stream(), use_backend("torch"):
                yield
            return
    yield


def engines(kv: Any, device: str) -> tuple[Engine, Engine]:
    """One that launches its steps one by one, and one that captures them; their first answers, which are checked, are
    given."""
    graphs: Any = CudaGraphs(torch.device("cuda")) if device == "cuda" else Tape()
    both = Engine(kv), Engine(kv, graphs=graphs)
    for engine in both:
        engine.generate(prompt(60), max_new_tokens=2)
    return both


def counted(made: Generation) -> dict[str, float]:
    """What was read, moved and found per step; a GPU's captured steps clock no waiting."""
    return {name: value for name, value in made.measured.items() if not name.endswith("_s_per_step")}


@placed(QUICK)
def test_a_graph_gives_the_tokens_of_single_launches(device: str, name: str, placement: str) -> None:
    """The second prompt, and a GPU's third, takes over the graph of the first, or the memory of the one before."""
    prompts, new = (2, 5) if device == "cpu" else (3, 12)
    how: dict[str, Any] = {"budget": 0.5, "placement": placement, "calibration": prompt(64, seed=9)}
    with attached(model_on(device), small(name), overlap=placement == "host", **how) as kv:
        plain, captured = engines(kv, device)
        for seed in range(prompts):
            generations: list[Generation] = [
                engine.generate(prompt(80, seed=seed), max_new_tokens=new) for engine in (plain, captured)
            ]
            assert generations[0].tokens == generations[1].tokens
            assert generations[1].capture_s or name not in CAPTURED
            assert counted(generations[0]) == counted(generations[1])
    assert captured.plain_steps is None or name not in CAPTURED


@devices
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_of_any_count_and_size_are_captured(heads: tuple[int, int, int], device: str) -> None:
    """Steps are those that are launched one by one, and the first is plain torch's: behind it roundings may choose."""
    for method in SHAPED:
        with attached(model_on(device, heads), method, budget=0.5) as kv:
            plain, captured = engines(kv, device)
            with use_backend("torch"):
                (wanted,) = plain.generate(prompt(80), max_new_tokens=3).tokens
            tokens = [engine.generate(prompt(80), max_new_tokens=8).tokens for engine in (plain, captured)]
            assert tokens[0] == tokens[1], method
            assert tokens[0][0][:2] == wanted[:2], method
            assert captured.plain_steps is None


@placed(COMING)
def test_sequences_join_and_leave_while_steps_are_captured(name: str, placement: str, device: str) -> None:
    """Where all rows lie on a CPU, tests/harness/engine/test_together.py says so."""
    few = 3 if device == "cpu" else 5
    how: dict[str, Any] = {"budget": 0.5, "placement": placement, "calibration": prompt(64, seed=9)}
    with attached(model_on(device), small(name), overlap=placement == "host", **how) as kv:
        plain, captured = engines(kv, device)
        wanted, together = in_a_batch(plain, 2, few), in_a_batch(captured, 2, few)
    for generation, other in zip(together, wanted, strict=True):
        assert (generation.tokens, counted(generation)) == (other.tokens, counted(other))
    assert name not in CAPTURED or all(generation.capture_s for generation in together)
    assert name not in CAPTURED or captured.plain_steps is None


@pytest.mark.parametrize("name", [pytest.param(name, marks=ON_GPU) for name in NAMES])
def test_the_loop_of_transformers_gives_the_same_tokens(name: str) -> None:
    """On a CPU tests/harness/engine/test_generate.py says so."""
    method = replace(small(name), b=8) if name == "pqcache" else small(name)  # type: ignore[call-arg]
    model, ids = model_on("cuda"), prompt(60).to("cuda")
    with attached(model, method, budget=0.5, calibration=prompt(64, seed=9)) as kv:
        (wanted,) = Engine(kv).generate(ids, max_new_tokens=8).tokens
        cache = kv.cache(capacity=68)
        text = model.generate(ids, past_key_values=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert text[0, 60:].tolist() == wanted
