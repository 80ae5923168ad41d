"""The numbers that papers publish for our experiments, and our own results of these experiments, as
notebooks draw them."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.results.files import read_json, unescaped
from harness.terminal.notices import say_once

if TYPE_CHECKING:
    import pandas as pd

RESULTS = Path(__file__).resolve().parents[2] / "results"
PUBLISHED = RESULTS / "published"  # our own


class Published(NamedTuple):
    """Hold one published number, or a note that says why there is none."""

    experiment: str
    quantity: str
    model: str
    setting: str  # in the words of our command line, as far as they go
    value: float | None  # None: not available; `note` says why
    unit: str
    source: str
    note: str

    @property
    def said(self) -> str:
        note = f" ({self.note})" if self.note else ""
        known = "not available" if self.value is None else f"{self.value:g} {self.unit}"
        where = " ".join(filter(None, (self.setting, self.model)))
        return f"{self.quantity}, {where}: {known}{note}"


def published(experiment: str) -> list[Published]:
    """Return the numbers that papers publish for an experiment of conf/experiment/; an empty list
    for any other name."""
    with open(RESULTS / "paper" / "experiments.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["experiment"] == experiment]
    return [
        Published(**row | {"value": float(row["value"]) if row["value"] else None})  # type: ignore[arg-type]
        for row in rows
    ]


def ours(experiment: str, runs: Path | None = None) -> pd.DataFrame:
    """Return our own runs of an experiment, one row each, with the columns of `harness.report
    --csv`. `runs`: a folder with a subfolder per experiment; if it has none of this name, the
    committed results of the experiment's small variant are returned."""
    import pandas as pd

    from harness.reports.compare import comparisons
    from harness.reports.document import as_rows
    from harness.results.run_folder import find, load_all

    folder = runs / experiment if runs else None
    if folder is not None and folder.is_dir():
        stored, damage = load_all(find([folder]))
        for text in damage:
            say_once(f"left out: {text}")
        return pd.DataFrame(as_rows(comparisons(stored)))
    every = pd.read_csv(PUBLISHED / "experiments.csv", dtype=str, keep_default_na=False)
    rows = every[every["experiment"] == experiment]
    if rows.empty:
        raise ValueError(
            f"{experiment}: no results are committed. Run it into a folder of that name in {runs}."
        )
    # without the columns of other experiments
    text = rows.loc[:, (rows != "").any()].to_csv(index=False)
    return pd.read_csv(StringIO(text)).map(unescaped)


def our_observation(experiment: str, runs: Path | None = None) -> dict[str, Any]:
    """Return our result of an experiment of `python -m harness.observe`, which measures attention
    itself: result.json from the subfolder of `runs` named like the experiment, else the committed
    one."""
    files = sorted((runs / experiment / "observations").glob("*/result.json")) if runs else []
    return read_json(files[-1] if files else PUBLISHED / "observations" / f"{experiment}.json")


def our_figures(paper: str, name: str, runs: Path | None = None) -> dict[str, Any]:
    """Return the JSON that a benchmark or the simulator wrote to the subfolder `name` of `runs`. If
    there is none, return the file `name` that is committed for `paper`."""
    places = [runs / name / file for file in ("simulation.json", "result.json")] if runs else []
    files = [file for file in places if file.is_file()]
    return read_json(files[0] if files else PUBLISHED / paper / f"{name}.json")


def measured_on(rows: pd.DataFrame) -> str:
    """Return model and hardware of the rows, for the title of a picture."""
    return "; ".join(sorted({f"{row.model} on {row.device_name}" for row in rows.itertuples()}))
