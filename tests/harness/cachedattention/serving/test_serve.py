"""`python -m harness.serve` with a tiny model, from its words to its files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cachedattention.serving.figures import Answer, cost, figures
from harness.cachedattention.serving.traffic import points
from harness.cachedattention.simulation import costs
from harness.cachedattention.turns import opening
from harness.commands.serve import main
from tests.abandoned import abandoned
from tests.fast import MODEL_ARGS
from tests.histories import full_disk
from tests.talks import configured

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
    assert (table / "ttft.png").stat().st_size > 0
    assert "host" in out


def _table(out: Path) -> Path:
    """The folder of the only command."""
    [folder] = (out / "tables").iterdir()
    return folder


def _folders(out: Path) -> list[tuple[Path, dict[str, Any]]]:
    return [(file.parent, json.loads(file.read_text())) for file in sorted(out.glob("*/serving.json"))]


@pytest.mark.tokens
def test_a_finished_run_is_not_made_again_and_a_trace_is_replayed(serve: Serve, tmp_path: Path) -> None:
    stored = ("method=full", "history=store")
    first = (*stored, "rate=50", "task=talks", "task.conversations=2", "think_s=0.01")
    assert serve(*first)[0] == 0
    [(folder, _)] = _folders(tmp_path / "out")
    before = (folder / "turns.jsonl").read_bytes()
    code, _, err = serve(*first)
    assert (code, "already" in err) == (0, True)
    assert (folder / "turns.jsonl").read_bytes() == before
    replay = f"replay={folder / 'trace.jsonl'}"
    code, _, err = serve(*stored, replay)  # the same arrivals and words: the same run
    assert (code, "already" in err) == (0, True)
    assert len(list((tmp_path / "out" / "tables").iterdir())) == 1
    code, _, err = serve("method=full", replay, "seed=7")
    assert (code, "seed" in err) == (2, True)
    code, _, err = serve("method=full", replay, "history=recompute", "rate=100")
    assert code == 0, err
    [other] = [one for one in _folders(tmp_path / "out") if one[1]["settings"]["history"] == "recompute"]
    assert other[1]["settings"]["rate"] == 100
    assert len(list((tmp_path / "out" / "tables").iterdir())) == 2  # each command keeps its table
    assert {key: one["tokens"] for key, one in turns(other[0]).items()} == {
        key: one["tokens"] for key, one in turns(folder).items()
    }
    code, _, err = serve("task=talks", "method=full", replay)
    assert (code, "replay" in err) == (2, True)


def test_a_disk_tier_lies_in_the_folder_that_was_named_and_is_empty_at_first(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    words = ("task=talks", "method=full", "history=store", "store.host=0", "store.disk=1GB")
    words = (*words, f"store.folder={tmp_path / 'tier'}", "rate=50,60", "think_s=0.01")
    code, _, err = serve(*words)
    assert code == 0, err
    for folder, run in _folders(tmp_path / "out"):
        assert {one["tier"] for key, one in turns(folder).items() if key[1] > 1} == {"disk"}
        assert all(one["tier"] is None for key, one in turns(folder).items() if key[1] == 1)
        assert run["store"]
    assert not list((tmp_path / "tier").iterdir())
    abandoned(tmp_path / "tier")  # by a process that was killed behind its last run
    code, _, err = serve(*words)
    assert (code, err.count("was there already")) == (0, 2), err
    assert not list((tmp_path / "tier").iterdir())


@pytest.mark.filterwarnings("ignore::harness.cachedattention.store.disk.HistoryWarning")
def test_turns_that_a_full_disk_has_changed_are_counted(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch)
    words = ("task=talks", "method=full,streaming", "history=store", "store.host=0", "store.disk=1GB", "budget=0.5")
    monkeypatch.setattr(opening, "WRITE_BUFFER", 0)  # a turn that comes at once would find rows that wait to be written
    code, out, err = serve(*words, "rate=50", "think_s=0.01")
    assert code == 0, err
    for folder, run in _folders(tmp_path / "out"):
        lost = {key: one["lost_to"] for key, one in turns(folder).items()}
        full_itself = run["settings"]["method"]["_target_"].endswith("Full")
        assert lost == {key: None if full_itself or key[1] == 1 else "the disk is full" for key in lost}
        assert run["figures"]["lost_turns"] == (0 if full_itself else 3)
    assert "lost" in out


def test_a_limit_is_searched_for_each_system(serve: Serve, tmp_path: Path) -> None:
    """Above 0.002 per second the two sessions come within the limit: no higher rate is asked for."""
    words = ("task=talks", "task.conversations=2", "method=full", "history=store,recompute", "think_s=0.01")
    code, out, err = serve(*words, "rate=0.0015", "--limit", "p90=1000s")
    assert code == 0, err
    assert "history=store rate=0.0015" in err
    found = json.loads((_table(tmp_path / "out") / "serving.json").read_text())
    assert found["limit"]["systems"] == {
        f"history={history}": {"highest": 0.003, "broken": []} for history in ("store", "recompute")
    }
    order = [run["settings"]["history"] for run in found["runs"]]
    assert order == ["store", "recompute"] * 2  # they take turns at each rate
    assert "history=store: " in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["methd=full"], "method"),
        (["store.hots=1GB"], "store.host"),
        (["history=recompute", "store.host=1GB"], "history=store"),
        (["interleave=true"], "prefill_chunk"),
        (["read_buffer=2"], "read_buffer"),
        (["clock=cpu"], "threads=1"),
        (["replay=nowhere.jsonl"], "nowhere.jsonl"),
        (["rate=nan"], "rate=nan"),
        (["--limit", ""], "--limit"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(
    words: list[str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = [] if words[0].startswith("replay") else ["task=talks"]
    given = [*MODEL_ARGS, *task, *words, "--config-dir", str(configured(tmp_path)), "--out", str(tmp_path / "out")]
    assert main(given) == 2
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
    made = points(["history=store,recompute", "read_buffer=0,4"])
    assert [one.system for one in made] == [
        "history=store read_buffer=0", "history=store read_buffer=4", "history=recompute",
    ]  # fmt: skip


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
