"""Copies for Weights & Biases: every finished run is sent, and none breaks; the real client is kept offline."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.settings import Settings, WandbSettings
from harness.results.run_folder import load
from harness.results.summary import summary_of, write_summary
from harness.terminal.notices import say_once
from harness.trackers.finished import FinishedRun
from harness.trackers.wandb import Copies, Wandb
from tests.fake_records import records, write_run

BLOCK = 32_768
SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}


@pytest.fixture(autouse=True)
def _nothing_said_before() -> None:
    say_once.cache_clear()


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Full and two budgets of Quest on needles of two lengths and two depths."""

    def lines(score: float, **changes: Any) -> list[Any]:
        places = [(length, depth) for length in (512, 1024) for depth in (0, 100)]
        return [
            one
            for length, depth in places
            for one in records(
                [1.0, score],
                f"{length}/{depth}/",
                group=f"needle/{length}",
                data={"length": length, "depth": depth},
                **changes,
            )
        ]

    full = write_run(tmp_path, lines(1.0))
    quest = [write_run(tmp_path, lines(0.0, **SPARSE), "quest", budget=budget) for budget in (0.1, 0.2)]
    for run in map(load, (full, *quest)):
        write_summary(run, summary_of(run, None))
    return [full, *quest]


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who never heard of wandb's environment."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("harness.trackers.wandb.reachable", lambda server: True)


def opened(project: str = "kv", **changes: Any) -> Copies:
    copies = Copies()
    copies.open([Settings(wandb=WandbSettings(project), **changes)])
    return copies


# settings


def test_a_copy_is_no_part_of_an_identity(cli: Callable[..., Any], listed: list[FinishedRun]) -> None:
    words = ("method=streaming", "budget=0.5", "task.depths=1")
    assert cli(*words)[0] == 0
    code, _, err = cli(*words, "wandb.project=kv")
    assert code == 0
    assert "reused" in err
    assert [run.words["method"] for run in listed] == ["full", "streaming"]
    folders = [run.folder for run in listed]
    listed.clear()
    opened(dry_run=True).publish(folders)
    assert listed == []


# wandb


def offline_records(folder: Path) -> Iterator[Any]:
    """What the real client wrote: protobuf messages in LevelDB's log format, in blocks of 32 KiB behind 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a message, or its last part
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.usefixtures("online")
def test_the_real_client_keeps_a_run_offline(
    runs: list[Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    copies = opened("kv")
    assert "WANDB_API_KEY" in capfd.readouterr().err
    copies.publish(runs[:1])
    assert capfd.readouterr().err == ""
    written = list(offline_records(runs[0]))
    [run] = [record.run for record in written if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.entity, run.run_id) == ("kv", "team", runs[0].name)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["method._target_"] == "methods.full.Full"
    summary = {
        ".".join(item.nested_key) or item.key: json.loads(item.value_json)
        for record in written
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert summary["score.mean"] == 1.0
    assert summary["score.groups.needle/512.mean"] == 1.0
    drawn = {key for record in written for item in record.history.item for key in (item.key, *item.nested_key)}
    assert "pictures/heatmap/needle" in drawn, drawn
    [artifact] = [record.artifact for record in written if record.WhichOneof("record_type") == "artifact"]
    assert {"summary.json", "table.md", "config.yaml", "run.json"} == {
        entry.path for entry in artifact.manifest.contents
    }


@pytest.mark.usefixtures("online")
def test_what_is_missing_is_said_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert Wandb("kv").missing() is None
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("harness.trackers.wandb.reachable", lambda server: False)
    assert Wandb("kv").missing() is None
    assert "https://api.wandb.ai cannot be" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert Wandb("kv").missing() is None
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("harness.trackers.wandb.find_spec", lambda package: None)
    opened()
    err = capsys.readouterr().err
    assert "`pip install wandb`" in err


@pytest.mark.usefixtures("online")
def test_a_client_that_fails_costs_no_run(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: Any) -> None:
        assert arguments["mode"] == "offline"
        raise RuntimeError("403")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse, Settings=SimpleNamespace))
    monkeypatch.setattr("harness.trackers.wandb.find_spec", lambda name: object())
    code, out, err = cli("method=full", "wandb.project=kv", "task.depths=1")
    assert code == 0, err
    assert "Traceback" not in err
    assert err.index("no login") < err.index("RuntimeError: 403")
    assert "full" in out


# what is sent


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[FinishedRun]:
    """What is sent to projects; one of the name `refusing` takes nothing."""
    found: list[FinishedRun] = []

    def publish(project: Wandb, run: FinishedRun) -> None:
        if project.project == "refusing":
            raise OSError(28, "No space left on device")
        found.append(run)

    monkeypatch.setattr(Wandb, "missing", lambda project: None)
    monkeypatch.setattr(Wandb, "publish", publish)
    return found


@pytest.mark.slow
def test_one_that_fails_leaves_the_others_alone(
    listed: list[FinishedRun], runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    copies = Copies()
    copies.open([Settings(wandb=WandbSettings(project)) for project in ("refusing", "kv")])
    copies.publish(runs)
    assert [run.folder for run in listed] == runs
    assert capsys.readouterr().err.count("was not sent to wandb: The disk is full") == 3
    full, quest, _ = listed
    assert list(full.pictures) == list(quest.pictures) == ["frontier", "heatmap/needle"]
    assert [path.name for path in full.files] == ["summary.json", "run.json", "config.yaml", "table.md"]
    assert quest.words["label"] == "quest 10%"
    assert quest.config["budget"] == 0.1
    assert "full.p" not in full.numbers
    assert quest.numbers["full.diff"] == -0.5
    assert not any(key.startswith(("results", "wandb")) for key in quest.config)
