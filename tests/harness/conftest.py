"""The command line as a fixture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]
Outside = Callable[..., tuple[Path, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command in this process, with a tiny model unless it names another; exit code, stdout, stderr."""
    from harness.__main__ import main  # here: a bare GPU machine, which collects the tests of this folder, has no hydra
    from tests.fast import MODEL_ARGS, TASK_ARGS

    def run(*arguments: str) -> tuple[int, str, str]:
        named = {argument.partition("=")[0] for argument in arguments}
        model = [] if "model" in named else [a for a in MODEL_ARGS if a.partition("=")[0] not in named]
        task = [] if "task" in named else [a for a in TASK_ARGS if a.partition("=")[0] not in named]
        root = [] if "results.root" in named else [f"results.root={tmp_path / 'runs'}"]
        monkeypatch.setattr(sys, "argv", ["harness", *model, *task, *root, *arguments])
        code = main()
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.models.random.Random.build", lambda *_: pytest.fail("weights were loaded"))


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    """Adds a method (or a task) from outside, `Broken` of this source as `broken`, with these lines of yaml; its file,
    and a folder for --config-dir."""

    def add(name: str, source: str, parameters: str, kind: str = "method") -> tuple[Path, str]:
        file = tmp_path / f"{name.lower()}_{abs(hash(tmp_path))}.py"  # a module is imported once per process
        file.write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        folder = tmp_path / "conf" / kind
        folder.mkdir(parents=True)
        (folder / f"{name.lower()}.yaml").write_text(f"_target_: {file.stem}.{name}\n{parameters}")
        return file, str(tmp_path / "conf")

    return add
