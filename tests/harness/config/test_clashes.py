"""PyPI's `kernels` beside us: our folder is ours, transformers does without the other, and nothing is uninstalled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast import MODEL_ARGS, TASK_ARGS

ROOT = Path(__file__).parents[3]
IN_RANGE = "0.18.5"  # of the versions that transformers takes, it imports the package


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder as pip leaves it."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("raise AssertionError('the other kernels was imported')\n")
    info = site / f"kernels-{IN_RANGE}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {IN_RANGE}\n")
    return site


def python(tmp_path: Path, *path: Path, code: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, *code], cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_run_with_the_other_kernels_installed(tmp_path: Path, site: Path, ours_first: bool) -> None:
    path = (ROOT, site) if ours_first else (site, ROOT)
    command = ["-m", "harness", "method=streaming", "baseline=off", *MODEL_ARGS, *TASK_ARGS]
    done = python(tmp_path, *path, code=command)
    assert done.returncode == 0, done.stderr
    assert "streaming" in done.stdout


def test_one_that_is_imported_already_is_named(tmp_path: Path, site: Path) -> None:
    (site / "kernels" / "__init__.py").write_text("")
    done = python(tmp_path, site, ROOT, code=["-c", "import kernels, harness"])
    assert "import harness before" in done.stderr
