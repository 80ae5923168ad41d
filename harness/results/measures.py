"""The one table of the numbers that are measured in an answer's decode steps. It imports no torch.

A new number needs a line here, a line in docs/results.md, and its measurement: an entry of
`Generation.measured`, made by `RunningSequence.finish` (harness/engine/batch/running_sequence.py),
or by `RunningBatch.leave` (running.py there) from what a tracer noted. Records, summaries, tables,
the report page and the CSV read this table. The number of a conversation is the mean over
its turns, that of a run the mean over its examples.
"""

from __future__ import annotations

from typing import Any

from harness.results.fact import Fact, Unit, entry, mean


def measure(unit: Unit, *, in_memory: bool = True, **shown: Any) -> Fact:
    """Return a number that is measured for each reply. `in_memory`: True if its mean stands in the
    section `memory` of summary.json; otherwise harness/results/summary.py derives something else
    from it. `shown`: its column in the main table, as fields of a `Fact`."""
    section: Any = "memory" if in_memory else None
    return Fact(
        unit=unit, per="step", over_turns=mean, section=section, over_examples=entry(mean), **shown
    )


# by key of a line of examples.jsonl; docs/results.md says what each means
MEASURES: dict[str, Fact] = {
    "attended_prompt": measure("tokens", in_memory=False),
    "attended_total": measure("tokens", in_memory=False),
    **dict.fromkeys(
        ("attended_p10", "attended_p50", "attended_p90"), measure("tokens", in_memory=False)
    ),
    "capped_share": measure("share", in_memory=False),
    "union_prompt": measure("tokens", in_memory=False),
    "moved_bytes_per_step": measure(
        "bytes",
        head="moved",
        shown="bytes copied between the tiers per step, mean",
        hides_zeros=True,
    ),
    "from_disk_bytes_per_step": measure(
        "bytes",
        head="from disk",
        shown="those of the bytes moved that a file gave",
        hides_zeros=True,
    ),
    "exposed_s_per_step": measure(
        "seconds",
        head="exposed",
        shown="time per step for which the model stood still until rows of another tier had come, mean",
        hides_zeros=True,
    ),
    "hidden_s_per_step": measure(
        "seconds",
        head="hidden",
        shown="time per step in which rows of another tier came while the model computed, mean",
        hides_zeros=True,
    ),
    "hit_rate": measure(
        "share",
        head="hits",
        shown="share of the rows asked of a method's device cache that were there",
    ),
    "answer_nll": measure("nats", in_memory=False),
    "read_bytes_per_step": measure(
        "bytes", head="read", shown="keys, values and index that a step read, mean (traced runs)"
    ),
}
