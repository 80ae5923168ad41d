"""Runs whose conversations are stored between turns, or computed again: tokens, records, tables, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evals.multiturn.overflow import NeedlesBehindOverflow
from harness.cachedattention.turns import opening
from harness.cachedattention.turns.conversation import Overflow
from harness.config.settings import OverflowSettings, Settings, SettingsError, StoreSettings
from harness.reports.compare import comparisons
from harness.reports.document import as_text
from harness.reports.groups import turn_reuse
from harness.reports.notes import stamp_meanings, stamps
from harness.results.records import Reply
from harness.results.run_folder import StoredRun, load
from harness.terminal.tables import digits
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.pqcache import PQCache
from methods.snapkv import SnapKV
from methods.streaming import Streaming
from tests.fast import tokens
from tests.harness.jobs.test_questions import Balances, counted, run
from tests.histories import full_disk

TALKS = Balances(talks=True)
DISK = StoreSettings(host=0, disk="1GB")


def talked(folder: Path, method: Method, **changes: Any) -> StoredRun:
    return run(folder, method, TALKS, **{"protocol": "prompt", "baseline": "off", "warmup": 0} | changes)


@pytest.mark.tokens
@pytest.mark.parametrize(("method", "protocol"), [(Full(), "prompt"), (Full(), "context"), (H2O(), "prompt")], ids=str)
def test_answers_are_alike_wherever_a_history_was(tmp_path: Path, method: Method, protocol: str) -> None:
    """Full's also where it is computed again; what H2O evicted stays evicted."""
    stayed = talked(tmp_path, method, protocol=protocol)
    for changes in (
        {"history": "store", "batch": 2, "store": DISK},
        {"history": "store", "prefill_chunk": 50},
        {"history": "recompute"} if method == Full() else {"history": "store", "shared_prefill": True},
    ):
        assert tokens(talked(tmp_path, method, protocol=protocol, **changes)) == tokens(stayed)


@pytest.mark.tokens
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_rows_are_stored_from_layers_that_closed_in_the_prefill(
    tmp_path: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows begin to leave for the store behind the prefill, when layers have sealed and sent theirs away."""
    method = PQCache(b=3, iterations=3, sinks=4)
    stayed = talked(tmp_path, method, budget=0.4)
    elsewhere = {"budget": 0.4, "placement": placement, "prefill_chunk": 50}
    monkeypatch.setattr(opening, "BLOCK_TOKENS", 16)
    for how in ({}, {"history": "store", "store": StoreSettings(host="1GB")}):
        assert tokens(talked(tmp_path, method, **elsewhere, **how)) == tokens(stayed)


@pytest.mark.parametrize("method", [Full(), H2O()], ids=["rows", "state"])
@pytest.mark.parametrize("sizes", [{"host": 8}, {"host": "1GB", "disk": 8}], ids=str)
def test_a_tier_that_holds_no_conversation_is_refused(tmp_path: Path, method: Method, sizes: dict[str, Any]) -> None:
    """Most of all a number that was to mean gigabytes."""
    tier = list(sizes)[-1]
    with pytest.raises(SettingsError, match=rf"store\.{tier}=8 "):
        talked(tmp_path, method, budget=0.5, history="store", store=StoreSettings(**sizes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "tiers"),
    [
        ({"history": "store", "batch": 2}, [None, "host", "host", "host"]),
        ({"history": "store", "store": DISK}, [None, "disk", "disk", "disk"]),
        ({"history": "recompute"}, [None] * 4),
        ({}, [None, "device", "device", "device"]),
    ],
    ids=str,
)
def test_a_turn_says_what_it_found_and_what_it_computed(
    tmp_path: Path, changes: dict[str, Any], tiers: list[str | None]
) -> None:
    finished = talked(tmp_path, Full(), **changes)
    for record in finished.records:
        turns = record.turns or []
        assert [turn["hit_tier"] for turn in turns] == tiers
        for turn, tier in zip(turns, tiers, strict=True):
            assert turn["reused_tokens"] is not None
            assert turn["new_tokens"] == turn.history_tokens + turn.prompt_tokens - turn["reused_tokens"]
            assert (turn["reused_tokens"] > 0) == (tier is not None)
            assert (turn["load_s"] is None) == (turn["hidden_s"] is None) == (turn is turns[0])
            for waited in (turn["save_ahead_s"], turn["save_s"], turn["save_hidden_s"]):
                assert (waited is None) == (turn is turns[-1])
            assert turn.ttft_s > (turn["load_s"] or 0)
            assert (turn["hidden_s"] is None) == (turn is turns[0])
        assert record["new_tokens"] == sum(turn["new_tokens"] or 0 for turn in turns)
    third = finished.summary["turns"]["3"]
    assert third["hits"] == ({tiers[2]: 2} if tiers[2] else {})
    assert third["load_s"] > 0


def test_a_table_says_where_histories_were_found(tmp_path: Path) -> None:
    sweep = ({"history": "store", "store": DISK}, {"history": "recompute"}, {})
    [table] = comparisons([load(talked(tmp_path, Full(), **changes).folder) for changes in sweep])
    assert [entry.label for entry in table.entries] == [  # what is said of the store is the store's row's alone
        f"full history={name}" for name in ("device_prefix", "recompute", "store")
    ]
    shown = {column.head: column.cells for column in turn_reuse(table)}
    assert shown["method"] == ["full history=recompute"] * 4 + ["full history=store"] * 4
    assert shown["found in"] == ["", *["nowhere"] * 3, "", *["disk"] * 3]
    for name, blank in (("load", [True, *[False] * 3]), ("save", [*[False] * 3, True])):
        assert [cell == "" for cell in shown[name]] == [True] * 4 + blank  # nothing is moved by recompute
    assert shown["computed"][3] == digits(table.entries[1].summary["turns"]["4"]["new_tokens"])
    assert not turn_reuse(comparisons([load(talked(tmp_path, Full()).folder)])[0])


@pytest.mark.filterwarnings("ignore::harness.cachedattention.store.disk.HistoryWarning")
@pytest.mark.parametrize("method", [Full(), PQCache(), SnapKV()], ids=lambda method: type(method).__name__)
def test_turns_that_a_full_disk_has_changed_are_counted_stamped_and_told(
    tmp_path: Path, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, after=2)
    monkeypatch.setattr(opening, "IO_THREADS", 0)
    finished = talked(tmp_path, method, history="store", store=DISK, budget=0.5)
    counts = [[turn["lost_turns"] for turn in record.turns or []] for record in finished.records]
    [table] = comparisons([load(finished.folder)])
    [entry] = table.entries
    text = " ".join(as_text([table]).split())  # lines are wrapped anywhere
    if isinstance(method, Full):
        assert counts == [[None, 0, 0, 0]] * 2
        assert finished.summary["lost_turns"] == 0
        assert "X" not in stamps(entry, table)
        assert "histories were lost" not in text
        return
    lost = sum(filter(None, counts[0] + counts[1]))
    assert finished.summary["lost_turns"] == lost == sum(record["lost_turns"] or 0 for record in finished.records) > 0
    assert {turn["lost_to"] for record in finished.records for turn in record.turns or [] if turn["lost_turns"]} == {
        "the disk is full"
    }
    assert "X" in stamps(entry, table)
    assert f"Caution: {entry.title}: stored histories" in text
    assert stamp_meanings()["X"] in text


def test_a_run_leaves_its_conversations_in_a_folder_of_its_own(tmp_path: Path) -> None:
    store = StoreSettings(host="1GB", disk="1GB", folder=str(tmp_path / "store"))
    first = talked(tmp_path, Full(), history="store", store=store)
    assert [path.name for path in (tmp_path / "store").iterdir()] == [first.folder.name]
    assert list((tmp_path / "store").rglob("*.safetensors"))
    moved = replace(store, folder=str(tmp_path / "elsewhere"))
    assert talked(tmp_path, Full(), history="store", store=moved).folder == first.folder
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store": DISK}, "set history=store"),
        ({"history": "store", "store": StoreSettings(host=0)}, "store.host=8GB"),
        ({"history": "store", "store": StoreSettings(host="8 gigs")}, "store.host=8 gigs is no size"),
        ({"history": "store", "store": StoreSettings(folder="x")}, "set store.disk"),
        ({"history": "store", "store": StoreSettings(policy="lur")}, "lru"),
        ({"history": "store", "store": StoreSettings(ttl_s=0)}, "above 0"),
        ({"history": "stores"}, "device_prefix, store, recompute"),
    ],
    ids=str,
)
def test_what_a_store_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings(**changes)


# Conversations that outgrow the window: what stays of their history, wherever it is, and what the records say.

WINDOW = 380  # the first turn fits, the second does not


def overflowed(folder: Path, method: Method | None = None, **changes: Any) -> StoredRun:
    """`by`, `sinks`, `ratio`: of the overflow."""
    own = {name: changes.pop(name) for name in ("by", "sinks", "ratio", "window") if name in changes}
    overflow = OverflowSettings(**{"window": WINDOW} | own)
    return run(folder, method or Full(), TALKS, **{"protocol": "prompt", "overflow": overflow} | changes)


def said(made: StoredRun) -> dict[str, list[list[int]]]:
    return {record.id: [turn.tokens for turn in record.turns or ()] for record in made.records}


def turns(made: StoredRun) -> list[list[Reply]]:
    return [list(record.turns or ()) for record in made.records]


@pytest.mark.tokens
@pytest.mark.parametrize("sinks", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_stored_history_is_cut_as_one_on_the_device(
    tmp_path: Path, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stayed = overflowed(tmp_path, sinks=sinks)
    for changes in ({"store": DISK, "batch": 2}, {"store": StoreSettings()}):
        monkeypatch.setattr(opening, "BLOCK_TOKENS", 64 if changes["store"] == StoreSettings() else 256)
        stored = overflowed(tmp_path, sinks=sinks, history="store", **changes)
        assert said(stored) == said(stayed)
        assert [reply["dropped_tokens"] for reply in turns(stored)[0]] == [
            reply["dropped_tokens"] for reply in turns(stayed)[0]
        ]


@pytest.mark.tokens
@pytest.mark.parametrize("protocol", ["prompt", pytest.param("context", marks=pytest.mark.slow)])
def test_truncated_text_is_computed_again_wherever_its_cache_was(tmp_path: Path, protocol: str) -> None:
    again = said(overflowed(tmp_path, history="recompute", protocol=protocol))
    for history in ("device_prefix", "store"):
        assert said(overflowed(tmp_path, history=history, by="truncate_tokens", protocol=protocol)) == again
    assert said(overflowed(tmp_path, protocol=protocol)) != again


def test_records_say_what_left_and_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefills = counted(monkeypatch)
    for first, second, *rest in turns(overflowed(tmp_path)):
        before = first.prompt_tokens + len(first.tokens) - 1
        assert first["dropped_tokens"] is None
        assert second["dropped_tokens"] == before - int(before * 0.5)
        assert second.history_tokens == first.prompt_tokens + len(first.tokens) - second["dropped_tokens"]
        assert second["reused_tokens"] == int(before * 0.5)
        assert all(turn.history_tokens + turn.prompt_tokens + 5 <= WINDOW for turn in (second, *rest))
    assert sum(tokens > 200 for tokens in prefills) == 2  # of each conversation the first turn
    overflowed(tmp_path, by="truncate_tokens")
    assert sum(tokens > 200 for tokens in prefills) == 2 + 4


@pytest.mark.tokens
@pytest.mark.parametrize("method", [H2O(), pytest.param(Streaming(), marks=pytest.mark.slow)], ids=["H2O", "Streaming"])
def test_what_a_method_kept_goes_on_together(tmp_path: Path, method: Method) -> None:
    """It holds less than would stay: none of it leaves, and the gaps close."""
    stayed = overflowed(tmp_path, method)
    assert said(overflowed(tmp_path, method, history="store")) == said(stayed)
    for first, second, *_ in turns(stayed):
        assert second["dropped_tokens"] is not None
        kept = first.prompt_tokens + len(first.tokens) - 1 - second["dropped_tokens"]
        assert kept < int(0.5 * first.prompt_tokens)


def test_room_is_made_until_a_turn_fits() -> None:
    overflow = Overflow(OverflowSettings(window=100, ratio=0.5))
    assert [overflow.keep(*pair) for pair in ((60, 40), (60, 41), (80, 70), (80, 99), (80, 100))] == [60, 30, 20, 1, 0]
    kept = Overflow(OverflowSettings(window=100, ratio=0.5, sinks=4))
    assert [kept.keep(*pair) for pair in ((60, 41), (80, 94), (80, 96))] == [30, 5, 0]


def test_a_window_is_refused_that_a_turn_does_not_fit_or_the_model_has_not(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"overflow\.window=300 ") as refused:
        overflowed(tmp_path, window=300)
    least = int(str(refused.value).rpartition("overflow.window=")[2].split()[0])
    assert turns(overflowed(tmp_path, window=least))[0][1]["dropped_tokens"]
    with pytest.raises(SettingsError, match=r"overflow\.window=.*131072"):
        overflowed(tmp_path, window=200_000)


def test_a_task_about_overflow_needs_a_window(tmp_path: Path) -> None:
    task = NeedlesBehindOverflow(window=600, facts=100, questions=2, conversations=1, haystack="pydoc")
    with pytest.raises(SettingsError, match=r"set overflow\.window=600"):
        run(tmp_path, Full(), task)
    finished = run(tmp_path, Full(), task, protocol="prompt", overflow=OverflowSettings(window=600))
    assert turns(finished)[0][1]["dropped_tokens"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overflow": OverflowSettings(ratio=0.3)}, "set overflow.window=2048"),
        ({"overflow": OverflowSettings(window=1)}, "overflow.window=1 "),
        ({"overflow": OverflowSettings(window=99, by="cache")}, "truncate_cache, truncate_tokens"),
        ({"overflow": OverflowSettings(window=99, ratio=1.0)}, "above 0 and below 1"),
        ({"overflow": OverflowSettings(window=99, sinks=49)}, "overflow.sinks=49"),
        ({"overflow": OverflowSettings(window=99, by="truncate_cache"), "history": "recompute"}, "no cache"),
        ({"overflow": OverflowSettings(window=99, by="truncate_rotated"), "history": "store"}, "truncate_cache"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings(**changes)
