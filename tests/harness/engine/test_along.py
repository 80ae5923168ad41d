"""The costs along an answer: the same alone, in batches and in captured steps, and exact where they can be counted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness.engine.attach import attached
from harness.engine.batch.running_sequence import Generation
from harness.engine.engine import Engine
from kernels.dispatch import use_backend
from methods.base import Budget
from methods.full import Full
from tests.harness.engine.test_slots import SLOTS, alone, engine_of, together
from tests.methods.test_contract import NAMES, attach, small
from tests.quick import slow_if
from tests.tape import Tape
from tests.tiny import prompt, tiny


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches that end after 2, 4 and 8 steps, in place of 64, 128 and so on."""
    monkeypatch.setattr("harness.engine.batch.along.FIRST", 2)


def mean(answer: Generation, key: str) -> float:
    """The mean over all steps, of the means of stretches."""
    assert answer.along is not None
    ends = [0.0, *answer.along["steps"]]
    steps = [after - before for before, after in pairwise(ends)]
    return sum(n * value for n, value in zip(steps, answer.along[key], strict=True)) / ends[-1]


@pytest.mark.tokens
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", slow_if(lambda name: name not in SLOTS, NAMES))
def test_stretches_are_the_same_alone_together_and_captured(name: str) -> None:
    with attach(small(name), 0.5, placement="host" if name == "pqcache" else "device") as kv, use_backend("torch"):
        wanted = alone(engine_of(kv))
        for graphs in (None, Tape()):
            assert [answer.along for answer in together(engine_of(kv, graphs=graphs))] == [
                answer.along for answer in wanted
            ]
    for answer in wanted:
        assert answer.along is not None
        assert answer.along["steps"] == ([2] if len(answer.tokens[0]) == 3 else [2, 4, 7])
        assert mean(answer, "attended") == pytest.approx(answer.measured["attended_total"], abs=0.01)
        assert mean(answer, "moved_bytes") == pytest.approx(answer.measured["moved_bytes_per_step"], abs=0.01)
        assert answer.along["used_bytes"][-1] <= sum(answer.kv.values())


def test_full_reads_all_and_a_limit_of_generated_tokens_ends_growth() -> None:
    row = 3 * 2 * 2 * 16 * 4  # bytes of a token: layers, keys and values, heads, channels, fp32
    with attached(tiny("llama"), Full()) as kv:
        full = Engine(kv).generate(prompt(50), max_new_tokens=140).along
        assert Engine(kv).generate(prompt(50), max_new_tokens=64).along is None  # 63 steps
    assert full == {
        "steps": [64, 128, 139],
        "attended": [50 + 32.5, 50 + 96.5, 50 + 134],
        "moved_bytes": [0, 0, 0],
        "used_bytes": [row * (50 + steps) for steps in (64, 128, 139)],
    }
    with attached(tiny("llama"), small("streaming"), budget=Budget(0.5, generated=40)) as kv:
        kept = Engine(kv).generate(prompt(50), max_new_tokens=140).along
    assert kept is not None
    assert kept["attended"][0] < kept["attended"][1] <= 25 + 40
    assert max(kept["used_bytes"]) <= row * (25 + 40) + 64 * 25  # with the positions that are kept
