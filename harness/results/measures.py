"""The one table of numbers that are measured of an answer's decode steps. It imports no torch.

A new number is its line here and its measurement, an entry of `Generation.measured`: `RunningSequence.finish` makes
it (harness/engine/batch/running_sequence.py), or `RunningBatch.leave` (running.py beside it) from what a tracer
noted. Records, summaries, tables, the report page, the CSV, trackers and docs/results.md read this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from harness.terminal.tables import table

Value = float | None  # null where it was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number of a reply.

    `meaning`: a sentence about it, for docs/results.md. `unit`: what it counts. `over_turns` makes one number of those
    of a conversation's turns, `over_examples` one of a run's, both over what is known. `section`: of summary.json,
    under the key of the line; None where the summary works it out otherwise (harness/results/summary.py).
    `head`: above its column in the main table, None where it has none; `shown`: what the head means; `sort`: its name
    for `harness.report --sort`, the smallest first. `hides_zeros`: the column stays out where nothing but 0 is in it.
    `since_first`: every line has it; older lines lack the others.
    """

    meaning: str
    unit: Literal["tokens", "bytes", "share", "seconds", "nats"]
    over_turns: Callable[[list[float]], float] = fmean
    over_examples: Callable[[list[float]], float] = fmean
    section: str | None = "memory"
    head: str | None = None
    shown: str = ""
    sort: str | None = None
    hides_zeros: bool = False
    since_first: bool = False


MEASURES: dict[str, Measure] = {  # by key of a line of examples.jsonl
    "attended_prompt": Measure(
        meaning="Sealed prompt tokens that a selecting head read per step, mean over layers and steps.",
        unit="tokens",
        section=None,
        since_first=True,
    ),
    "attended_total": Measure(
        meaning="The same with the current and the generated tokens on top.",
        unit="tokens",
        section=None,
        since_first=True,
    ),
    "union_prompt": Measure(
        meaning="Sealed prompt tokens that a KV head read for all its query heads, each once; of every eighth step.",
        unit="tokens",
        section=None,
    ),
    "moved_bytes_per_step": Measure(
        meaning="Bytes copied between the tiers per step, counted where they are copied.",
        unit="bytes",
        head="moved",
        shown="bytes copied between the tiers per step, mean",
        sort="moved",
        hides_zeros=True,
        since_first=True,
    ),
    "from_disk_bytes_per_step": Measure(
        meaning="Those of the bytes moved that a file gave.",
        unit="bytes",
        head="from disk",
        shown="those of the bytes moved that a file gave",
        hides_zeros=True,
    ),
    "exposed_s_per_step": Measure(
        meaning=(
            "Seconds per step for which the model stood still until rows of another tier had come; null on a CPU, "
            "and where steps were captured, within which nobody reads a clock (`unclocked` of "
            "run.json)."
        ),
        unit="seconds",
        head="exposed",
        shown="time per step for which the model stood still until rows of another tier had come, mean",
        hides_zeros=True,
    ),
    "hidden_s_per_step": Measure(
        meaning="Seconds per step in which such rows came while the model computed; null likewise.",
        unit="seconds",
        head="hidden",
        shown="time per step in which rows of another tier came while the model computed, mean",
        hides_zeros=True,
    ),
    "hit_rate": Measure(
        meaning="Share of the rows asked of a method's cache on the device that were there; null without such a cache.",
        unit="share",
        head="hits",
        shown="share of the rows asked of a method's device cache that were there",
    ),
    "answer_nll": Measure(
        meaning="Cost of the most likely right answer, per token behind the seal; null where it has no such token.",
        unit="nats",
        section=None,
    ),
    "read_bytes_per_step": Measure(
        meaning="Bytes of keys, values and index that a step read, wherever they lie; null unless `trace=on`.",
        unit="bytes",
        head="read",
        shown="keys, values and index that a step read, mean (traced runs)",
        sort="read",
    ),
}


def over_known(reduce: Callable[[list[float]], float], values: Sequence[Value]) -> Value:
    """Null where no value is known."""
    known = [value for value in values if value is not None]
    return reduce(known) if known else None


def over_turns(turns: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """The measured numbers of a conversation, from those of its turns."""
    return {key: over_known(row.over_turns, [turn.get(key) for turn in turns]) for key, row in MEASURES.items()}


def over_examples(section: str, examples: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return what a section of summary.json holds of these measures."""
    rows = {key: row for key, row in MEASURES.items() if row.section == section}
    return {key: over_known(row.over_examples, [example.get(key) for example in examples]) for key, row in rows.items()}


def markdown() -> str:
    """The table of docs/results.md."""
    rows = [(f"`{key}`", row.unit, row.meaning) for key, row in MEASURES.items()]
    return table(("key of a line", "unit", "meaning"), rows)
