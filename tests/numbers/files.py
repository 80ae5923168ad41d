"""Read results/published, and write its numbers as the pages do."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parents[2] / "results" / "published"


def rows(name: str, **which: object) -> list[dict[str, Any]]:
    """The rows of a benchmark's file, those whose fields have the values of `which`."""
    stored = json.loads((PUBLISHED / f"{name}.json").read_text("utf-8"))["rows"]
    return [row for row in stored if all(row[key] == value for key, value in which.items())]


def row(name: str, **which: object) -> dict[str, Any]:
    """The one of these rows."""
    [only] = rows(name, **which)
    return only


def machine(name: str) -> dict[str, Any]:
    """The machine of a benchmark's file, with its load when the benchmark began."""
    stored = json.loads((PUBLISHED / f"{name}.json").read_text("utf-8"))
    return dict(stored["provenance"]["machine"])


def run(name: str, **settings: object) -> dict[str, Any]:
    """The one run of the simulator in a published file that has these settings."""
    stored = json.loads((PUBLISHED / "cachedattention" / f"{name}.json").read_text("utf-8"))["runs"]
    [only] = [one for one in stored if all(one["settings"][key] == value for key, value in settings.items())]
    return dict(only)


def figures(name: str, **settings: object) -> dict[str, float]:
    """What the simulator found in that run."""
    return dict(run(name, **settings)["figures"])


def table(name: str) -> list[dict[str, str]]:
    """The lines of a published CSV file."""
    with (PUBLISHED / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def line(*cells: object) -> str:
    """A row of a Markdown table."""
    return " ".join(f"| {' | '.join(map(str, cells))} |".split())


def ms(seconds: Sequence[float]) -> str:
    """The median of a median with its range, in milliseconds."""
    return f"{1e3 * seconds[0]:.0f}"


def ranged(estimate: Sequence[float], places: int, factor: float = 1, word: str = "-") -> str:
    """A median with its range in brackets."""
    middle, low, high = (f"{factor * value:.{places}f}" for value in estimate)
    return f"{middle} ({low}{word}{high})"
