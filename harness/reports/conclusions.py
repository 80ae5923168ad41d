"""What a table lets a reader conclude, in sentences: who differs from Full and from whom, at what bytes, and what so
many examples cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import ceil, inf
from statistics import NormalDist

from evals import signed_rank, stats
from evals.stats import ALPHA, POWER
from harness.reports.compare import Comparison, ReportRow, beside_full
from harness.reports.likelihoods import nats_with_ci
from harness.results.compared import FULL, for_statistics, paired
from harness.results.likelihood import MIN_WINDOWS, cost_of
from harness.results.records import Record
from harness.results.summary_file import method_of
from harness.terminal.tables import BYTES, percent, scaled
from methods.tiers.tier import DEVICE, TIERS, bytes_key

CLOSE = 0.25  # pairs whose scores differ by more need no test to be believed
MOST_NAMED = 8
ENOUGH = 8  # pairs told apart; where they are fewer, the table says how many examples would do it
NORMAL = NormalDist()


def conclusions(table: Comparison) -> Iterator[str]:
    """Yield the sentences, of a table with more rows than Full's."""
    yield from _against_full(table)
    yield from _unseen(table)
    yield from _pairs(table)


def _against_full(table: Comparison) -> Iterator[str]:
    score, cost = table.significant, table.significant_costs
    entries = list(enumerate(table.entries))
    told = [
        f"{entry.title} ({_by(entry, i in score, i in cost)}; {_bytes(entry)})"
        for i, entry in entries
        if i in score | cost
    ]
    if told:
        yield f"Different from Full: {', '.join(told)}."
    tested = {*table.tested, *table.costed}
    same = [f"{entry.title} ({_bytes(entry)})" for i, entry in entries if i in tested - score - cost]
    if same:
        yield f"Not told from Full, which does not make them equal: {', '.join(same)}."


def _by(entry: ReportRow, by_score: bool, by_cost: bool) -> str:
    parts = [f"{percent(entry.summary['full']['diff'], sign=True)} points"] if by_score else []
    return " and ".join(
        [*parts, *([f"{nats_with_ci(beside_full(entry.summary)['diff'], None)} nats"] if by_cost else [])]
    )


def _bytes(entry: ReportRow) -> str:
    """What it holds, tier by tier; a tier with nothing in it but the device's is left out."""
    held = {tier: entry.summary["memory"].get(bytes_key(name)) for name, tier in TIERS.items()}
    shown = [(tier, size) for tier, size in held.items() if size or tier is TIERS[DEVICE]]
    return " + ".join(f"{' '.join(_told(size))} {tier.head}" for tier, size in shown)


def _told(size: float | None) -> tuple[str, str]:
    [value], unit = scaled([size], BYTES)
    return value, unit


def _unseen(table: Comparison) -> Iterator[str]:
    """What the scores cannot show, by the row that would show least."""
    sizes = [size for _, size in table.detectable]
    if not sizes:
        return
    least = [size for size in sizes if size is not None]
    wanted = [number for numbers in table.needed for loss, number in numbers.items() if loss == 0.1]
    known = [number for number in wanted if number is not None]
    seen = (
        f"a loss below {100 * max(least):.0f} points may go unseen" if least else "no loss, however large, can be seen"
    )
    more = f"; 10 points would take {max(known)} examples" if len(known) == len(wanted) else ""
    yield f"By the score of so few examples {seen}{more}."


def _pairs(table: Comparison) -> Iterator[str]:
    """How many pairs of methods are told apart, Holm's correction over all of them and both measures."""
    rows = [entry for entry in table.entries if method_of(entry.run) != FULL and entry.run.records]
    pairs = [pair for pair in combinations(rows, 2) if table.of_perplexity or _is_close(*pair)]
    found = [(pair, [p for p in _tests(*pair, table.of_perplexity) if p is not None]) for pair in pairs]
    corrected = iter(stats.holm([p for _, ps in found for p in ps]))
    least = [min([next(corrected) for _ in ps], default=1.0) for _, ps in found]
    apart = [pair for (pair, _), p in zip(found, least, strict=True) if p < ALPHA]
    if not pairs:
        return
    which = "" if table.of_perplexity else f" whose scores differ by at most {percent(CLOSE, 0)} points"
    named = [f"{a.title} from {b.title}" for a, b in apart[:MOST_NAMED]]
    more = f" and {len(apart) - MOST_NAMED} more" if len(apart) > MOST_NAMED else ""
    listed = f": {', '.join(named)}{more}" if named else ""
    yield (
        f"Of {len(pairs)} pairs of rows{which}, {len(apart)} are told apart by score or likelihood, after Holm's "
        f"correction over all of them{listed}."
    )
    if (lacking := min(ENOUGH, len(pairs)) - len(apart)) > 0:
        tests = sum(len(ps) for _, ps in found)
        alike = [pair_and_ps for pair_and_ps, p in zip(found, least, strict=True) if p >= ALPHA]
        wanted = sorted(_examples_for(pair, ps, tests) for pair, ps in alike)[lacking - 1]
        yield (
            "Too many pairs have not differed at all so far to say how many examples would tell enough apart."
            if wanted == inf
            else f"If examples go on to differ as these do, about {ceil(wanted / 10) * 10} would tell "
            f"{len(apart) + lacking} of these pairs apart."
        )


def _examples_for(pair: tuple[ReportRow, ReportRow], ps: Sequence[float], tests: int) -> float:
    """How many examples would tell a pair apart with 80 % power as the first of so many tests, if the others differ as
    these do: the normal deviate of a test grows with the root of their number."""
    seen = -NORMAL.inv_cdf(min(ps, default=1.0) / 2)
    if seen <= 0:
        return inf
    wanted = NORMAL.inv_cdf(1 - ALPHA / tests / 2) + NORMAL.inv_cdf(POWER)
    return min(len(row.run.records) for row in pair) * (wanted / seen) ** 2


def _is_close(a: ReportRow, b: ReportRow) -> bool:
    means = [entry.summary["score"]["mean"] for entry in (a, b)]
    return abs(means[0] - means[1]) <= CLOSE


def _tests(a: ReportRow, b: ReportRow, fed: bool) -> tuple[float | None, float | None]:
    """p of score and likelihood; None where there is nothing to compare."""
    pairs = paired(a.run.records, b.run.records)
    scores, others, groups, units = for_statistics(pairs)
    return None if fed or not pairs else stats.p_value(scores, others, units, groups), _p_of_costs(pairs, fed)


def _p_of_costs(pairs: Sequence[tuple[Record, Record]], fed: bool) -> float | None:
    found = [
        (ours, theirs, record.independent)
        for record, other in pairs
        if (ours := cost_of(record)) is not None and (theirs := cost_of(other)) is not None
    ]
    if not found:
        return None
    costs, baseline, units = zip(*found, strict=True)
    shift = signed_rank.shift(costs, baseline, units)
    return shift.p if shift.n >= MIN_WINDOWS or not fed else None
