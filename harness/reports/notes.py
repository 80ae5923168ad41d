"""The stamps of rows, and the notes below the table of all measurements. A stamp is a letter that
warns about a row's numbers, such as S for a simulated run without times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from harness.reports.compare import Comparison, ReportRow
from harness.reports.conditions import code_versions
from harness.reports.labels import COUNTS_ANSWER
from harness.results.alarms import SHARED
from harness.results.facts import FACTS
from harness.results.summary import MIN_WINDOWS
from harness.terminal.tables import percent
from methods.tiers.tier import TIERS, bytes_key

WARNING = "! "  # begins a note that the stamp `!` points to


def stamp_meanings() -> dict[str, str]:
    """Return what each stamp means, in the order in which a row shows them; users may add tiers with theirs."""
    return {
        "S": "simulated: the cost is not paid in this code path, so speed is left out",
        "T": "traced: the clocks inside a step cost time, so speed is left out",
        "L": "load: others used the machine while it ran, so its times mean little",
        **dict(tier.stamp for tier in TIERS.values() if tier.stamp),
        **dict(fact.stamp for fact in FACTS.values() if fact.stamp),
        "P": "plain steps: times hold the launch of each operation, for the reason in `plain_steps` of run.json",
        "C": "continued: times come from more than one session",
        "R": "running",
        "I": "interrupted",
        "F": "failed",
        "!": "see the notes",
    }


def stamps(entry: ReportRow, table: Comparison) -> str:
    """Return the stamps of a row: letters that warn about its numbers (`STAMPS` says what each
    means)."""
    row = entry.summary
    holds = {
        "S": row["simulated"],
        "T": row["traced"],
        "L": any(alarm.kind == SHARED and entry.title in alarm.rows for alarm in table.alarms),
        **{
            tier.stamp[0]: row["host_is_cpu"] and row["memory"].get(bytes_key(name))
            for name, tier in TIERS.items()
            if tier.stamp
        },
        **{fact.stamp[0]: row.get(key) for key, fact in FACTS.items() if fact.stamp},
        "P": entry.run.info.get("plain_steps"),
        "C": entry.run.info.get("earlier"),
        **{
            status[0].upper(): row["status"] == status
            for status in ("running", "interrupted", "failed")
        },
        "!": row["warnings"],
    }
    return "".join(stamp for stamp in stamp_meanings() if holds[stamp])


def notes(table: Comparison) -> Iterator[str]:
    """Yield the notes below a table of measurements: what columns mean, what the stamps in use
    mean, and warnings about single rows."""
    entries, rows = table.entries, [entry.summary for entry in table.entries]
    means = "bytes held the largest of any example, bytes of a step the mean"
    if table.of_perplexity:
        yield (
            "perplexity: exp of the mean cost per token, mean over groups, the smaller the better; NLL vs full: paired "
            f"difference per token over windows, by the signed-rank test; {means}"
        )
        if few := [entry.title for entry in entries if entry.cost and entry.cost["p"] is None]:
            yield f"fewer than {MIN_WINDOWS} windows, so no interval says how sure a difference is: {', '.join(few)}"
    else:
        yield f"score: {table.metric}, 0-100, mean over groups; times are medians, {means}"
    if any(row["throughput_tok_s"] is not None for row in rows):
        yield "decode: tokens after the second over the time of their steps; sequences of a batch share a step's time"
    if any(entry.score_differs or entry.cost_differs for entry in entries):
        both = ", scores and likelihoods together" * any(
            entry.cost_p is not None for entry in entries
        )
        yield f"*: differs from Full after Holm's correction over this table{both}"
    if any(entry.run.config.get("budget_rule") == "paper" for entry in entries):
        yield (
            "budget_rule=paper: sinks and windows that the method's paper does not count come on top, and RocketKV's "
            "index is within; see `attended`"
        )
    in_all = any(row["budget"].get("counts") == COUNTS_ANSWER for row in rows)
    if in_all:
        yield (
            "in all: this budget is all rows that a KV head holds, of DSA those that it reads, prompt and answer "
            "(+128: and a buffer of 128 more); "
            "such a row compares with the others by the tokens of both that a step reads, the mean over steps (read in "
            "all)"
        )
    if any(row["budget"]["union"]["share"] for row in rows):
        part = " (of a budget in all, only its prompt tokens)" * in_all
        yield (
            f"attended: what the budget limits{part}, mean over steps; read per KV head (union): the distinct prompt "
            "tokens that one KV head reads for all its query heads, each once"
        )
    if any(row["memory"].get("read_bytes_per_step") for row in rows):
        yield (
            "read: bytes of keys and values that a step reads, and of the index that chooses them, wherever they lie, "
            "mean over steps; a token counts once for a KV head, an index as often as steps choose by it"
        )
    yield from _of_questions(entries)
    used = {stamp for entry in entries for stamp in stamps(entry, table)}
    yield from (
        f"{stamp}: {meaning}"
        for stamp, meaning in stamp_meanings().items()
        if stamp in used and stamp != "!"
    )
    yield from code_versions(entries)
    for entry in entries:
        if again := entry.run.info.get("rescored"):
            first, present = again["first"], again["present"]
            yield (
                f"scored again: {entry.title} on {again['at'][:10]} (task version {first['task_version']} -> "
                f"{present['task_version']}): {again['changed']} of {entry.summary['num_examples']} scores differ, "
                f"mean {percent(first['mean'], 2)} -> {percent(present['mean'], 2)}"
            )
        if entry.full and entry.run.scorer != entry.full.scorer:
            versions = f"{entry.run.scorer} and {entry.full.scorer}"
            yield f"{WARNING}{entry.title} and its Full were scored by task versions {versions}: rescore both"
    warned = defaultdict[str, list[str]](list)
    for entry in entries:
        for warning in entry.summary["warnings"]:
            warned[warning].append(entry.title)
    yield from (f"{WARNING}{', '.join(titles)}: {warning}" for warning, titles in warned.items())


def _of_questions(entries: Sequence[ReportRow]) -> Iterator[str]:
    """Yield notes on answers that began on an existing cache (further turns, and further questions
    on one context), and on thoughts before answers."""
    for entry in entries:
        for fact in reversed([*FACTS.values()]):  # from the example's to its steps'
            if fact.note:
                yield from fact.note(entry.title, entry.run.records, entry.run.config)
    texts = {
        len({r.independent for r in e.run.records})
        for e in entries
        if any(r["unit"] for r in e.run.records)
    }
    drawn = {(e.run.config.get("generation") or {}).get("samples", 1) for e in entries}
    for count in sorted(texts):
        if drawn != {1}:
            yield (
                f"pass@1: the mean over {max(drawn)} answers drawn to each question, which are not independent: "
                f"intervals and p count those to each of {count} questions as one"
            )
            continue
        yield f"questions on one text are not independent: intervals and p count those on each of {count} texts as one"
    if any(entry.summary["ttft_later_s"]["p50"] is not None for entry in entries):
        yield "TTFT: with the prefill; TTFT later: of further turns, or questions on one context, from their own start"
