"""Nothing written is lost, nothing is written twice, and two processes never write one folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.results.lock import is_locked
from harness.results.records import Record, RecordError
from harness.results.run_folder import FolderInUse, Run, StoreError, find, load, read_records
from kernels.temporary import replacing
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
    assert Record.from_plain(json.loads(original.to_json()), "here") == original
    assert "\n" not in original.to_json()


def test_a_record_of_before_the_union_still_loads() -> None:
    line = json.loads(record(union_prompt=7.0).to_json())
    assert Record.from_plain(line, "here").union_share == 0.07
    del line["union_prompt"]
    assert Record.from_plain(line, "here").union_share is None


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
    lines = (folder / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == list("abcd")


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


def test_a_line_that_holds_no_record_is_named_with_what_to_do(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record("a"), record("b"), record("c")])
    path = folder / "examples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for damage, complaint in [
        (lines[1][:40] + "\n", "not a JSON line"),
        ("7\n", "holds int, not a record"),
        (lines[1].replace('"score"', '"scare"'), "no 'score'; another version of the harness"),
    ]:
        path.write_text(lines[0] + damage + lines[2])
        with pytest.raises(RecordError, match=r"examples\.jsonl, line 2") as caught:
            load(folder)
        assert complaint in str(caught.value)
    path.write_text(lines[0] + lines[2])  # as the message advises
    assert [one.id for one in load(write_run(tmp_path, [record("b")])).records] == list("acb")


def test_of_two_lines_about_an_example_the_first_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record("a", score=0.25), record("b")])
    path = folder / "examples.jsonl"
    path.write_text(path.read_text() * 2)
    assert [(one.id, one.score) for one in load(folder).records] == [("a", 0.25), ("b", 1.0)]


def test_examples_whose_run_json_is_gone_are_not_continued(tmp_path: Path) -> None:
    """Nobody knows what an earlier session measured of its machine, and with which versions it ran."""
    folder = write_run(tmp_path, [record("a")])
    (folder / "run.json").unlink()
    with pytest.raises(StoreError, match=f"is gone.* delete {folder} and run the same command again"):
        write_run(tmp_path, [record("b")])
    assert not is_locked(folder)


def test_a_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    """The name holds the first eight digits of the identity's hash alone."""
    folder = write_run(tmp_path, [record("a")])
    rewrite(folder, identity_sha256="another")
    with pytest.raises(StoreError, match="holds another run whose hash starts the same: move that folder away"):
        write_run(tmp_path, [record("b")])


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


def test_a_run_named_without_its_folder_is_shown_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "runs" / "niah-full").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"niah-full; did you mean results/runs/niah-full\?"):
        find([Path("niah-full")])
    with pytest.raises(StoreError, match="nope; name a run with its folder, as in results/runs/nope"):
        find([Path("nope")])


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        find([tmp_path / "none"])
    with pytest.raises(StoreError, match="no runs"):
        find([tmp_path])
    folder = write_run(tmp_path, [])
    (folder / "run.json").write_text("{")
    with pytest.raises(StoreError, match=r"cannot read .*run\.json"):
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


def test_what_a_killed_write_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record("a")])

    def writes() -> int:
        """A process that has written a file, and not yet renamed it."""
        hears, said = os.pipe()
        if not (child := os.fork()):
            with replacing(folder / "summary.json") as file:
                file.write(b"half")
                os.write(said, b".")
                signal.pause()
        os.read(hears, 1)
        for end in (hears, said):
            os.close(end)
        return child

    def half_written() -> int:
        return len(list(folder.glob(".summary.json.*")))

    killed, living = writes(), writes()
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    assert half_written() == 2
    write_run(tmp_path, [])
    assert half_written() == 1
    os.kill(living, signal.SIGKILL)
    os.waitpid(living, 0)
    write_run(tmp_path, [])
    assert half_written() == 0


def test_a_waiter_goes_on_where_a_killed_holder_stopped(tmp_path: Path, writer: subprocess.Popen) -> None:
    waiting = subprocess.Popen([sys.executable, "-c", WAITER, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE)
    assert waiting.stderr is not None
    with waiting.stderr as said:
        assert f"waiting for process {writer.pid} on" in said.readline().decode()
        writer.kill()
        assert waiting.wait() == 0, said.read()
    stored = load(find([tmp_path])[0])
    assert (stored.status, [r.id for r in stored.records]) == ("complete", list("abcd"))


def test_ctrl_c_ends_the_wait(tmp_path: Path, writer: subprocess.Popen) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITER, str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )
    assert waiting.stderr is not None
    with waiting.stderr as said:
        assert b"waiting for" in said.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait() != 0
        assert b"KeyboardInterrupt" in said.read()


def test_no_process_waits_for_itself(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(FolderInUse):
        Run.open(tmp_path, config("quest"), {"x": 1}, "niah", "quest", wait=True)


def test_a_run_that_a_launcher_ends_has_not_failed(tmp_path: Path) -> None:
    """submitit queues its job again by `sys.exit`, in the middle of whatever runs; Ray does so at SIGTERM."""
    with pytest.raises(SystemExit), opened(tmp_path) as run:
        run.append(record("a"))
        sys.exit(-1)
    assert load(run.folder).info["status"] == "interrupted"
    assert not (run.folder / "error.txt").exists()
