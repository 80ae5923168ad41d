"""Reports on finished runs: which runs share a table, its cells, its notes, its pictures.

from harness.reports import table

table("results/runs")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def table(
    folders: str | Path | Sequence[str | Path],
    choice: str | Path | Mapping[str, Any] | None = None,
    config_dirs: Sequence[Path] = (),
) -> pd.DataFrame:
    """Return the runs in these folders as the table that `python -m harness.report FOLDERS --paper`
    writes. It has a row for each method and budget. Each column has its value (scores from 0 to
    100) and, if it is a score, the ends of its interval, its marks, and whether it is bold.
    `choice`: a yaml file, a layout's name, or the keys of such a file. Raise `ValueError` for a
    folder, a key or a name that is not there; a run that cannot be read is left out, and a note
    says so."""
    from harness.reports.choice import Choice
    from harness.reports.compare import comparisons
    from harness.reports.paper.table import paper_table
    from harness.results.run_folder import find, load_all
    from harness.terminal.notices import warn

    several = [folders] if isinstance(folders, str | Path) else folders
    runs, damage = load_all(find(map(Path, several)), config_dirs)
    for text in damage:
        warn(f"left out: {text}")
    chosen = Choice.read(choice) if choice else Choice()
    return paper_table(comparisons(runs), chosen, config_dirs).frame()
