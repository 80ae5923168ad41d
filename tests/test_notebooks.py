"""Every notebook runs from top to bottom on fresh results, and is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import pytest

from harness.config.settings import Results, Settings
from harness.jobs.run import evaluate
from tests.fast import MODEL, PQ, niah

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.py"))  # jupytext's percent format


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    evaluate(PQ, niah(depths=2), MODEL, Settings(results=Results(root=str(tmp_path)), progress=False))
    monkeypatch.setenv("KV_HARNESS_RUNS", str(tmp_path))
    monkeypatch.setenv("KV_HARNESS_TINY", "1")
    monkeypatch.chdir(notebook.parent)
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "stored with outputs"
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), notebook.name, "exec"), names)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_notebook_is_its_script(script: Path) -> None:
    """Written by `jupytext --to ipynb`: edit the script."""
    jupytext = pytest.importorskip("jupytext")
    stored = json.loads(script.with_suffix(".ipynb").read_text())["cells"]
    assert ["".join(cell["source"]) for cell in stored] == [cell.source for cell in jupytext.read(script).cells]
