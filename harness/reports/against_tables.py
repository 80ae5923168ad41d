"""Methods against methods as columns of a table."""

from __future__ import annotations

from collections.abc import Iterator

from evals.stats import Paired, Shift
from harness.reports.against import Contrasts
from harness.reports.likelihoods import nats_with_ci
from harness.terminal.tables import Column, counts, probability, with_ci

MEANING = (
    "differences on the same prompts, of scores in points and of the right answer's cost in nats per token (less is "
    "better); n: prompts, over all seeds; *: holds after Holm's correction over all tests of this table"
)


def caption(found: Contrasts) -> str:
    return f"Against {found.reference}"


def columns(found: Contrasts) -> list[Column]:
    """Return a row for each contrast."""
    rows, stars = found.contrasts, found.stars()
    scores, costs = [one.score for one in rows], [one.cost for one in rows]
    points = [with_ci(test.diff, [test.ci.low, test.ci.high], sign=True) if test else "" for test in scores]
    nats = [nats_with_ci(test.diff, [test.ci.low, test.ci.high] if test.ci else None) if test else "" for test in costs]
    return [
        Column("method", "", [one.row.label for one in rows], left=True),
        Column("budget", "", [one.row.budget for one in rows]),
        Column("against", "", [one.other.title for one in rows], left=True),
        counts("n", [one.n for one in rows]),
        Column("score", "points, 95% CI", points, values=[test.diff if test else None for test in scores]),
        Column("p", "", [_p(test, star) for test, (star, _) in zip(scores, stars, strict=True)]),
        Column("NLL", "nats, 95% CI", nats, values=[test.diff if test else None for test in costs]),
        Column("p NLL", "", [_p(test, star) for test, (_, star) in zip(costs, stars, strict=True)]),
    ]


def notes(found: Contrasts) -> Iterator[str]:
    """Yield what stands below the table."""
    yield MEANING
    if found.left_out:
        yield (
            f"no {found.reference} of the same budget on the same prompts: {', '.join(found.left_out)}; name one row "
            "with its budget to hold all against it"
        )


def _p(test: Paired | Shift | None, star: bool) -> str:
    return probability(test.p if test else None) + "*" * star
