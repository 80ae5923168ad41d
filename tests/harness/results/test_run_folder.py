"""Nothing written is lost, nothing is written twice, and two processes never write one folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.results.files import read_csv, read_json
from harness.results.lock import FolderInUse, is_locked
from harness.results.records import RecordError, StoreError
from harness.results.run_folder import Run, find, load, read_records
from tests.fake_records import config, record, rewrite, write_run

ROOT = Path(__file__).parents[3]
WRITER = """
import sys, time
from pathlib import Path
from harness.results.run_folder import Run
from tests.fake_records import config, record
run = Run.open(Path(sys.argv[1]), config("quest"), {"x": 1}, "niah", "quest")
for name in "abc":
    run.append(record(name))
(run.folder / "examples.jsonl").open("ab", buffering=0).write(b'{"id": "d", "output": "half a l')
print("written", flush=True)
time.sleep(600)
"""

WAITER = """
import sys
from pathlib import Path
from harness.results.run_folder import Run
from tests.fake_records import config, record
with Run.open(Path(sys.argv[1]), config("quest"), {"x": 1}, "niah", "quest", wait=True) as run:
    run.append(record("d"))
    run.close("complete")
"""


def opened(root: Path, method: str = "quest", **identity: object) -> Run:
    return Run.open(root, config(method), identity or {"x": 1}, "niah", method)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process in the middle of a run, with half a line written."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    yield process
    process.kill()
    process.communicate()


def test_same_identity_resumes_and_keeps_the_order(tmp_path: Path) -> None:
    place = Run.place(tmp_path, {"x": 1}, "niah", "quest")
    assert not place.exists()
    run = opened(tmp_path)
    for name in "cab":
        run.append(record(name))
    run.close("interrupted")
    again = opened(tmp_path)
    assert again.folder == run.folder == place
    assert again.contains("a")
    assert not again.contains("d")
    again.append(record("d"))
    again.close("complete")
    stored = load(place)
    assert [r.id for r in stored.records] == list("cabd")
    assert stored.status == "complete"
    assert [session["status"] for session in stored.info["earlier"]] == ["interrupted"]
    before = (place / "run.json").read_bytes()
    opened(tmp_path).close("complete")  # a session without work
    assert (place / "run.json").read_bytes() == before


def test_leaving_by_an_error_is_a_failed_run(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.append(record("a"))
    with pytest.raises(RecordError), run:
        record("b", score=2.0)
    stored = load(run.folder)
    assert (stored.status, len(stored.records)) == ("failed", 1)
    assert stored.info["error"].startswith("RecordError: example 'b': ")
    assert (run.folder / "error.txt").is_file()


def test_a_run_that_a_launcher_ends_has_not_failed(tmp_path: Path) -> None:
    """submitit queues its job again by `sys.exit`, in the middle of whatever runs; Ray does so at SIGTERM."""
    with pytest.raises(SystemExit), opened(tmp_path) as run:
        run.append(record("a"))
        sys.exit(-1)
    assert load(run.folder).info["status"] == "interrupted"
    assert not (run.folder / "error.txt").exists()


def test_kill_9_costs_only_the_line_being_written(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    folder = find([tmp_path])[0]
    assert load(folder).status == "running"
    assert [r.id for r in load(folder).records] == list("abc")  # a reader leaves the half line alone
    with pytest.raises(FolderInUse, match=str(writer.pid)):
        opened(tmp_path)
    opened(tmp_path, seed=1).close("complete")  # another folder is free
    opened(tmp_path, seed=1.0).close("complete")
    assert len(find([tmp_path, folder])) == 3
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert load(folder).status == "interrupted"
    run = opened(tmp_path)
    assert not run.contains("d")
    run.append(record("d"))
    run.close("complete")
    lines = (folder / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == list("abcd")


def test_one_process_cannot_open_a_folder_twice(tmp_path: Path) -> None:
    run = opened(tmp_path)
    for wait in (False, True):  # no process waits for itself
        with pytest.raises(FolderInUse):
            Run.open(tmp_path, config("quest"), {"x": 1}, "niah", "quest", wait=wait)
    assert is_locked(run.folder)
    run.close("failed", error="boom")
    assert not is_locked(run.folder)
    assert load(run.folder).info["error"] == "boom"


def test_a_line_that_holds_no_record_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record("a"), record("b"), record("c")])
    path = folder / "examples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for damage in (lines[1][:40] + "\n", "7\n", lines[1].replace('"score"', '"scare"')):
        path.write_text(lines[0] + damage + lines[2])
        with pytest.raises(RecordError, match=r"examples\.jsonl, line 2"):
            load(folder)
    path.write_text(lines[0] + lines[2])  # as the message advises
    assert [one.id for one in load(write_run(tmp_path, [record("b")])).records] == list("acb")
    path.write_text(path.read_text() * 2)  # of two lines about an example the first counts
    assert [one.id for one in load(folder).records] == list("acb")


def test_examples_whose_run_json_is_gone_are_not_continued(tmp_path: Path) -> None:
    """Nobody knows what an earlier session measured of its machine, and with which versions it ran."""
    folder = write_run(tmp_path, [record("a")])
    info = (folder / "run.json").read_text()
    (folder / "run.json").unlink()
    with pytest.raises(StoreError, match="gone"):
        write_run(tmp_path, [record("b")])
    assert not is_locked(folder)
    (folder / "run.json").write_text(info)
    rewrite(folder, identity_sha256="another")  # whose hash starts the same, as the folder's name does
    with pytest.raises(StoreError, match="another run"):
        write_run(tmp_path, [record("b")])


def test_a_write_that_fails_leaves_whole_lines(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.append(record("a"))
    with pytest.raises(RecordError, match="JSON"):
        run.append(record("b", data={"path": Path("x")}))
    with pytest.raises(StoreError, match="'a'"):
        run.append(record("a"))  # never written twice
    run.append(record("c"))
    run.close("complete")
    assert [r.id for r in read_records(run.folder)] == ["a", "c"]


def test_what_cannot_be_read_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"results\.root"):
        opened(tmp_path / "file")
    with pytest.raises(StoreError, match="no such folder"):
        find([tmp_path / "none"])
    with pytest.raises(StoreError, match="no runs"):
        find([tmp_path])
    (tmp_path / "results" / "runs" / "niah-full").mkdir(parents=True)
    with pytest.raises(StoreError, match="results/runs/niah-full"):
        find([Path("niah-full")])
    folder = write_run(tmp_path, [])
    for odd in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/nowhere")):
        examples = folder / "examples.jsonl"
        examples.rename(tmp_path / f"before {odd}")
        odd(examples)
        with pytest.raises(StoreError, match=r"examples\.jsonl: it is no file"):
            load(folder)
        with pytest.raises(StoreError, match=r"examples\.jsonl: it is no file"):
            read_json(examples)  # as of summary.json
        with pytest.raises(StoreError, match=r"examples\.jsonl: it is no file"):
            list(read_csv(examples))
    rewrite(folder, averages=5)
    with pytest.raises(StoreError, match=r"run\.json: averages holds no keys"):
        load(folder)
    (folder / "run.json").write_text("{")
    with pytest.raises(StoreError, match=r"run\.json"):
        load(folder)


def test_a_session_without_records_keeps_what_the_last_one_said(tmp_path: Path) -> None:
    """Killed between the last record and the close: provenance and backends stay with the records that they made."""
    with opened(tmp_path) as run:
        run.note(provenance={"machine": "first"}, backends={"sdpa": ["cpu"]})
        run.append(record("a"))
    for _ in range(2):
        with opened(tmp_path) as run:
            run.note(provenance={"machine": "second"}, backends={})
    opened(tmp_path).close("complete")
    stored = load(run.folder)
    assert (stored.status, stored.info["provenance"], stored.info["backends"]) == (
        "complete", {"machine": "first"}, {"sdpa": ["cpu"]},
    )  # fmt: skip
    assert "earlier" not in stored.info


def test_a_waiter_goes_on_where_a_killed_holder_stopped(tmp_path: Path, writer: subprocess.Popen[bytes]) -> None:
    waiting = subprocess.Popen([sys.executable, "-c", WAITER, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE)
    assert waiting.stderr is not None
    with waiting.stderr as said:
        assert f"process {writer.pid}" in said.readline().decode()
        writer.kill()
        assert waiting.wait() == 0, said.read()
    stored = load(find([tmp_path])[0])
    assert (stored.status, [r.id for r in stored.records]) == ("complete", list("abcd"))


def test_records_are_not_written_through_a_link(tmp_path: Path) -> None:
    examples, other = write_run(tmp_path, [record("a")]) / "examples.jsonl", tmp_path / "somebody's"
    other.write_text("half a line stays")
    examples.unlink()
    examples.symlink_to(other)
    with pytest.raises(StoreError, match="is a link"):
        write_run(tmp_path, [record("a")])
    assert other.read_text() == "half a line stays"
