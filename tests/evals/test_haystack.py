"""Filler text: which file is taken, and what is said where there is none."""

from __future__ import annotations

import doctest
import hashlib
import json
from pathlib import Path

import pytest

from evals import haystack
from evals.base import TaskEnv, TaskError
from evals.ruler.bench import CountedText


def env(root: Path | None) -> TaskEnv:
    return TaskEnv(text=CountedText(), seed=1, data_root=root)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"text": text}))


def test_doctests() -> None:
    assert doctest.testmod(haystack) == (0, 1)


def test_auto_prefers_all_essays_then_the_49_then_python_itself(tmp_path: Path) -> None:
    assert haystack.load("auto", env(None)).name == "pydoc"
    write(tmp_path / "paul_graham_essays_repo49.json", "forty-nine")
    assert haystack.load("auto", env(tmp_path)).text == "forty-nine"
    write(tmp_path / "essays" / "PaulGrahamEssays.json", "all")
    found = haystack.load("auto", env(tmp_path))
    assert (found.name, found.text, found.sha256) == ("essays", "all", hashlib.sha256(b"all").hexdigest())
    assert haystack.load("essays49", env(tmp_path)).text == "forty-nine"


@pytest.mark.parametrize("name", ["essays", "essays49"])
def test_a_missing_file_is_named_with_its_places(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError, match=rf"paul_graham_essays.*{tmp_path}.*pydoc"):
        haystack.load(name, env(tmp_path))
    with pytest.raises(TaskError, match="none is set"):
        haystack.load(name, env(None))


def test_other_bad_input(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="essays, essays49, pydoc"):
        haystack.load("novel", env(None))
    (tmp_path / "PaulGrahamEssays.json").write_text('{"text": "cut sho')
    with pytest.raises(TaskError, match=r"PaulGrahamEssays\.json.*fetch"):
        haystack.load("essays", env(tmp_path))


def test_shared_essays(shared_data: Path) -> None:
    assert haystack.load("auto", env(shared_data)).text.count(" ") > 500_000
    assert haystack.load("essays49", env(shared_data)).text.startswith("July 2010What hard liquor")
