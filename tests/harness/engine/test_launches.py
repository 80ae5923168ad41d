"""How often a captured step launches something on a GPU, as docs/kernels.md has it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from _pytest.mark import ParameterSet

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, and not counted", allow_module_level=True)

from harness.terminal.tables import code
from tests.launches import HEAD, METHODS, PAGE, SEQUENCES, launches_of

AIMED = {"full": 10, "snapkv": 10, "pqcache": 15, "quest": 16, "shadowkv": 18}  # for any number of sequences


def documented() -> dict[str, list[int]]:
    """Return the launches of each method by the table in docs/kernels.md."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"| {' | '.join(HEAD)} |\n")
    lines = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[1:]]
    return {name: [int(count) for count in counts] for name, *counts in lines}


def cases() -> list[ParameterSet]:
    """Return what is aimed at for each number of sequences, and every other method once; the rest is slow."""
    return [
        pytest.param(name, count, marks=[] if name in AIMED or count == SEQUENCES[1] else [pytest.mark.slow])
        for name, count in product(METHODS, SEQUENCES)
    ]


@pytest.mark.parametrize(("name", "sequences"), cases())
def test_a_layer_launches_what_the_table_says(name: str, sequences: int) -> None:
    counted, told = launches_of(name, sequences), documented()[code(name)][SEQUENCES.index(sequences)]
    assert len(counted) == told, f"{counted}: if that is meant, run python -m tests.launches"


def test_the_table_holds_what_was_aimed_at() -> None:
    told = documented()
    assert {*told} == {code(name) for name in METHODS}
    assert all(max(told[code(name)]) <= most for name, most in AIMED.items())
