"""The paper's figures: each claim means one run, and its number is one that the paper prints."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path

import pytest

from harness.cachedattention.simulation.paper import FILE, figure
from harness.commands.simulate import main
from harness.results.files import read_yaml

REFERENCE = Path(__file__).parents[4] / "results" / "paper" / "paper_reference.csv"
DERIVED = {0.40, 0.095, 0.857}  # from LRU's tiers and its distance to the others, and from a share of hits
NUMBERS = list(read_yaml(FILE))


@pytest.fixture(scope="module")
def printed() -> set[float]:
    with open(REFERENCE, newline="") as file:
        ours = [row for row in csv.DictReader(file) if row["source"].startswith("CachedAttention")]
    return {round(float(row["value"]), 3) for row in ours}


@pytest.mark.parametrize("number", NUMBERS)
def test_each_claim_means_one_run_and_a_printed_number(number: str, printed: set[float]) -> None:
    one = figure(number)
    rows = [{"settings": asdict(run), "figures": {claim.of: 0.5 for claim in one.claims}} for run in one.scenarios([])]
    for claim in one.claims:
        assert claim.ours(rows) in (0.5, 0.0, 1.0)
        known = {round(abs(claim.paper), 3), round(100 * abs(claim.paper), 1)}
        assert known & printed or claim.paper in DERIVED or round(claim.paper, 3) == 0.129, claim.name


def test_a_figure_has_the_papers_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--figure", "25", "sessions=40", "warmup=10", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "82.0 %" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"simulation.json", "simulation.csv"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["99"], "choose one of 13, 14"),
        (["21", "policy=lru"], "leave out policy=lru"),
        (["25", "seed=0,1"], "leave out seed"),
    ],
)
def test_what_a_figure_cannot_do(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--figure", *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
