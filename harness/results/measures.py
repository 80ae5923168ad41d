"""The one table of numbers that are measured of an answer's decode steps. It imports no torch.

A new number is its line here, its line in docs/results.md, and its measurement, an entry of `Generation.measured`:
`RunningSequence.finish` makes it (harness/engine/batch/running_sequence.py), or `RunningBatch.leave` (running.py
there) from what a tracer noted. Records, summaries, tables, the report page, the CSV and trackers read this table. A
number of a conversation is the mean over its turns, one of a run the mean over its examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

Value = float | None  # null where it was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Describe a number of a reply.

    `unit`: what it counts. `in_memory`: whether it stands in the section `memory` of summary.json; otherwise the
    summary works it out (harness/results/summary.py). `head`: above its column in the main table, None where it has
    none; `shown`: what the head means. `hides_zeros`: the column stays out where nothing but 0 is in it.
    """

    unit: Literal["tokens", "bytes", "share", "seconds", "nats"]
    in_memory: bool = True
    head: str | None = None
    shown: str = ""
    hides_zeros: bool = False


MEASURES: dict[str, Measure] = {  # by key of a line of examples.jsonl; docs/results.md says what each means
    "attended_prompt": Measure(unit="tokens", in_memory=False),
    "attended_total": Measure(unit="tokens", in_memory=False),
    "union_prompt": Measure(unit="tokens", in_memory=False),
    "moved_bytes_per_step": Measure(
        unit="bytes",
        head="moved",
        shown="bytes copied between the tiers per step, mean",
        hides_zeros=True,
    ),
    "from_disk_bytes_per_step": Measure(
        unit="bytes", head="from disk", shown="those of the bytes moved that a file gave", hides_zeros=True
    ),
    "exposed_s_per_step": Measure(
        unit="seconds",
        head="exposed",
        shown="time per step for which the model stood still until rows of another tier had come, mean",
        hides_zeros=True,
    ),
    "hidden_s_per_step": Measure(
        unit="seconds",
        head="hidden",
        shown="time per step in which rows of another tier came while the model computed, mean",
        hides_zeros=True,
    ),
    "hit_rate": Measure(
        unit="share", head="hits", shown="share of the rows asked of a method's device cache that were there"
    ),
    "answer_nll": Measure(unit="nats", in_memory=False),
    "read_bytes_per_step": Measure(
        unit="bytes", head="read", shown="keys, values and index that a step read, mean (traced runs)"
    ),
}


def over_known(reduce: Callable[[list[float]], float], values: Sequence[Value]) -> Value:
    """Return one number for those values that are known, null where none is."""
    known = [value for value in values if value is not None]
    return reduce(known) if known else None


def means(measured: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return the mean of each measure over turns or examples, as far as it is known."""
    return {key: over_known(fmean, [numbers.get(key) for numbers in measured]) for key in MEASURES}
