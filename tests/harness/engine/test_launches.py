"""How often a captured step launches something on a GPU, as docs/kernels.md has it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from _pytest.mark import ParameterSet

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, and not counted", allow_module_level=True)

from harness import Engine, RunningBatch
from kernels.dispatch import use_backend
from tests.generated_pages import code
from tests.launches import COUNTED, HEAD, METHODS, OUTSIDE, PAGE, SEQUENCES, attached_to, launches_of
from tests.tiny import prompt

AIMED = {  # for any number of sequences
    "full": 10, "snapkv": 10, "pqcache": 13, "quest": 13, "shadowkv": 16, "h2o": 11,
    "oracle": 13, "rocketkv": 14, "sparq": 13, "tova": 16, "rkv": 16,
}  # fmt: skip


def documented() -> dict[str, list[int]]:
    """Return the launches of each method by the table in docs/kernels.md."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"| {' | '.join(HEAD)} |\n")
    lines = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[1:]]
    return {name: [int(count) for count in counts] for names, *counts in lines for name in names.split(", ")}


def cases() -> list[ParameterSet]:
    """Return what is aimed at for each number of sequences, and every other method once; the rest is slow."""
    return [
        pytest.param(name, count, marks=[] if name in AIMED or count == SEQUENCES[1] else [pytest.mark.slow])
        for name, count in product(METHODS, SEQUENCES)
    ]


@pytest.mark.parametrize(("name", "sequences"), cases())
def test_a_layer_launches_what_the_table_says(name: str, sequences: int) -> None:
    counted, told = launches_of(name, sequences)[COUNTED], documented()[code(name)][SEQUENCES.index(sequences)]
    assert len(counted) == told, f"{counted}: if that is meant, run python -m tests.launches"


def test_the_table_holds_what_was_aimed_at() -> None:
    told = documented()
    assert told[code("vattention")][0] <= 40  # its sequences attend one after the other
    assert {*told} == {code(name) for name in METHODS}
    assert all(max(told[code(name)]) <= most for name, most in AIMED.items())


@pytest.mark.parametrize("codec", ["tq4", "tq3q", "nvfp4", "int4+4", "int4h", "kvzip tq4", "kvzip int4g16"])
def test_a_codec_launches_as_integers_do(codec: str) -> None:
    """Also where KV heads hold different numbers of tokens."""
    name = codec if " " in codec else f"coded {codec}"
    assert launches_of(name, SEQUENCES[0])[COUNTED] == launches_of("coded", SEQUENCES[0])[COUNTED]


@pytest.mark.parametrize("name", ["pqcache", "quest", "oracle"])
def test_a_budget_by_mass_launches_six_times_more(name: str) -> None:
    counted = launches_of(f"{name} mass", SEQUENCES[1])[COUNTED]
    assert len(counted) <= len(launches_of(name, SEQUENCES[1])[COUNTED]) + 6, counted


@pytest.mark.parametrize("name", AIMED)
def test_the_rest_of_a_step_launches_what_the_page_says(name: str) -> None:
    """Embedding, angles, sum and norm, head, two for the most likely tokens, and counters."""
    outside = launches_of(name, SEQUENCES[1])[None]
    assert OUTSIDE.replace("N", str(len(outside))) in PAGE.read_text(encoding="utf-8"), outside
    assert len(outside) <= 10


@pytest.mark.slow
@pytest.mark.tokens
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy, and masked lanes warn too
@pytest.mark.parametrize(
    "name",
    ["full", "pqcache", "quest", "shadowkv", "sparq", "rocketkv", "infinigen", "h2o", "oracle", "adakv", "lm_infinite"],
)
def test_steps_of_interpreted_kernels_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("methods.pqcache.queues", lambda device: True)  # it counts pairs of codes on a GPU

    def tokens(backend: str) -> list[list[list[int]]]:
        with attached_to(name) as kv:
            engine = Engine(kv)
            engine.generate(prompt(60), max_new_tokens=2)  # the first answer is checked
            engine.forward.stores = True
            batch = RunningBatch(engine)
            slots = [engine.join(batch, prompt(length, seed=length), max_new_tokens=4) for length in (41, 54)]
            with use_backend(backend):
                while batch.sequences:
                    batch.step()
            return [slot.out.tokens for slot in slots]

    assert tokens("triton") == tokens("torch")
