"""`python -m harness.serve` with a tiny model, from its words to its files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

from harness.cachedattention.serving.figures import Answer, cost, figures
from harness.cachedattention.serving.loop import ServingLoop
from harness.cachedattention.serving.plan import TrafficSettings, drawn, points
from harness.cachedattention.simulation import costs
from harness.cachedattention.turns import opening
from harness.commands.serve import main
from tests.fast import MODEL_ARGS
from tests.talks import configured, item

Serve = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "BLOCK_TOKENS", 16)


@pytest.fixture
def serve(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Serve:
    """Runs the command in this process; exit code, stdout, stderr."""
    folder = configured(tmp_path / "conf")

    def run(*words: str) -> tuple[int, str, str]:
        code = main([*MODEL_ARGS, *words, "clock=busy", "--config-dir", str(folder), "--out", str(tmp_path / "out")])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def turns(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]
    return {(line["session"], line["turn"]): line for line in lines}


@pytest.mark.tokens
def test_every_history_says_the_same_and_all_figures_are_written(serve: Serve, tmp_path: Path) -> None:
    words = ("task=talks", "method=full", "history=store,recompute,device_prefix", "rate=50", "think_s=0.01")
    code, out, err = serve(*words)
    assert (code, err.count("p90 of TTFT")) == (0, 3), err
    table = _table(tmp_path / "out")
    made = json.loads((table / "serving.json").read_text())
    folders = {run["settings"]["history"]: place for place, run in _folders(tmp_path / "out")}
    told = {history: turns(folder) for history, folder in folders.items()}
    assert len(told["store"]) == 4 + 1 + 2
    for history in ("store", "device_prefix"):
        assert {key: one["tokens"] for key, one in told[history].items()} == {
            key: one["tokens"] for key, one in told["recompute"].items()
        }
    tiers = {history: {one["tier"] for key, one in lines.items() if key[1] > 1} for history, lines in told.items()}
    assert tiers == {"store": {"host"}, "recompute": {None}, "device_prefix": {"device"}}
    with open(table / "serving.csv", newline="") as file:
        rows = {row["history"]: row for row in csv.DictReader(file)}
    assert float(rows["store"]["hit_rate"]) == pytest.approx(3 / 7)
    assert float(rows["recompute"]["hit_rate"]) == 0
    assert {run["figures"]["turns"] for run in made["runs"]} == {7}
    assert "host" in out


def _table(out: Path) -> Path:
    """The folder of the only command."""
    [folder] = (out / "tables").iterdir()
    return folder


def _folders(out: Path) -> list[tuple[Path, dict[str, Any]]]:
    return [(file.parent, json.loads(file.read_text())) for file in sorted(out.glob("*/serving.json"))]


def test_a_disk_tier_is_empty_at_first_and_a_finished_run_is_not_made_again(serve: Serve, tmp_path: Path) -> None:
    words = ("task=talks", "method=full", "history=store", "store.host=0", "store.disk=1GB", "rate=50,60")
    code, _, err = serve(*words, "think_s=0.01")
    assert code == 0, err
    for folder, run in _folders(tmp_path / "out"):
        assert {one["tier"] for key, one in turns(folder).items() if key[1] > 1} == {"disk"}
        assert all(one["tier"] is None for key, one in turns(folder).items() if key[1] == 1)
        assert run["store"]
    before = [(folder / "turns.jsonl").read_bytes() for folder, _ in _folders(tmp_path / "out")]
    code, _, err = serve(*words, "think_s=0.01")
    assert (code, err.count("already")) == (0, 2), err
    assert [(folder / "turns.jsonl").read_bytes() for folder, _ in _folders(tmp_path / "out")] == before


def test_a_turn_that_fails_ends_its_run_and_the_other_runs_are_made(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, words = ServingLoop._step, ("task=talks", "method=full", "rate=50,60,70", "think_s=0.01")

    def fails(loop: ServingLoop) -> None:
        if loop.ending.__self__.folder.name.startswith("full_device_prefix_60_"):  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(loop)

    with monkeypatch.context() as patch:
        patch.setattr(ServingLoop, "_step", fails)
        code, out, err = serve(*words)
    assert (code, err.count("p90 of TTFT")) == (1, 2)
    assert "error: rate=60: Out of memory (CUDA out of memory)" in err
    assert [line.split()[0] for line in out.splitlines() if line[:1].isdigit()] == ["50.0", "70.0"]
    made = json.loads((_table(tmp_path / "out") / "serving.json").read_text())["runs"]
    assert [run["settings"]["rate"] for run in made] == [50, 70]
    with monkeypatch.context() as patch:
        patch.setattr(ServingLoop, "_step", fails)
        code, out, err = serve(*words[:2], "rate=60", "think_s=0.01")
    assert (code, out, err.count("error: Out of memory")) == (2, "", 1)
    code, out, err = serve(*words)
    assert (code, err.count("was there already"), err.count("p90 of TTFT")) == (0, 2, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["methd=full"], "method"),
        (["store.hots=1GB"], "store.host"),
        (["history=recompute", "store.host=1GB"], "history=store"),
        (["interleave=true"], "interleave"),
        (["read_buffer=2"], "read_buffer"),
        (["history=store", "store.folder=x"], "TMPDIR"),
        (["clock=cpu"], "clock=cpu"),
        (["rate=nan"], "rate=nan"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(
    words: list[str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [*MODEL_ARGS, "task=talks", *words, "--config-dir", str(configured(tmp_path))]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    assert told in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rates_vary_slowest_and_the_last_word_wins() -> None:
    made = points(["history=store,recompute", "rate=9", "method=full", "rate=0.5,1"])
    assert [(one.traffic.rate, one.named["history"]) for one in made] == [
        (0.5, "store"), (0.5, "recompute"), (1, "store"), (1, "recompute"),
    ]  # fmt: skip
    assert {one.system for one in made} == {"history=store", "history=recompute"}
    assert {one.words for one in made} == {
        ("task=multiturn", "history=store", "method=full"), ("task=multiturn", "history=recompute", "method=full"),
    }  # fmt: skip


def test_settings_of_the_store_are_for_the_points_that_have_one() -> None:
    store, recompute = points(["task=niah", "history=store,recompute", "store.host=1GB"])
    assert (store.words, recompute.words) == (
        ("task=niah", "history=store", "store.host=1GB"), ("task=niah", "history=recompute"),
    )  # fmt: skip


def test_totals_by_hand() -> None:
    """Two sessions: one turn of 10 tokens, and two turns of which the second finds 12 of 16."""
    shape = {"save_s": 0.0, "load_s": 0.25, "hidden_s": 0.0, "tokens": [1, 2, 3], "stop": "length"}
    answers = [
        Answer(session="a", turn=1, arrived_s=0.0, queue_s=0.0, token_s=[1.0, 2.0, 2.5], tier=None, reused_tokens=0,
               new_tokens=10, **shape),
        Answer(session="b", turn=1, arrived_s=1.0, queue_s=2.0, token_s=[3.0, 4.0, 4.5], tier=None, reused_tokens=0,
               new_tokens=14, **shape),
        Answer(session="b", turn=2, arrived_s=9.0, queue_s=0.0, token_s=[0.5, 1.0, 2.0], tier="host", reused_tokens=12,
               new_tokens=4, **shape),
    ]  # fmt: skip
    told = figures(answers, elapsed_s=20.0, idle_s=8.0)
    assert (told["sessions"], told["turns"], told["answer_tokens"]) == (2, 3, 9)
    assert told["hit_rate"] == told["hit_rate_host"] == told["returning"] == pytest.approx(1 / 3)
    assert told["reused_tokens"] == pytest.approx(12 / 40)
    assert (told["ttft_s"], told["ttft_p50_s"], told["ttft_p90_s"]) == pytest.approx((1.5, 1.0, 2.6))
    assert told["queue_s"] == pytest.approx(2 / 3)
    assert told["prefill_tok_s"] == pytest.approx(40 / (1.0 + 1.0 + 0.5))
    assert told["tpot_p50_s"] == 0.5
    assert (told["busy_s"], told["turns_per_s"]) == pytest.approx((12.0, 0.15))
    prices = costs.load().prices
    paid = cost(3600.0, prices, {"host": 128 * 10**9, "disk": 10**13})
    assert paid["cost_usd"] == pytest.approx(5.0 + 128 * 0.0088 + 10_000 * 0.000082)
    assert paid["storage_share"] == pytest.approx(1 - 5.0 / paid["cost_usd"])
    assert cost(3600.0, prices, {}) == {"cost_usd": 5.0, "storage_share": 0.0}


def test_arrivals_are_a_poisson_process_that_the_rate_stretches() -> None:
    """Mean and standard deviation of an exponential law are equal: 200 and 300 draws, four standard errors."""
    items = [item(str(place), *[(6, 3)] * (1 + place % 4), seed=place) for place in range(200)]
    slow, fast = (drawn(items, TrafficSettings(rate=rate, think_s=4.0), seed=3) for rate in (0.5, 2.0))
    assert [session.start_s for session in fast] == pytest.approx([session.start_s / 4 for session in slow])
    assert [session.think_s for session in fast] == [session.think_s for session in slow]
    assert [len(session.think_s) for session in slow] == [len(session.item.further) for session in slow]
    gaps = [later - earlier for earlier, later in pairwise([0.0, *(session.start_s for session in slow)])]
    thinks = [seconds for session in slow for seconds in session.think_s]
    for values, wanted in ((gaps, 2.0), (thinks, 4.0)):
        assert fmean(values) == pytest.approx(wanted, rel=4 / len(values) ** 0.5)
        assert pstdev(values) == pytest.approx(wanted, rel=4 * 2**0.5 / len(values) ** 0.5)
