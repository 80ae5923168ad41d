"""Conversations that outgrow the window: what stays of their history, wherever it is, and what the records say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evals.multiturn.overflow import NeedlesBehindOverflow
from harness.cachedattention.turns import opening
from harness.cachedattention.turns.conversation import Overflow
from harness.config.settings import OverflowSettings, Settings, SettingsError, StoreSettings
from harness.results.records import Reply
from harness.results.run_folder import StoredRun
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.streaming import Streaming
from tests.harness.jobs.test_questions import Balances, counted, run

TALKS = Balances(talks=True)
WINDOW = 380  # the first turn fits, the second does not
DISK = StoreSettings(host=0, disk="1GB")


def talked(folder: Path, method: Method | None = None, **changes: Any) -> StoredRun:
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
    stayed = talked(tmp_path, sinks=sinks)
    for changes in ({"store": DISK, "batch": 2}, {"store": StoreSettings()}):
        monkeypatch.setattr(opening, "BLOCK_TOKENS", 64 if changes["store"] == StoreSettings() else 256)
        stored = talked(tmp_path, sinks=sinks, history="store", **changes)
        assert said(stored) == said(stayed)
        assert [reply["dropped_tokens"] for reply in turns(stored)[0]] == [
            reply["dropped_tokens"] for reply in turns(stayed)[0]
        ]


@pytest.mark.tokens
@pytest.mark.parametrize("protocol", ["prompt", pytest.param("context", marks=pytest.mark.slow)])
def test_truncated_text_is_computed_again_wherever_its_cache_was(tmp_path: Path, protocol: str) -> None:
    again = said(talked(tmp_path, history="recompute", protocol=protocol))
    for history in ("device_prefix", "store"):
        assert said(talked(tmp_path, history=history, by="truncate_tokens", protocol=protocol)) == again
    assert said(talked(tmp_path, protocol=protocol)) != again


def test_records_say_what_left_and_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefills = counted(monkeypatch)
    for first, second, *rest in turns(talked(tmp_path)):
        before = first.prompt_tokens + len(first.tokens) - 1
        assert first["dropped_tokens"] is None
        assert second["dropped_tokens"] == before - int(before * 0.5)
        assert second.history_tokens == first.prompt_tokens + len(first.tokens) - second["dropped_tokens"]
        assert second["reused_tokens"] == int(before * 0.5)
        assert all(turn.history_tokens + turn.prompt_tokens + 5 <= WINDOW for turn in (second, *rest))
    assert sum(tokens > 200 for tokens in prefills) == 2  # of each conversation the first turn
    talked(tmp_path, by="truncate_tokens")
    assert sum(tokens > 200 for tokens in prefills) == 2 + 4


@pytest.mark.tokens
@pytest.mark.parametrize("method", [H2O(), pytest.param(Streaming(), marks=pytest.mark.slow)], ids=["H2O", "Streaming"])
def test_what_a_method_kept_goes_on_together(tmp_path: Path, method: Method) -> None:
    """It holds less than would stay: none of it leaves, and the gaps close."""
    stayed = talked(tmp_path, method)
    assert said(talked(tmp_path, method, history="store")) == said(stayed)
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
        talked(tmp_path, window=300)
    least = int(str(refused.value).rpartition("overflow.window=")[2].split()[0])
    assert turns(talked(tmp_path, window=least))[0][1]["dropped_tokens"]
    with pytest.raises(SettingsError, match=r"overflow\.window=.*131072"):
        talked(tmp_path, window=200_000)


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
