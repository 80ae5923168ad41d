"""The bytes of a hybrid model's states: a run's row holds what is forecast from its config."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.commands import report
from harness.config.settings import OverflowSettings
from harness.jobs import model_check
from harness.jobs.memory import size
from harness.models.hub import HuggingFace
from methods.full import Full
from methods.snapkv import SnapKV
from tests.fast import niah, run
from tests.harness.jobs import test_forecast as forecast
from tests.harness.jobs.test_questions import Balances
from tests.quick import every
from tests.tiny import STATEFUL, fresh, saved, tiny

Saved = Callable[..., HuggingFace]
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """A hybrid in the hub's layout with a token per byte; results of comparisons go to a cache of this test."""
    monkeypatch.setattr(model_check, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(model_check, "_known", {})
    return lambda family: saved(fresh(family, vocab_size=264), tmp_path / family)


@pytest.mark.parametrize("family", every(4, STATEFUL))
def test_the_row_holds_what_was_forecast(family: str, made: Saved, tmp_path: Path) -> None:
    """Whatever the method, the prompt and the dtype of its keys."""
    source, rows = made(family), []
    for place, (method, budget, lengths) in enumerate([(Full(), None, [300]), (SnapKV(), 0.3, [500])]):
        root = tmp_path / str(place)
        rows.append(run(root, method, niah(lengths=lengths, depths=1), source, budget=budget, batch=1 + place))
    expected = source.describe().state_bytes("fp32")
    assert expected > 0
    for row in rows:
        assert {record["state_bytes"] for record in row.records} == {expected}
        assert row.summary["memory"]["state_bytes"] == expected
    assert rows[1].summary["memory"]["kv_device_bytes"] < rows[0].summary["memory"]["kv_device_bytes"]


def test_the_recurrent_part_is_in_fp32_whatever_the_runs_dtype(made: Saved, tmp_path: Path) -> None:
    source = made("qwen3_5_text")
    info = source.describe()
    assert info.state_bytes("fp32") - info.state_bytes("bf16") == 2 * info.states.in_dtype > 0
    row = run(tmp_path / "runs", Full(), niah(lengths=[300], depths=1), source, dtype="bf16")
    assert row.summary["memory"]["state_bytes"] == info.state_bytes("bf16")


def test_a_model_of_attention_alone_has_none(tmp_path: Path) -> None:
    assert saved(tiny("llama"), tmp_path).describe().state_bytes("bf16") == 0


def test_the_command_says_it_before_and_after(
    cli: Cli, made: Saved, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`dry_run=true`, the report with all measurements, and its CSV."""
    source = made("lfm2")
    words = ["model=hf", f"model.name={source.name}", "method=snapkv", "budget=0.3", "chat=none", "task.depths=1"]
    held = source.describe().state_bytes("fp32")
    assert f"states    {size(held)} per sequence on the device, in no budget" in cli(*words, "dry_run=true")[1]
    code, _, err = cli(*words)
    assert code == 0, err
    table = tmp_path / "rows.csv"
    assert report.main([str(tmp_path / "runs"), "--details", "--csv", str(table)]) == 0
    out = capfd.readouterr().out
    assert re.search(r"KV dev +state\n", out)
    assert re.search(rf"snapkv .* {size(held).split()[0]}\n", out)
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [row["memory.state_bytes"] for row in rows if row["method"] == "snapkv"] == [str(held)]


def test_conversations_store_their_states_and_compute_anew_what_is_cut(
    made: Saved, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = made("qwen3_5_text")

    def said(**changes: Any) -> tuple[Path, list[list[list[int]]]]:
        row = run(tmp_path / "runs", Full(), Balances(talks=True), source, protocol="prompt", **changes)
        return row.folder, [[turn.tokens for turn in record.turns or ()] for record in row.records]

    assert said()[1] == said(history="store")[1]
    cut, again = (said(overflow=OverflowSettings(window=380, by=by)) for by in (None, "truncate_tokens"))
    assert cut == again  # the same run
    assert "overflow.by=truncate_cache computes what is left anew" in capfd.readouterr().err


@pytest.mark.parametrize("family", every(4, STATEFUL))
def test_the_peak_is_what_was_forecast(family: str, tmp_path: Path) -> None:
    """Most of it is what a module with a state holds while it reads the prompt."""
    forecast.assert_nearly(tiny(family), saved(tiny(family), tmp_path).describe(), 700)
