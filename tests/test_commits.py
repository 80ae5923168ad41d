"""tests/commits.py on a repository of a few commits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import commits

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository with a branch `work` of `main`, whose only commit has the tests a, b and c."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.com")
    monkeypatch.setattr("sys.argv", ["commits"])
    commits.git("init", "--initial-branch=main")
    commit("first", "a b c")
    commits.git("checkout", "-b", "work")


def commit(message: str, names: str, *, file: str = "tests/deep/test_one.py", more: int = 0) -> None:
    """Commit `file` with tests of these names, and as many `more` files."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(f"def test_{name}(): ...\n" for name in names.split()))
    for number in range(more):
        Path(f"{number}.txt").write_text(message)
    commits.git("add", "--all")
    commits.git("commit", "--allow-empty", "--message", message)


def complaint() -> str:
    """Return what `python -m tests.commits` ends with."""
    with pytest.raises(SystemExit) as end:
        commits.main()
    return str(end.value.code or "")


def test_a_test_that_goes_is_named_by_a_commit() -> None:
    commit("tests: move b, rename c", "a d")
    commit("tests: move b", "b", file="tests/test_two.py")
    assert complaint().endswith("Removes-tests: test_c -> replaced by ...")
    commit("tests: say so\n\nRemoves-tests: test_c,\n  test_e ->", "a d")
    assert "test_c" in complaint()  # by nothing
    commit("tests: say so\n\nRemoves-tests: test_b,\n  test_c -> replaced by test_d", "a d")
    assert complaint() == ""
    commit("tests: drop one", "a")
    assert complaint() == ""  # d is younger than the base
    commit("tests: one of two", "b a", file="tests/test_two.py")
    commit("tests: the other", "")
    assert complaint() == ""  # a lives on elsewhere
    monkey = commits.git("rev-parse", "HEAD^")
    assert "test_a" in "".join(commits.complaints(monkey))  # of two tests one is gone


def test_a_merge_keeps_the_tests_of_both_sides() -> None:
    commit("tests: d", "d", file="tests/test_two.py")
    commits.git("checkout", "main")
    commit("tests: e", "e", file="tests/test_three.py")
    commits.git("merge", "--no-commit", "work")
    Path("tests/test_two.py").write_text("")
    commit("Merge branch 'work'", "", file="tests/test_two.py")
    assert "Removes-tests: test_d" in complaint()


def test_subjects_are_short_and_large_changes_have_a_reason() -> None:
    commit("x" * 72, "a b c", more=10)
    assert complaint() == ""
    commit("x" * 73, "a b c d", more=10)
    too_long, no_reason = complaint().splitlines()
    assert "has 73 characters" in too_long
    assert "changes 11 files" in no_reason
    commits.git("commit", "--amend", "--message", "short\n\nFor a reason.")
    assert complaint() == ""


def test_without_an_earlier_commit_nothing_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit("tests: drop them", "")
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{tmp_path}", "shallow"], check=True)
    monkeypatch.chdir(tmp_path / "shallow")
    commits.main()
    assert "no earlier commit" in capsys.readouterr().out
