"""The benchmark of overflowing windows: what each row reads, how rows compare, what the command writes."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path

import pytest
import torch

from harness.bench import __main__ as bench
from harness.bench.overflow import TT, OverflowReader, Reading, row, ways
from harness.engine.attach import attached
from methods.full import Full
from tests.tiny import prompt, tiny

WINDOW, NEW, TURN = 64, 64, 16


def read(text: torch.Tensor, ratio: float = 0.5) -> dict[str, Reading]:
    with attached(tiny("llama"), Full()) as kv:
        return OverflowReader(kv, WINDOW, ratio, TURN).read(text, ways(2))


def test_rows_are_of_what_they_say() -> None:
    """Positions that go on give what a truncated cache gives; without an overflow it is the model's own likelihood."""
    text, model = prompt(WINDOW + NEW), tiny("llama")
    found = read(text)
    assert found["rotated, positions go on"].nll == pytest.approx(found["truncate_cache"].nll, abs=1e-4)
    assert len({round(one.nll, 4) for one in found.values()}) == len(found) - 1
    with torch.inference_mode():
        costs = -model(text).logits[0, :-1].log_softmax(-1).gather(-1, text[0, 1:, None])[:, 0]
    inside = [place for place in range(WINDOW, WINDOW + NEW) if place % TURN]  # no turn's first token is scored
    assert found["no overflow"].nll == pytest.approx(float(costs[torch.tensor(inside) - 1].mean()), abs=1e-4)


def test_recomputing_reads_the_last_tokens_alone() -> None:
    first, other = prompt(WINDOW + TURN), prompt(WINDOW + TURN)
    other[:, : WINDOW // 2] = prompt(WINDOW // 2, seed=9)  # leaves at the overflow
    before, after = read(first), read(other)
    assert before[TT].nll == pytest.approx(after[TT].nll, abs=1e-6)
    assert before["truncate_cache"].nll != pytest.approx(after["truncate_cache"].nll, abs=1e-3)


def test_differences_are_of_the_same_texts() -> None:
    recomputed = [Reading(3 + 0.01 * place, 1.0) for place in range(30)]
    worse = [Reading(one.nll + 0.5 + 0.001 * place, 0.0) for place, one in enumerate(recomputed)]
    made = row("truncate_cache", worse, recomputed)
    middle, low, high = made["difference"]
    assert low < 0.5145 < high
    assert middle == pytest.approx(0.5145)
    assert high - low < 0.2 < made["ln_perplexity"][2] - made["ln_perplexity"][1]
    assert made["seconds"] is None
    assert row(TT, recomputed, recomputed)["difference"] is None


def test_command_writes_table_and_figures(tmp_path: Path) -> None:
    data = tmp_path / "ppl" / "wikitext2_test_raw.txt"
    data.parent.mkdir()
    data.write_text(" ".join(f"word {number}" for number in range(200)))
    words = [
        "overflow",
        "--model",
        "model=random",
        "model.shape=tiny",
        "--texts",
        "2",
        "--window",
        "48",
        "--new",
        "24",
        "--turn",
        "12",
    ]
    assert bench.main([*words, "--data-root", str(tmp_path), "--no-plot", "--out", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [one["way"] for one in result["rows"]] == list(ways(4))
    assert all(isfinite(value) for one in result["rows"] for value in one["nll"])
    assert "truncate_rotated" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ratio", "0.9"], "--ratio 0.9 leaves no room for a turn of 32"),
        (["--turn", "65"], "--turn 65 does not fit into --window 64"),
        (["--sinks", "32"], "fewer than the 32 tokens that stay"),
    ],
)
def test_what_leaves_no_room_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["overflow", "--window", "64", "--turn", "32", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_count_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["overflow", "--window", "0"], ["history", "--tokens", "8", "0"], ["overlap", "--rounds", "many"]):
        with pytest.raises(SystemExit):
            bench.main(words)
        assert f"{words[-1]} should be a whole number, at least 1" in capsys.readouterr().err


def test_missing_data_are_told_as_the_command_knows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["overflow", "--data-root", str(tmp_path / "absent")])
    assert "argument --data-root" in capsys.readouterr().err
