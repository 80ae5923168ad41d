"""Nothing written is lost, nothing is written twice, and two processes never write one folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.lock import is_locked
from harness.records import Record, RecordError
from harness.store import FolderInUse, Run, StoreError, find, load, read_records
from tests.fake_records import config, record, write_run

ROOT = Path(__file__).parents[2]
WRITER = """
import sys, time
from pathlib import Path
from harness.store import Run
from tests.fake_records import config, record
run = Run.open(Path(sys.argv[1]), config("quest"), {"x": 1}, "niah", "quest")
for name in "abc":
    run.append(record(name))
(run.folder / "examples.jsonl").open("ab", buffering=0).write(b'{"id": "d", "output": "half a l')
print("written", flush=True)
time.sleep(60)
"""


def opened(root: Path, method: str = "quest", **identity: object) -> Run:
    return Run.open(root, config(method), identity or {"x": 1}, "niah", method)


@pytest.fixture
def writer(tmp_path: Path):
    """Another process in the middle of a run, with half a line written."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    yield process
    process.kill()
    process.communicate()


def test_a_record_survives_its_file() -> None:
    original = record("ä\u2028", details={"em": 0.5}, context_tokens=7, prompt_ids=[1, 2], data={"depth": 0.25})
    assert Record.from_json(original.to_json(), "here") == original
    assert "\n" not in original.to_json()


def test_a_record_of_before_the_union_still_loads() -> None:
    line = json.loads(record(union_prompt=7.0).to_json())
    assert Record.from_json(json.dumps(line), "here").union_share == 0.07
    del line["union_prompt"]
    assert Record.from_json(json.dumps(line), "here").union_share is None


def test_times_of_a_record() -> None:
    r = record(token_s=[1.0, 3.0, 3.5, 4.5])
    assert (r.ttft_s, r.tt2t_s, r.tpot_s, r.intervals_s) == (1.0, 3.0, 0.75, [0.5, 1.0])
    short = record(token_s=[1.0])
    assert (short.tt2t_s, short.tpot_s, short.intervals_s) == (None, None, [])
    assert record(token_s=[1.0, 2.0]).tpot_s is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"score": 1.5}, "score"),
        ({"score": float("nan")}, "score"),
        ({"stop": "tired"}, "stop"),
        ({"token_s": [2.0, 1.0]}, "token_s"),
        ({"tokens": [1], "token_s": [1.0, 2.0]}, "token_s"),
    ],
)
def test_a_record_refuses_what_cannot_be(change: dict, word: str) -> None:
    with pytest.raises(RecordError, match=word):
        record(**change)


def test_same_identity_resumes_and_keeps_the_order(tmp_path: Path) -> None:
    run = opened(tmp_path)
    for name in "cab":
        run.append(record(name))
    run.close("interrupted")
    again = opened(tmp_path)
    assert again.folder == run.folder
    assert again.contains("a")
    assert not again.contains("d")
    again.append(record("d"))
    again.close("complete")
    assert [r.id for r in load(run.folder).records] == list("cabd")
    info = load(run.folder).info
    assert info["status"] == "complete"
    assert [session["status"] for session in info["earlier"]] == ["interrupted"]


def test_another_identity_opens_another_folder(tmp_path: Path) -> None:
    first, second, third = opened(tmp_path, seed=1), opened(tmp_path, seed=2), opened(tmp_path, seed=1.0)
    assert len({run.folder for run in (first, second, third)}) == 3
    for run in (first, second, third):
        run.close("complete")
    assert len(find([tmp_path, first.folder])) == 3


def test_a_folder_is_known_before_it_is_there(tmp_path: Path) -> None:
    place = Run.place(tmp_path, {"x": 1}, "niah", "quest")
    assert not place.exists()
    with opened(tmp_path) as run:
        assert run.folder == place
        run.close("complete")
    assert load(place).status == "complete"


def test_leaving_by_an_error_is_a_failed_run(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.append(record("a"))
    with pytest.raises(RecordError, match="score"), run:
        record("b", score=2.0)
    stored = load(run.folder)
    assert (stored.status, len(stored.records)) == ("failed", 1)
    assert stored.info["error"].startswith("RecordError: example 'b': score is 2.0")


def test_a_session_without_work_leaves_the_record_of_the_real_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record("a")])
    before = (folder / "run.json").read_bytes()
    assert write_run(tmp_path, []) == folder
    assert (folder / "run.json").read_bytes() == before


def test_an_example_is_never_written_twice(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.append(record("a"))
    with pytest.raises(StoreError, match="'a'"):
        run.append(record("a"))
    run.close("failed", error="ids")
    assert len(run.records()) == 1


def test_kill_9_costs_only_the_line_being_written(tmp_path: Path, writer: subprocess.Popen) -> None:
    folder = find([tmp_path])[0]
    assert load(folder).status == "running"
    assert [r.id for r in load(folder).records] == list("abc")  # a reader leaves the half line alone
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert load(folder).status == "interrupted"
    run = opened(tmp_path)
    assert not run.contains("d")
    run.append(record("d"))
    run.close("complete")
    assert [json.loads(line)["id"] for line in (folder / "examples.jsonl").open()] == list("abcd")


def test_two_processes_never_write_one_folder(tmp_path: Path, writer: subprocess.Popen) -> None:
    with pytest.raises(FolderInUse, match=rf"process {writer.pid} on \S+: wait"):
        opened(tmp_path)
    opened(tmp_path, other=1).close("complete")  # another folder is free
    writer.kill()
    writer.wait()
    opened(tmp_path).close("complete")


def test_one_process_cannot_open_a_folder_twice(tmp_path: Path) -> None:
    run = opened(tmp_path)
    with pytest.raises(FolderInUse):
        opened(tmp_path)
    assert is_locked(run.folder)
    run.close("failed", error="boom")
    assert not is_locked(run.folder)
    assert load(run.folder).info["error"] == "boom"


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record("a"), record("b"), record("c")])
    path = folder / "examples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for damage, complaint in [
        (lines[1][:40] + "\n", "not a JSON line"),
        (lines[0], "'a' a second time"),
        (lines[1].replace('"seal_s"', '"seal"'), "unknown key 'seal', no 'seal_s'"),
    ]:
        path.write_text(lines[0] + damage + lines[2])
        with pytest.raises(StoreError, match="line 2") as caught:
            write_run(tmp_path, [])
        assert complaint in str(caught.value)
        assert not is_locked(folder)


def test_a_write_that_fails_leaves_whole_lines(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.append(record("a"))
    with pytest.raises(RecordError, match="JSON"):
        run.append(record("b", data={"path": Path("x")}))
    run.append(record("c"))
    run.close("complete")
    assert [r.id for r in read_records(run.folder)] == ["a", "c"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*results\.root"):
        opened(tmp_path / "file")


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        find([tmp_path / "none"])
    with pytest.raises(StoreError, match="no runs"):
        find([tmp_path])
    folder = write_run(tmp_path, [])
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(StoreError, match=r"config\.yaml"):
        load(folder)
