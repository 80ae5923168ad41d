"""What the papers publish for our experiments: results/paper/experiments.csv."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).resolve().parents[2] / "results" / "paper" / "experiments.csv"
NOT_AVAILABLE = "not available"


class Published(NamedTuple):
    """One number, or the word that there is none to be had."""

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
        known = NOT_AVAILABLE if self.value is None else f"{self.value:g} {self.unit}"
        where = " ".join(filter(None, (self.setting, self.model)))
        return f"{self.quantity}, {where}: {known}{note}"


def published(experiment: str) -> list[Published]:
    """Of an experiment of the repository; none for a user's own."""
    return [row for row in _rows() if row.experiment == experiment]


def _rows() -> Iterator[Published]:
    with open(FILE, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield Published(**row | {"value": float(row["value"]) if row["value"] else None})  # type: ignore[arg-type]
