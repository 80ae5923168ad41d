"""The one table of the numbers that are measured in an answer's decode steps. It imports no torch.

A new number needs a line here, a line in docs/results.md, and its measurement: an entry of
`Generation.measured`, made by `RunningSequence.finish` (harness/engine/batch/running_sequence.py),
or by `RunningBatch.leave` (running.py there) from what a tracer noted. Records, summaries, tables,
the report page and the CSV read this table. The number of a conversation is the mean over
its turns, that of a run the mean over its examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

Value = float | None  # null where it was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Describes a number that is measured for each reply.

    `unit`: the unit it is stored in. `in_memory`: True if its mean stands in the section `memory`
    of summary.json; otherwise harness/results/summary.py derives something else from it. `head`:
    the head of its column in the main table, None without a column; `shown`: what the head means.
    `hides_zeros`: the column is left out if it holds only zeros.
    """

    unit: Literal["tokens", "bytes", "share", "seconds", "nats"]
    in_memory: bool = True
    head: str | None = None
    shown: str = ""
    hides_zeros: bool = False


MEASURES: dict[str, Measure] = {  # by key of a line of examples.jsonl; docs/results.md says what each means
    "attended_prompt": Measure(unit="tokens", in_memory=False),
    "attended_total": Measure(unit="tokens", in_memory=False),
    **dict.fromkeys(("attended_p10", "attended_p50", "attended_p90"), Measure(unit="tokens", in_memory=False)),
    "capped_share": Measure(unit="share", in_memory=False),
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
    """Apply `reduce` to the values that are not None; return None if there are none."""
    known = [value for value in values if value is not None]
    return reduce(known) if known else None


def means(measured: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return the mean of each measure of `MEASURES` over turns or examples, ignoring unknown
    values."""
    return {key: over_known(fmean, [numbers.get(key) for numbers in measured]) for key in MEASURES}
