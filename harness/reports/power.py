"""What the examples of a table can find, and how many more would find less: columns, and a note."""

from __future__ import annotations

from collections.abc import Iterator

from harness.reports.compare import LOSSES, Comparison
from harness.reports.labels import budget
from harness.terminal.tables import Column, counts, percent

CAPTION = "How many examples would tell a method from Full"
MEANING = (
    "found: the smallest loss, in points, that these examples show with 80 % power, as one of all tests of the table; "
    "examples for a loss: how many would show it, rounded up by 12 % at most, if chance changes as many answers as in "
    "this run. Decide on a number before a run: adding examples until a difference shows makes p meaningless"
)


def power_table(table: Comparison) -> list[Column]:
    """Return a row for each score that is held against Full; empty without one."""
    rows = [entry for entry, _ in table.detectable]
    if not rows:
        return []
    losses = [loss for _, loss in table.detectable]
    wanted = [
        Column(
            "examples for",
            f"{percent(loss, 0)} points",
            [f"{number}" if number else "over 100000" for number in numbers],
            values=[float(number) if number else None for number in numbers],
        )
        for loss in LOSSES
        for numbers in [[needed[loss] for needed in table.needed]]
    ]
    return [
        Column("method", "", [entry.label for entry in rows], left=True),
        Column("budget", "", [budget(entry.summary) for entry in rows]),
        counts("n", [entry.summary["num_examples"] for entry in rows]),
        Column("found", "points", [percent(loss) or "none" for loss in losses], values=losses),
        *wanted,
    ]


def notes(table: Comparison) -> Iterator[str]:
    """Yield which differences the tests of the main table could find at all."""
    found, count = table.detectable, table.num_tests
    over = f"after Holm's correction over {count} tests" if count > 1 else "in this one comparison"
    if sizes := [100 * size for _, size in found if size is not None]:
        span = " to ".join(dict.fromkeys((f"{min(sizes):.1f}", f"{max(sizes):.1f}")))
        yield f"a difference to Full must be about {span} points to be found with 80 % power {over}"
    if few := ", ".join(entry.title for entry, size in found if size is None):
        yield f"too few examples: no difference to Full, however large, reaches p < 0.05 {over}: {few}"
