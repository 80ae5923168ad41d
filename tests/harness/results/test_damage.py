"""Whatever happens to a file of a run's folder, no number changes without a word, and the same command repairs it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.commands import report, rescore, show, status
from harness.reports.compare import comparisons
from harness.results import run_folder
from harness.results.folder import bound
from harness.results.folder.find import find
from harness.results.folder.names import CONFIG, DAMAGED, EXAMPLES, INFO, RESCORED, SUMMARY
from harness.results.records import Record, StoreError
from harness.results.run_folder import Run, load
from harness.terminal.notices import say_once
from tests.fake_records import config, records

SEED = int(os.environ.get("KV_HARNESS_TEST_SEED", "0"))
FILES = (INFO, CONFIG, EXAMPLES, RESCORED, SUMMARY)
SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}
RUNS: dict[str, list[Record]] = {
    "full": records([1.0, 1.0, 1.0, 0.0]),
    "quest": records([1.0, 0.0, 0.5, 0.0], **SPARSE),
    "h2o": records([1.0, 0.0], **SPARSE),
}
FACTS = {
    "task_info": {"metric": "recall", "version": "1", "chance": 0.0},
    "num_expected": 4,
    "provenance": {
        "git": {"commit": "abc"},
        "machine": {"cpu": "a CPU", "threads": 2, "load_average": [0.5, 0.5, 0.5]},
    },
}
AGAIN = {"q1": 0.5}  # what a later scorer makes of some answers of Quest


def command(root: Path, method: str) -> Path:
    """What `python -m harness` does for a run that lies in `root`, whole or not; H2O is stopped half-way."""
    settings = config(method)
    with Run.open(root, settings, {"config": settings, "sources": "abc"}, "niah", method) as run:
        run.complement(**{key: value for key, value in FACTS.items() if key != "provenance"})
        pending = [record for record in RUNS[method] if not run.contains(record.id)]
        if pending:
            run.note(provenance=FACTS["provenance"])
        for record in pending:
            run.append(record)
        run.close("interrupted" if method == "h2o" else "complete")
    return run.folder


def scored_again(folder: Path) -> None:
    """What `python -m harness.rescore` does."""
    run = load(folder, first_scores=True)
    lines = [{"id": record.id, "score": 0.5, "details": {}} for record in run.records]
    version = {"task_version": "2", "sources": "abc", "mean": 0.5}
    section = {"first": version, "present": version, "changed": 3, "at": "2026-01-01T00:00:00+00:00"}
    run_folder.write_rescored(folder, lines, run.info)
    info = run.info | {"rescored": section | {"records": run.digest}}
    bound.write_info(folder, bound.bind(folder, info, EXAMPLES, RESCORED))


def told(capsys: pytest.CaptureFixture[str], tool: Any, *words: object) -> tuple[list[str], str]:
    """What a command prints, notes unwrapped, and what it says on stderr."""
    assert tool.main([str(word) for word in words]) in (0, 1, 2, 3)
    out, err = capsys.readouterr()
    return out.replace("\n    ", " ").splitlines(), err


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "runs"
    for method in RUNS:
        command(root, method)
    scored_again(place(root, "quest"))
    command(root, "quest")
    assert report.main([str(root)]) == 0  # writes every summary.json
    return root


def place(root: Path, method: str) -> Path:
    [folder] = root.glob(f"niah-{method}-????????")
    return folder


def rows(root: Path) -> dict[str, dict[str, Any]]:
    """The numbers of all runs, without what is said of how they came about."""
    [table] = comparisons([load(folder) for folder in find([root])])
    return {entry.title: entry.summary | {"warnings": None} for entry in table.entries}


def flip(data: bytes, draw: random.Random) -> bytes:
    at, changed = draw.randrange(len(data)), bytearray(data)
    changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def cut_at_a_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: draw.randrange(len(lines))])


def edit(data: bytes, draw: random.Random) -> bytes:
    """Another digit in place of one."""
    digits = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    if not digits:
        return data + b"x"
    at = draw.choice(digits)
    return data[:at] + str((int(chr(data[at])) + draw.randrange(1, 10)) % 10).encode() + data[at + 1 :]


def repeat_a_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return data + draw.choice(lines)


def drop_a_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def zeros(data: bytes, draw: random.Random) -> bytes:
    """A block that the disk never wrote."""
    at = draw.randrange(len(data))
    return data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]


def nonsense(data: bytes, draw: random.Random) -> bytes:
    return draw.choice(
        [b"", b"[]\n", b"null\n", b"{}\n", b"5\n", b"[" * 100_000, b'{"sha256": "\\ud800"}\n', b"- - ? :\n"]
    )


Damage = Callable[[bytes, random.Random], bytes]
KINDS: tuple[Damage, ...] = (flip, cut, cut_at_a_line, edit, repeat_a_line, drop_a_line, zeros, nonsense)


def damaged(root: Path, name: str, kind: Damage | None, draw: random.Random) -> Path:
    """The file of a run that was hit; `kind` None removes it."""
    path = draw.choice([path for path in sorted(root.glob(f"*/{name}")) if path.stat().st_size])
    if kind is None:
        path.unlink()
    else:
        path.write_bytes(kind(path.read_bytes(), draw))
    return path


PAIRS = [(name, kind) for name in FILES for kind in (*KINDS, None)]


def cases() -> Iterator[Any]:
    """A third of all pairs of a file and a kind of damage, another one with each seed; slow: each thirty times."""
    for number in range(30):
        for at, (name, kind) in enumerate(PAIRS):
            label = f"{name} {'removed' if kind is None else kind.__name__} {number}"
            quick = not number and at % 3 == SEED % 3
            yield pytest.param(name, kind, number, id=label, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind", "number"), cases())
def test_damage_is_named_and_repaired(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: Damage | None, number: int
) -> None:
    draw = random.Random(f"{SEED} {name} {kind and kind.__name__} {number}")
    expected, _ = told(capsys, report, sound)
    root = Path(shutil.copytree(sound, tmp_path / "runs"))
    hit = damaged(root, name, kind, draw)

    found, err = told(capsys, report, root)
    new = [line for line in found if line not in expected]
    assert found == expected or any(name in line for line in (*new, *err.splitlines())), (new, err)
    for folder in root.iterdir():  # the others are printed
        assert folder == hit.parent or any(line.startswith(folder.name.split("-")[1]) for line in found)
    for tool, where in ((status, root), (show, hit.parent), (rescore, hit.parent)):
        told(capsys, tool, where)

    said = commands(root, capsys)
    assert name in said or found == expected or name == SUMMARY
    quest = place(root, "quest")
    if not (quest / RESCORED).exists():
        assert "until python -m harness.rescore" in said
        scored_again(quest)
        command(root, "quest")
    assert rows(root) == rows(sound)

    assert not commands(root, capsys)  # once is enough
    healed, err = told(capsys, report, root)
    assert not err
    assert not [line for line in healed if line not in expected and line.startswith("  ! ") and LOST not in line]


LOST = "run.json was lost and made anew: of machine, versions and times of"


def commands(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What they say on stderr."""
    say_once.cache_clear()
    for method in RUNS:
        command(root, method)
    return capsys.readouterr().err


def removed(root: Path, method: str, name: str) -> Path:
    path = place(root, method) / name
    path.unlink()
    return path


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "runs"))


def test_a_run_without_its_run_json_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = removed(root, "h2o", INFO)
    assert report.main([str(root)]) == 2
    out, err = capsys.readouterr()
    assert (
        err == f"left out: {gone} is gone; run the same command again, which makes it anew, or restore it from a copy\n"
    )
    assert "h2o" not in out


def test_what_nobody_can_make_anew_is_said_of_the_row(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    removed(root, "h2o", INFO)
    command(root, "h2o")
    text, _ = told(capsys, report, root)
    assert any(f"! h2o 10%: {LOST} 2 examples nothing is known" in line for line in text)
    assert load(place(root, "h2o")).info["num_expected"] == 4


def test_an_empty_run_json_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = place(root, "quest") / INFO
    path.write_text("{}")
    with pytest.raises(StoreError, match=r"run\.json was changed after it was written"):
        load(path.parent)
    assert "run.json was changed after it was written: it is made anew" in commands(root, capsys)
    assert [record.id for record in load(path.parent).records] == ["e0", "e1", "e2", "e3"]


def test_lost_records_make_a_run_incomplete_until_they_ran_again(root: Path) -> None:
    """A command may be killed between the repair and the first example."""
    folder, settings = place(root, "full"), config("full")
    lines = (folder / EXAMPLES).read_bytes().splitlines(keepends=True)
    (folder / EXAMPLES).write_bytes(lines[0] + lines[2] + lines[3].replace(b"1.0", b"0.5"))
    with Run.open(root, settings, {"config": settings, "sources": "abc"}, "niah", "full"):
        found = load(folder)
    assert [record.id for record in found.records] == ["e0", "e2"]
    assert load(folder).status == "interrupted"
    assert (folder / f"{EXAMPLES}{DAMAGED}").read_bytes() == lines[3].replace(b"1.0", b"0.5")


def spoilt(root: Path, method: str) -> Path:
    """A run.json that is none any more."""
    path = place(root, method) / INFO
    path.write_text("{")
    return path


def test_a_full_that_cannot_be_read_is_named_where_it_is_missed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = spoilt(root, "full")
    text, _ = told(capsys, report, place(root, "quest"))
    assert any(line.startswith(f"  ! cannot read {broken}: ") for line in text)


def test_every_form_of_a_report_goes_without_the_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, out = spoilt(root, "h2o"), root.parent
    (place(root, "quest") / SUMMARY).write_text("{}")
    (place(root, "full") / SUMMARY).write_text("[")
    forms = [f"--{form}={out / form}" for form in ("html", "csv", "tex", "md")]
    assert report.main([str(root), *forms]) == 2
    assert str(broken) in capsys.readouterr().err
    page, spreadsheet, tex, table = (
        path.read_text() for path in (out / "html" / "index.html", out / "csv", out / "tex", out / "md")
    )
    assert str(broken) in page
    assert [line.split(",")[1] for line in spreadsheet.splitlines()[1:]]
    for text in (page, tex.replace("\\_", "_"), table):
        assert "no number here comes from that file" in text


def test_status_names_what_is_damaged(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = spoilt(root, "full")
    short = place(root, "quest") / EXAMPLES
    short.write_bytes(short.read_bytes().partition(b"\n")[0] + b"\n")
    lost = removed(root, "h2o", INFO)
    [part] = status.look(root)
    found = {state.label.split("-")[1]: state for state in part.states}
    assert {state.status for state in found.values()} == {"interrupted"}
    assert str(found["full"].reason).startswith(f"cannot read {broken}")
    assert str(found["quest"].reason).startswith(f"{short} holds 1 of the 4 lines that it had; run the same command")
    assert str(found["h2o"].reason).startswith(f"{lost} is gone; run the same command again")


def test_scores_of_other_records_are_not_shown(root: Path) -> None:
    """Copied from another folder of the same run, say: the checksums of all lines hold."""
    folder = place(root, "quest")
    with pytest.raises(StoreError, match=r"rescored\.jsonl holds scores of other records .* harness\.rescore"):
        bound.read_rescored(folder, load(folder).info | {"rescored": {"records": "those of another day"}})
