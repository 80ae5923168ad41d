"""Every notebook is its script, is stored without outputs, and runs from top to bottom on stored results."""

from __future__ import annotations

from pathlib import Path

import jupytext
import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest

from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate
from tests.fast import MODEL, PQ, niah

SCRIPTS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.py"))
OF_PAPERS = ("cachedattention", "infinigen", "pqcache", "shadowkv")  # they read results/published


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_is_its_script(script: Path) -> None:
    stored = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    made = jupytext.read(script)
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (stored, made)]
    assert cells[0] == cells[1], f"run: jupytext --to ipynb notebooks/{script.name}"
    assert not any(cell.get("outputs") for cell in stored.cells), "stored with outputs"


def test_no_notebook_is_without_a_script() -> None:
    assert {script.stem for script in SCRIPTS} == {notebook.stem for notebook in SCRIPTS[0].parent.glob("*.ipynb")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.chdir(script.parent)
    monkeypatch.delenv("KV_HARNESS_EXPERIMENTS", raising=False)
    monkeypatch.setenv("KV_HARNESS_TINY", "1")
    if script.stem not in OF_PAPERS:
        evaluate(PQ, niah(depths=2), MODEL, Settings(results=Results(root=str(tmp_path))))
        monkeypatch.setenv("KV_HARNESS_RUNS", str(tmp_path))
    names: dict[str, object] = {}
    for cell in jupytext.read(script).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, script.name, "exec"), names)
    assert plt.get_fignums() or script.stem not in OF_PAPERS
    plt.close("all")
