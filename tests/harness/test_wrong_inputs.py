"""A hundred wrong inputs (tests/wrong_inputs.py), each answered well; a few at once, the others are slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.wrong_inputs import COMMANDS, PYTHON, Asked, Files

ALL = {**COMMANDS, **PYTHON}
QUICK = 12  # every so many


def cases() -> Iterator[ParameterSet]:
    for number, text in enumerate(ALL):
        marks = [] if number % QUICK == 1 else [pytest.mark.slow]
        yield pytest.param(text, id=text.replace("{", "").replace("}", ""), marks=marks)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("wrong")).made()


def test_there_are_a_hundred() -> None:
    assert len(ALL) == 100


@pytest.mark.parametrize("text", cases())
def test_a_wrong_input_gets_one_sentence_and_leaves_nothing(text: str, files: Files) -> None:
    answer = Asked(text, files).answer()
    assert list(answer.faults(ALL[text])) == [], answer.err


def test_a_full_disk_names_the_folder_of_its_rows(tmp_path: Path) -> None:
    import torch

    from methods.tiers.rows import DiskRows, Place

    rows = DiskRows((1, 1, 4, 2), torch.float32, Place(torch.device("cpu"), tmp_path))
    rows.file.unlink()
    rows.file.symlink_to("/dev/full")
    with pytest.raises(ValueError, match=rf"{tmp_path} \(No space left on device\): .* disk=FOLDER"):
        rows.take(torch.ones(1, 1, 4, 2), 0)


def test_paths_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a shell leaves ~ as it is: behind an equals sign."""
    from harness.commands import report
    from harness.config.overrides import checked
    from harness.config.settings import settings_of

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    assert checked(["results.root=~/runs"]).words == [f"results.root={tmp_path}/runs"]
    store = {"history": "store", "store": {"folder": "~/store", "disk": "1GB"}}
    made = settings_of({**store, "results": {"root": "~/runs"}, "data": {"root": "~/data"}, "disk": "~/data"})
    assert [made.results.root, made.data.root, made.store.folder, made.disk] == [
        str(tmp_path / name) for name in ("runs", "data", "store", "data")
    ]
    assert report._parser().parse_args(["--csv=~/a.csv", "~/runs"]).csv == tmp_path / "a.csv"
