"""What a task makes of its groups: category means, weighted averages, perplexity of the whole text ..."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from evals.base import Task
from harness.config import plugins
from harness.results.records import Record


def averages(records: Sequence[Record], groups: Mapping[str, float], task: Any) -> dict[str, float]:
    """`groups` are their means, `task` its configuration; empty where the task's class cannot be had here."""
    if not records or not isinstance(task, Mapping):
        return {}
    try:
        made: Task = plugins.build(task, "task")
    except ValueError:  # a run of another version, or of a plug-in that is not on this machine
        return {}
    details: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.details.items():
            if isinstance(value, (int, float)):
                details[name].append(value)
    return made.averages(groups, {name: fmean(values) for name, values in details.items()})
