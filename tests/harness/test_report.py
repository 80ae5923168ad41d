"""Tables that hold what belongs together, say what they lack, and end in one sentence where there is nothing."""

from __future__ import annotations

import cProfile
import csv
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.commands import report, show
from harness.reports.compare import comparisons
from harness.reports.document import overview_text
from harness.results.run_folder import StoredRun, load
from harness.results.summary import Neighbours, reference
from harness.terminal import tables
from tests.fake_records import record, records, rewrite, write_run

ROOT = Path(__file__).parents[2]
SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}
RIGHT = [1.0] * 9 + [0.0]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Full, two budgets of one method, another one that broke off."""
    write_run(tmp_path, records([1.0] * 10))
    write_run(tmp_path, records(RIGHT, **SPARSE), "quest", budget=0.1)
    write_run(tmp_path, records([1.0] * 10, **SPARSE), "quest", budget=20)
    write_run(tmp_path, records([1.0] * 4, **SPARSE), "h2o", "interrupted", facts={"num_expected": 10})
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert report.main([*map(str, arguments), "--details"]) == 0
    return capsys.readouterr().out


def all_runs(root: Path) -> list[StoredRun]:
    return [load(file.parent) for file in sorted(root.rglob("run.json"))]


def write_given(root: Path, method: str, scores: list[float], /, *, model: str = "m", **changes: Any) -> Path:
    """A run whose identity says what it was given: `model`, `prompts` and `answers`."""
    parts = {"prompts": "p", "answers": "a"}
    identity = {"model_revision": model} | {key: changes.pop(key, usual) for key, usual in parts.items()}
    folder = write_run(root, changes.pop("lines", None) or records(scores, **SPARSE), method, **changes)
    rewrite(folder, identity={"config": load(folder).config} | identity)
    return folder


def differences(root: Path) -> dict[str, tuple[float | None, str | None]]:
    """By the folder of the root that a method's row lies in: its difference to Full, and why it has none."""
    rows = [entry for table in comparisons(all_runs(root)) for entry in table.entries]
    return {
        row.run.folder.parent.name: (row.summary["full"] and round(row.summary["full"]["diff"], 3), row.not_held)
        for row in rows
        if row.summary["method"] != "full"
    }


def csv_rows(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open(newline="") as file:
        return {(line["method"], line["budget.asked"]): line for line in csv.DictReader(file)}


def row(text: str, *words: str) -> str:
    """The first line that begins with these words: of the main table, if they name a run."""
    return next(line for line in text.splitlines() if line.split()[: len(words)] == list(words))


def test_one_row_a_run_and_csv_holds_raw_numbers(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, results, "--csv", results / "all.csv")
    assert row(text, "quest", "10%").split()[:5] == ["quest", "10%", "90.0", "[55,", "100]"]
    assert "-10.0 [" in row(text, "quest", "10%")
    assert " 4/10" in row(text, "h2o")
    assert text.index("\nfull ") < text.index("\nh2o ") < text.index(row(text, "quest", "20"))
    rows = csv_rows(results / "all.csv")
    assert len(rows) == 4
    line = rows["quest", "0.1"]
    assert float(line["score.mean"]) == pytest.approx(0.9)
    assert float(line["full.diff"]) == pytest.approx(-0.1)
    assert float(line["score.ci95.low"]) < 0.9 < float(line["score.ci95.high"])
    assert float(line["tpot_s.p50"]) == pytest.approx(0.1)
    assert (line["dtype"], float(line["prompt_tokens.median"])) == ("float32", 100)
    assert rows["full", ""]["full.diff"] == ""


def test_a_folder_of_one_run_still_knows_its_full(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [folder] = [path for path in results.glob("niah-quest-*") if load(path).config["budget"] == 0.1]
    assert "-10.0 [" in row(printed(capsys, folder), "quest", "10%")


def test_protocols_tasks_and_models_are_never_mixed(results: Path) -> None:
    write_run(results, records(RIGHT, **SPARSE), "quest", protocol="context")
    write_run(results, records(RIGHT, **SPARSE), "quest", model={"name": "other", "revision": None})
    write_run(results, records(RIGHT, **SPARSE), "quest", task={"_target_": "evals.niah.Niah", "lengths": [9]})
    found = {table.title: table for table in comparisons(all_runs(results))}
    assert {title.removeprefix("niah, ") for title in found} == {
        "tiny, protocol=prompt lengths=[1024]",
        "tiny, protocol=context",
        "other, protocol=prompt",
        "tiny, protocol=prompt lengths=[9]",
    }
    for title, table in found.items():  # and Full is not lent across tables
        assert any(entry.full for entry in table.entries) == ("lengths=[1024]" in title)


def test_the_nearest_full_is_the_reference(tmp_path: Path) -> None:
    write_run(tmp_path, records(RIGHT), batch=4)
    same = load(write_run(tmp_path, records(RIGHT)))
    write_run(tmp_path, records(RIGHT), dtype="bfloat16")
    run = load(write_run(tmp_path, records(RIGHT), "quest"))
    chosen = reference(run, Neighbours().beside(run))
    assert chosen is not None
    assert chosen.folder == same.folder
    assert reference(same, [run, same]) is None


def test_a_report_of_twice_as_many_runs_takes_twice_the_work(results: Path) -> None:
    """Work is counted in calls; with budgets of one method, twins, copies of Full, and tables without a Full."""
    full, run = load(next(results.glob("*-full-*"))), load(next(results.glob("*-h2o-*")))

    def calls(count: int) -> int:
        runs = list[StoredRun]()
        for number in range(count):
            config, place = run.config | {"budget": (1 + number) / count}, results / str(number)
            info = run.info | {"cautions": [f"caution {number}"]}
            runs += [replace(each, folder=place / each.folder.name) for each in (run, full)]
            runs.append(replace(run, folder=results / f"h2o-{number}", config=config, info=info))
            runs.append(replace(run, folder=results / f"seed-{number}", config=config | {"seed": 1 + number}))
        work = cProfile.Profile()
        work.runcall(lambda: overview_text(comparisons(runs), ""))
        return sum(entry.callcount for entry in work.getstats())

    calls(4)  # which fills caches
    assert calls(48) < 2.2 * calls(24)


def test_a_full_of_the_same_code_is_nearer_than_a_longer_one(tmp_path: Path) -> None:
    def coded(code: str, run: StoredRun) -> StoredRun:
        return replace(run, info=run.info | {"identity": {"core": 2, "code": {"evals.niah": code, f"{code}.own": "1"}}})

    run = coded("mine", load(write_run(tmp_path, records(RIGHT), "quest")))
    short, long = (load(write_run(tmp_path / name, records([1.0] * count))) for name, count in (("a", 4), ("b", 10)))
    assert reference(run, [coded("mine", short), coded("another", long)]) == coded("mine", short)
    assert reference(run, [coded("mine", short), coded("mine", long)]) == coded("mine", long)


def test_runs_of_other_weights_are_held_against_their_own_full(tmp_path: Path) -> None:
    """Three versions of the weights under one path, each with Full and a method that answers as it does."""
    for name, scores in {"one": [1.0, 1.0], "two": [0.0, 1.0], "three": [0.0, 0.0]}.items():
        for method in ("full", "quest"):
            write_given(tmp_path / name, method, scores, model=f"weights {name}")
    assert differences(tmp_path) == dict.fromkeys(("one", "two", "three"), (0.0, None))
    titles = {table.title.rpartition(" model_revision=")[2] for table in comparisons(all_runs(tmp_path))}
    assert titles == {"weights one", "weights two", "weights three"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "of another fine-tuning"}, "the model's revision"),
        ({"prompts": "of another template"}, "the prompts"),
        ({"answers": "corrected"}, "the right answers"),
        ({"answers": None}, "the right answers (an older run does not say)"),
        ({"dtype": "bfloat16"}, "dtype (bfloat16)"),
        ({"device": "cuda"}, "device (cuda)"),
        ({"placement": "host"}, "placement (host)"),
        ({"lines": records([1.0] * 4, "another example ")}, "every example"),
    ],
)
def test_a_full_that_is_no_match_is_named_with_what_differs(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    write_given(tmp_path, "quest", [1.0] * 4)
    full = write_given(tmp_path, "full", [0.0] * 4, **changes)
    assert differences(tmp_path) == {tmp_path.name: (None, f"{full.name} differs in {reason}")}


def test_of_two_fulls_of_another_dtype_the_rows_own_is_taken(tmp_path: Path) -> None:
    for dtype, scores in (("float32", [1.0] * 4), ("bfloat16", [0.0] * 4)):
        write_given(tmp_path / "full", "full", scores, dtype=dtype)
        write_given(tmp_path / dtype, "quest", [0.5] * 4, dtype=dtype)
    assert differences(tmp_path) == {"float32": (-0.5, None), "bfloat16": (0.5, None)}


def test_a_report_writes_into_no_run_and_reads_no_summary(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> dict[Path, tuple[bytes, int]]:
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in results.rglob("*") if path.is_file()}

    text = printed(capsys, results)
    for folder in results.glob("niah-*"):
        assert not (folder / "summary.json").exists()
        (folder / "summary.json").write_text("{half")
    before = state()
    assert printed(capsys, results) == text
    assert state() == before


@pytest.mark.parametrize("tool", [report, show])
def test_errors_are_one_sentence_and_exit_code_2(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    broken = write_run(tmp_path / "broken", [record()])
    (broken / "run.json").write_text("{")
    for folder in (tmp_path / "none", tmp_path / "empty", broken):
        assert tool.main([str(folder)]) == 2
        [sentence] = capsys.readouterr().err.splitlines()
        assert sentence.startswith("error: ")
        assert folder.name in sentence


def test_one_unreadable_run_does_not_hide_the_others(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [folder] = results.glob("niah-h2o-*")
    (folder / "examples.jsonl").write_text("no json\n")
    assert report.main([str(results)]) == 2
    out, err = capsys.readouterr()
    assert row(out, "quest", "20")
    assert err.startswith("left out: ")
    assert "examples.jsonl, line 1" in err


def test_reports_import_no_torch() -> None:
    modules = "harness.commands.report, harness.commands.show, harness.reports.page"
    code = f"import sys, {modules}; assert not {{'torch', 'hydra'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_units_and_digits() -> None:
    assert tables.scaled([0.0123, None, 0.5], tables.SECONDS) == (["12.3", "", "500"], "ms")
    assert tables.scaled([3 * 2**20, 0], tables.BYTES) == (["3.00", "0"], "MiB")
    assert [tables.digits(x) for x in (0.0123, 1.234, 45.67, 9876.5, 0)] == ["0.012", "1.23", "45.7", "9876", "0"]
    assert tables.percent(-0.0001, sign=True) == "0.0"
    assert tables.percent(0.05, sign=True) == "+5.0"


def test_folders_without_an_example_stand_apart_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [record("a")])
    failed = write_run(tmp_path, [], "quest", "failed")
    interrupted = write_run(tmp_path, [], "oracle", "interrupted")
    assert report.main([str(tmp_path)]) == report.main([str(failed)]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if failed.name in line)
    assert f"{interrupted.name} (interrupted)" in first
    assert f"{failed.name} (failed)" in second


def test_files_go_into_folders_that_are_not_there_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", [record(output="a")], "full")
    given = {f"--{kind}": tmp_path / "new" / kind / f"table.{kind}" for kind in ("md", "csv")}
    assert report.main([str(tmp_path / "runs"), *(str(word) for pair in given.items() for word in pair)]) == 0
    assert all(path.stat().st_size for path in given.values())
    (tmp_path / "file").touch()
    assert report.main([str(tmp_path / "runs"), "--html", str(tmp_path / "file" / "page")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--html", "page.html"], ["--htm", "page"]])
def test_what_is_nearly_an_option_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["runs", *words])
    assert words[0] in capsys.readouterr().err


def test_folders_of_2787ae1a_are_still_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They lack what came later, and hold what has gone since."""
    old = Path(shutil.copytree(Path(__file__).parents[1] / "results_of_2787ae1a", tmp_path / "old"))
    text = printed(capsys, old, "--csv", tmp_path / "all.csv")
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("full ", "streaming "))][:2] == [
        "full", "streaming",
    ]  # fmt: skip
    rows = csv_rows(tmp_path / "all.csv")
    full, streaming = rows["full", ""], rows["streaming", "0.2"]
    assert (streaming["status"], streaming["num_examples"]) == ("complete", "2")
    assert float(streaming["budget.attended.tokens"]) == 51.0
    assert float(streaming["memory.kv_device_bytes"]) == 2_718_720
    assert float(streaming["ttft_s.p50"]) == pytest.approx(0.4197, abs=1e-4)
    assert float(streaming["likelihood.mean"]) == pytest.approx(1.60, abs=0.01)
    assert float(full["memory.kv_device_bytes"]) > 4 * float(streaming["memory.kv_device_bytes"])
