"""What papers publish for our experiments, and our own results of the same experiments, as notebooks draw them."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.results.files import read_json
from harness.terminal.notices import say_once

if TYPE_CHECKING:
    import pandas as pd

RESULTS = Path(__file__).resolve().parents[2] / "results"
PUBLISHED = RESULTS / "published"  # our own


class Published(NamedTuple):
    """Holds one published number, or a note that says why it is not available."""

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
    """Return what papers publish for an experiment of the repository; nothing for a user's own."""
    with open(RESULTS / "paper" / "experiments.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["experiment"] == experiment]
    return [Published(**row | {"value": float(row["value"]) if row["value"] else None}) for row in rows]  # type: ignore[arg-type]


def ours(experiment: str, runs: Path | None = None) -> pd.DataFrame:
    """The columns of `python -m harness.report --csv`, a row per run. `runs`: a folder with a folder per experiment;
    where it has none of that name, the committed results of the small variant."""
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
        raise ValueError(f"{experiment}: no results are committed. Run it into a folder of that name in {runs}.")
    text = rows.loc[:, (rows != "").any()].to_csv(index=False)  # without the columns of other experiments
    return pd.read_csv(StringIO(text))


def our_observation(experiment: str, runs: Path | None = None) -> dict[str, Any]:
    """result.json of an observation, in the same way."""
    files = sorted((runs / experiment / "observations").glob("*/result.json")) if runs else []
    return read_json(files[-1] if files else PUBLISHED / "observations" / f"{experiment}.json")


def our_figures(paper: str, name: str, runs: Path | None = None) -> dict[str, Any]:
    """Return what a benchmark or the simulator wrote into the folder `name` of `runs`, else what is committed for
    `paper`."""
    places = [runs / name / file for file in ("simulation.json", "result.json")] if runs else []
    files = [file for file in places if file.is_file()]
    return read_json(files[0] if files else PUBLISHED / paper / f"{name}.json")


def measured_on(rows: pd.DataFrame) -> str:
    """Model and hardware of the rows, for the title of a picture."""
    return "; ".join(sorted({f"{row.model} on {row.device_name}" for row in rows.itertuples()}))
