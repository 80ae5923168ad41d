"""Warnings of one run, and alarms above a table of runs: what a reader must know before believing
the numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from evals.stats import ALPHA
from harness.config.settings import ALIGNED, SERVER, TUNING_SEED
from harness.results.compared import FULL, mean_score, paired
from harness.results.facts import FACTS
from harness.results.records import LeftOut, Record
from harness.results.run_folder import StoredRun
from harness.terminal.notices import alike
from methods.tiers.tier import DEVICE, TIERS, bytes_key

RED = ("above_full", "same_as_full")
SHARED = "shared_machine"
HARDWARE = (
    "cpu",
    "device_name",
    "cpus_usable",
    "threads",
    "memory_bytes",
)  # what tells machines apart
# of answers that are not fully right; right answers are alike whoever gives them
MIN_WRONG_TOKENS = 100
NEAR = 0.1  # a Full this close to guessing leaves no room to lose
OUT_OF_TOKENS: tuple[str, Callable[[Record], bool]] = (
    "ran into the token limit",
    lambda record: any(reply.stop == "length" for reply in record.replies),
)
# begins a warning of harness/prompts/prompt_lint.py
ANSWER_CUT = "The reference answer was in the part that was cut"
SAME_HOURS = timedelta(hours=1)  # in which a machine is about as fast
# load that the system makes by itself: of a CPU, or a share of them where that is more
MARGIN, MARGIN_SHARE = 0.5, 0.1


def meanings() -> dict[str, str]:
    """Return what a kind of alarm says of the rows that it counts, the most important first."""
    return {
        "above_full": "score above Full, so look for a bug",
        "same_as_full": "all outputs are Full's though only a part was read: did the method run?",
        "at_chance": "Full itself is near guessing, so no loss can show",
        "budgets_differ": "budgets differ",
        "simulated": "simulated",
        SHARED: "others used the machine, so times mean little",
        "full_elsewhere": "Full ran on another machine or over an hour apart, so times do not compare",
        **{key: fact.alarm for key, fact in FACTS.items() if fact.alarm},
        "tuning_seed": "these are the examples on which harness.tune chooses parameters: do not report them",
    }


@dataclass(frozen=True, slots=True)
class Alarm:
    """A reason to doubt `count` of the `of` rows of a table."""

    kind: str  # one of `meanings`
    count: int
    of: int
    rows: tuple[str, ...]  # their titles
    reason: str = ""  # what is simulated, or what a budget means

    @property
    def red(self) -> bool:
        """True if the alarm points to a likely bug, which must be explained first; False if the
        rows only mean less than they seem to."""
        return self.kind in RED

    @property
    def text(self) -> str:
        """The alarm in words, with the titles of its rows."""
        rows = "all rows" if self.count == self.of > 1 else ", ".join(self.rows)
        if self.kind == "simulated":
            return f"{rows}: {self.reason}"
        meaning = meanings()[self.kind]
        if self.kind == "budgets_differ":  # the reason names the rows
            return f"{meaning}: {self.reason}"
        return f"{rows}: {meaning}{f': {self.reason}' if self.reason else ''}"


class AlarmRow(NamedTuple):
    """A row of a table, as the alarms look at it: a run, the Full that it is compared with, its
    summary."""

    title: str
    run: StoredRun
    full: StoredRun | None
    summary: Mapping[str, Any]
    # of its difference to Full, as the table stars it: corrected where the table corrects
    p: float | None = None


SIMULATED: dict[str, Callable[[AlarmRow], bool]] = {
    "random weights, so scores mean nothing": lambda row: row.run.info.get("weights") == "random",
    "the prefill was shared, so no times": lambda row: row.summary["simulated"],
    "times hold no transfer, because a CPU's host tier is its own memory": lambda row: (
        row.summary["host_is_cpu"]
        and any(row.summary["memory"].get(bytes_key(tier)) for tier in TIERS if tier != DEVICE)
    ),
}


def alarms(rows: Sequence[AlarmRow]) -> list[Alarm]:
    """Return the alarms that apply to the rows of one table, the most important first."""
    candidates = [(kind, [row for row in rows if holds(row)], "") for kind, holds in CHECKS.items()]
    for key in (key for key, fact in FACTS.items() if fact.alarm):
        candidates.append(
            (key, [row for row in rows if any(record[key] for record in row.run.records)], "")
        )
    candidates.append(("full_elsewhere", _apart_from_full(rows), ""))
    candidates += [
        ("simulated", [row for row in rows if holds(row)], reason)
        for reason, holds in SIMULATED.items()
    ]
    candidates += [("budgets_differ", ruled, reason) for ruled, reason in _budgets(rows)]
    kinds = list(meanings())
    candidates.sort(key=lambda candidate: kinds.index(candidate[0]))
    return [
        Alarm(kind, len(some), len(rows), tuple(row.title for row in some), reason)
        for kind, some, reason in candidates
        if some
    ]


def _is_as_full(row: AlarmRow) -> bool:
    """Return True if a row that read only part of the prompt gave exactly the outputs of Full
    (dense attention), including wrong ones: perhaps the method did not run."""
    pairs = paired(row.run.records, row.full.records if row.full else [])
    in_part = all(
        (share := ours.share("attended_prompt")) is not None and share < 1 for ours, _ in pairs
    )
    same = all(ours.answer == theirs.answer for ours, theirs in pairs)
    wrong_tokens = sum(len(ours.tokens) for ours, _ in pairs if ours.score < 1)
    return in_part and same and wrong_tokens >= MIN_WRONG_TOKENS


def at_chance(full: Sequence[Record], chance: float | None) -> bool:
    """Return True if even Full (dense attention) has a mean score near guessing (`chance`), so that
    no method can look worse than it."""
    return chance is not None and bool(full) and mean_score(full) <= chance + NEAR


def _budgets(rows: Sequence[AlarmRow]) -> Iterator[tuple[list[AlarmRow], str]]:
    """Yield (rows, reason) for each setting because of which the budgets of these rows do not mean
    the same, such as a share in one row and bytes in another. `reason` names the rows with each
    meaning."""
    ruled = [
        row for row in rows if any(row.summary["budget"].get(key) for key in ("asked", "bytes"))
    ]
    meanings: dict[str, Callable[[AlarmRow], str | None]] = {
        "budget": _unit,
        "counts": lambda row: str(row.summary["budget"].get("counts", "prompt")),
        # a rule that changes nothing for a method makes no difference
        "budget_rule": lambda row: (
            _rule(row)
            if _rule(row) not in ALIGNED
            and (row.run.info.get("budget_use") or {}).get("paper_leaves_out")
            else None
        ),
        "dense_layers": lambda row: str(list(row.run.config.get("dense_layers") or [])),
    }
    for name, meaning in meanings.items():
        kinds = defaultdict[str, list[AlarmRow]](list)
        for row in ruled:
            if (kind := meaning(row)) is not None:
                kinds[kind].append(row)
        if len(kinds) > 1:
            # the longest list of rows last
            by_size = sorted(kinds.items(), key=lambda item: len(item[1]))
            reason = "; ".join(
                f"{name}={kind}: {', '.join(row.title for row in some)}" for kind, some in by_size
            )
            yield [row for some in kinds.values() for row in some], reason


def _unit(row: AlarmRow) -> str:
    budget = row.summary["budget"]
    if budget.get("bytes"):
        return "bytes"
    unit = "a share" if isinstance(budget["asked"], float) else "a number of tokens"
    return f"{unit} (budget_rule={_rule(row)})" if _rule(row) in ALIGNED else unit


def _rule(row: AlarmRow) -> str:
    return str(row.run.config.get("budget_rule", "read"))


def _apart_from_full(rows: Sequence[AlarmRow]) -> list[AlarmRow]:
    """Return the rows with times that ran on another machine than their Full, or more than an hour before or after it,
    where the table shows Full's times as well."""
    timed = {row.run.folder: row for row in rows if not row.summary["simulated"]}
    pairs = [(row, row.full) for row in timed.values() if row.full and row.full.folder in timed]
    return [
        row
        for row, full in pairs
        if row.run.config.get("device") == SERVER
        or any(_apart(a, b) for a in _sessions(row.run) for b in _sessions(full))
    ]


def _apart(session: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two sessions ran on different machines or in different hours, as far as both
    say where and when. A session is one time that a process had a run's folder open."""
    places: list[dict[str, Any]] = [
        (each.get("provenance") or {}).get("machine") or {} for each in (session, other)
    ]
    if any(
        places[0].get(key) != places[1].get(key)
        for key in HARDWARE
        if all(key in place for place in places)
    ):
        return True
    if not (session.get("started") and other.get("started")):
        return False
    first, last = sorted((session, other), key=lambda each: str(each["started"]))
    ended, began = first.get("ended") or first["started"], last["started"]
    return datetime.fromisoformat(began) - datetime.fromisoformat(ended) > SAME_HOURS


def _sessions(run: StoredRun) -> list[Mapping[str, Any]]:
    """Return what run.json says of each session, the last one at the end. A session is one time
    that a process had the run's folder open for writing."""
    return [*(run.info.get("earlier") or []), run.info]


def _shared_the_machine(row: AlarmRow) -> bool:
    """Return True if the row shows times and other processes used the machine during the run: the
    load average was higher than the run's own threads explain."""
    if row.summary["simulated"] and not row.summary.get("trace"):
        return False
    config = row.run.config
    if config.get("device") == SERVER:  # which may be what loads this machine
        return False
    placement = TIERS.get(config.get("placement", DEVICE))
    in_files = (placement is not None and placement.in_files) or config.get("history") == "store"
    for session in _sessions(row.run):
        machine = (session.get("provenance") or {}).get("machine") or {}
        cpus = machine.get("cpus_usable") or 0
        on_cpu = config.get("device", "cpu") == "cpu"
        # a GPU needs one CPU that is free
        threads = (machine.get("threads") or cpus) if on_cpu else cpus - 1
        most = threads + in_files + max(MARGIN, MARGIN_SHARE * cpus)
        loads = [
            load[0]
            for load in (machine.get("load_average"), session.get("load_average_ended"))
            if load
        ]
        if cpus and any(load > most for load in loads):
            return True
    return False


CHECKS: dict[str, Callable[[AlarmRow], Any]] = {
    "above_full": lambda row: (
        row.p is not None and row.p < ALPHA and row.summary["full"]["diff"] > 0
    ),
    "same_as_full": _is_as_full,
    "at_chance": lambda row: (
        row.full and at_chance(row.full.records, row.run.info.get("task_info", {}).get("chance"))
    ),
    SHARED: _shared_the_machine,
    "tuning_seed": lambda row: row.run.config.get("seed") == TUNING_SEED,
}


def warnings(
    records: Sequence[Record],
    full: Sequence[Record] | None,
    *,
    info: Mapping[str, Any],
    failed: Sequence[LeftOut] = (),
    skipped: Sequence[LeftOut] = (),
) -> Iterator[str]:
    """Yield sentences that a reader must know before believing a run's numbers, found in its own
    records. `full`: the records of the Full that it is compared with; `info`: run.json."""
    n, chance = len(records), info.get("task_info", {}).get("chance", 0.0)
    yield from info.get("cautions", ())
    asked = n + len(failed) + len(skipped)
    for reason, count in alike([example.why for example in skipped]):
        yield f"{count} of {asked} examples left out, in Full's run as well: {reason}"
    for reason, count in alike([example.why for example in failed]):
        yield f"{count} of {asked} examples failed and count nowhere; the same command tries them again: {reason}"
    if not records:
        yield "no example was run"
    baseline = records if info.get("method") == FULL else full or []
    if records and at_chance(baseline, chance):
        share = 100 * mean_score(baseline)
        yield f"Full scores {share:.1f}, near the {100 * chance:.0f} of guessing: methods cannot be told apart here"
    for reason, count in alike([record["fallback"] for record in records if record["fallback"]]):
        yield f"the method fell back on {count} of {n} examples: {reason}"
    for what, holds in [
        *(each for fact in FACTS.values() for each in fact.warnings.items()),
        OUT_OF_TOKENS,
    ]:
        if count := sum(map(holds, records)):
            yield f"{count} of {n} examples {what}"
    for warning, count in alike([warning for record in records for warning in record["warnings"]]):
        yield f"{count} of {n} examples: {warning}"
    if full is not None and (count := len(paired(records, full))) < n:
        yield f"compared with Full on {count} of {n} examples: Full has no answer to the other prompts"
