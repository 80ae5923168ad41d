"""The facts of an example and of running it: what the task says of it (`PreparedExample.facts`), and what its prefill
and decode took (`Transcript.facts`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.results.fact import Fact, entry, largest

# bytes; decode: seal and question too
PEAKS = ("prefill_device", "prefill_host", "decode_device", "decode_host")


def _peaks(_: str, values: Sequence[Mapping[str, int | None] | None]) -> dict[str, Any]:
    return {
        f"{name}_peak_bytes": largest([(peaks or {}).get(name) for peaks in values])
        for name in PEAKS
    }


def _cut(values: Sequence[int]) -> int:
    return sum(tokens > 0 for tokens in values)


def _prefills(values: Sequence[str | None]) -> int:
    return sum(other is None for other in values)


def _shared(title: str, records: Sequence[Any], _: Mapping[str, Any]) -> Iterator[str]:
    count = _prefills([record["prefilled_by"] for record in records])
    if count < len(records):
        yield f"questions=shared ({title}): {len(records)} questions on {count} prefills"


# depth, length ...
TASK = {"data": Fact(unit="other", required=True, over_turns=lambda turns: dict(turns[0]))}
TOLD = Fact(unit="other", per="example", required=True)
PEAK = Fact(
    unit="bytes", per="example", required=True, section="memory", over_examples=entry(largest)
)
EXAMPLES = {
    "device_peak_bytes": PEAK,
    "host_peak_bytes": PEAK,
    # the same of the prefill, and of all after it: PEAKS
    "peaks": Fact(unit="bytes", per="example", section="memory", over_examples=_peaks),
    "warnings": TOLD,
    "fidelity": TOLD,
    "prompt_ids": TOLD,
    # that left its context, by the task's own cut or by the setting too_long
    "cut_tokens": Fact(
        unit="examples",
        per="example",
        older=0,
        section="examples",
        over_examples=entry(_cut, "num_cut"),
    ),
    # id of whose prefill and seal it used; its clock began with its question
    "prefilled_by": Fact(
        unit="examples",
        per="example",
        section="answers",
        over_examples=entry(_prefills, "prefills"),
        note=_shared,
    ),
    "turns": Fact(unit="other", per="example"),  # of a conversation, a reply each
    # what it belongs to, where examples are not independent
    "unit": Fact(unit="other", per="example"),
}
