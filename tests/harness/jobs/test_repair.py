"""The same command repairs a damaged folder: sound records stay, what is missing runs again, what is lost is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate, evaluate_together
from harness.jobs.job import Job
from harness.results.files import read_json
from harness.results.folder import bound
from harness.results.run_folder import StoredRun, StoreError, load
from harness.terminal.notices import say_once
from methods.full import Full
from tests.fast import MODEL, PQ, STREAMING, niah, run

TASK = niah(depths=3)


def asked(root: Path) -> StoredRun:
    """The command of this module."""
    return evaluate(STREAMING, TASK, MODEL, Settings(results=Results(str(root)), progress=False, warmup=0))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    return asked(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def root(sound: StoredRun, tmp_path: Path) -> Iterator[Path]:
    say_once.cache_clear()
    yield Path(shutil.copytree(sound.folder.parent, tmp_path / "runs"))
    say_once.cache_clear()


def without_a_line(data: bytes) -> bytes:
    return b"".join(data.splitlines(keepends=True)[1:])


def with_another_score(data: bytes) -> bytes:
    return data.replace(b'"score":', b'"score":1', 1)


def told(evaluation: StoredRun) -> list[tuple[object, ...]]:
    return sorted((record.id, *record.answer, record.score) for record in evaluation.records)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("examples.jsonl", without_a_line, "examples.jsonl holds 2 of the 3 lines that it had; what is missing runs"),
        ("examples.jsonl", with_another_score, "was changed after it was written; set aside in examples.jsonl.damaged"),
        ("config.yaml", lambda data: data[:100], ""),
        ("run.json", lambda data: data[:100], "it is made anew, and of machine, versions and times"),
        ("summary.json", lambda data: data[:100], ""),
    ],
)
@pytest.mark.parametrize("method", ["streaming", "full"])
def test_a_damaged_run(
    sound: StoredRun, root: Path, capfd: pytest.CaptureFixture[str],
    method: str, name: str, damage: Callable[[bytes], bytes], said: str,
) -> None:  # fmt: skip
    [folder] = root.glob(f"niah-{method}-????????")
    before = load(folder)
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    again = asked(root)
    assert said in capfd.readouterr().err
    assert told(again) == told(sound)
    stored = load(folder)
    assert stored.status == "complete"
    assert read_json(folder / "summary.json")["records"] == stored.digest
    assert bound.damage(folder, stored.info) is None
    lost = {"provenance", "backends", "prepare_s", "own_forward", "plain_steps", "one_by_one", "unclocked"}
    lost |= {"started", "load_average_ended"}
    assert before.info.keys() - stored.info.keys() <= (lost if name == "run.json" else set())
    kept = ("task_info", "presets", "num_expected", "weights", "budget_use", "simulated", "host_is_cpu", "identity")
    assert [stored.info[key] for key in kept] == [before.info[key] for key in kept]
    asked(root)
    assert not capfd.readouterr().err.strip().startswith("note"), "once is enough"


def test_sound_records_are_not_run_again(root: Path) -> None:
    [folder] = root.glob("niah-streaming-????????")
    lines = (folder / "examples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "examples.jsonl").write_bytes(lines[0] + lines[1][:50] + b"\n" + lines[2])
    asked(root)
    kept = (folder / "examples.jsonl").read_bytes().splitlines(keepends=True)
    assert kept[:2] == [lines[0], lines[2]]
    assert json.loads(kept[2])["id"] == json.loads(lines[1])["id"]
    assert (folder / "examples.jsonl.damaged").read_bytes() == lines[1][:50] + b"\n"


def test_a_run_of_another_folder_is_made_anew(sound: StoredRun, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever copies run.json from another folder has a file whose checksum holds."""
    [full], [folder] = root.glob("niah-full-????????"), root.glob("niah-streaming-????????")
    shutil.copy(full / "run.json", folder / "run.json")
    with pytest.raises(StoreError, match=folder.name):
        load(folder)
    again = asked(root)
    assert f"{folder / 'run.json'} is another run's: it is made anew" in capfd.readouterr().err
    assert told(again) == told(sound)


def test_what_a_shared_prefill_simulates_stays_simulated(tmp_path: Path) -> None:
    """The stamps of a row do not go with its run.json."""
    settings = Settings(
        results=Results(str(tmp_path)), progress=False, warmup=0, device="cpu", shared_prefill=True, baseline="off"
    )
    wanted = [Job.plan(STREAMING, TASK, MODEL, settings)]
    [made] = evaluate_together(wanted)
    (made.folder / "run.json").unlink()
    [again] = evaluate_together(wanted)
    assert again.folder == made.folder
    assert again.summary["simulated"]
    assert again.summary["host_is_cpu"]
    assert told(again) == told(made)


def test_what_was_measured_and_is_lost_is_not_measured_anew(tmp_path: Path) -> None:
    """Other numbers would make other answers in the same run."""
    auto = replace(PQ, iterations="auto")
    made = run(tmp_path, auto, TASK)
    lines = (made.folder / "examples.jsonl").read_bytes()
    (made.folder / "run.json").unlink()
    assert told(run(tmp_path, auto, TASK)) == told(made)  # nothing is to be run
    (made.folder / "examples.jsonl").write_bytes(without_a_line(lines))
    with pytest.raises(StoreError, match=r"the iterations that this run measured .* restore that file from a copy, or"):
        run(tmp_path, auto, TASK)
    assert (made.folder / "examples.jsonl").read_bytes() == without_a_line(lines)


def test_a_full_that_is_not_run_and_cannot_be_read_is_said(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    [full] = root.glob("niah-full-????????")
    for name, damage in (("examples.jsonl", without_a_line), ("run.json", without_a_line)):
        (full / name).write_bytes(damage((full / name).read_bytes()))
        made = evaluate(
            STREAMING, TASK, MODEL,
            Settings(results=Results(str(root)), progress=False, warmup=0, baseline="reuse"),
        )  # fmt: skip
        assert made.summary["full"] is None
        said = capfd.readouterr().err
        assert "is not there to compare with: " in said
        assert str(full / name) in said
    made = evaluate(Full(), TASK, MODEL, Settings(results=Results(str(root)), progress=False, warmup=0))
    assert made.folder == full
    assert len(made.records) == 3
