"""The facts of an example and of running it: what the task says of it (`PreparedExample.facts`), and what its prefill
and decode took (`Transcript.facts`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.results.fact import Fact, entry, largest, total

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


def _served(_: str, values: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return what a server said of its answers, over all of them; null for runs of our own engine."""
    known = [value for value in values if value is not None]
    if not known:
        return {"served": None}

    def added(key: str) -> float | None:
        return total([value.get(key) for value in known])

    asked, hits = added("prefix_queries"), added("prefix_hits")
    return {
        "served": {
            "examples": len(known),
            "retries": added("retries"),
            "cached_tokens": added("cached_tokens"),
            "cache_share": largest([value.get("cache_share") for value in known]),
            "preemptions": added("preemptions"),
            "prefix_hits": hits / asked if asked and hits is not None else None,
        }
    }


def _of_server(title: str, records: Sequence[Any], config: Mapping[str, Any]) -> Iterator[str]:
    said = _served("served", [record["served"] for record in records])["served"]
    if said is None:
        return
    parts = [f"prompts are sent as {SENT[str((config.get('model') or {}).get('prompts'))]}"]
    if said["cache_share"] is not None:
        parts.append(f"at most {said['cache_share']:.0%} of its cache in use")
    if said["preemptions"]:
        parts.append(f"{said['preemptions']:.0f} preemptions")
    if said["prefix_hits"] is not None:
        parts.append(f"{said['prefix_hits']:.0%} of prompt tokens from its prefix cache")
    if said["retries"]:
        parts.append(f"{said['retries']} requests sent again")
    yield f"endpoint ({title}): {', '.join(parts)}"


SENT = {
    "ids": "our token ids",
    "text": "our text, which the server tokenises",
    "chat": "messages for the server's chat template",
}
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
    # what a server said of the example (harness/endpoint/runner.py), which its row is stamped for
    "served": Fact(
        unit="other",
        per="example",
        section="answers",
        over_examples=_served,
        note=_of_server,
        stamp=(
            "E",
            "endpoint: times are a client's; bytes, traffic and the seal are the server's and not seen",
        ),
    ),
    "turns": Fact(unit="other", per="example"),  # of a conversation, a reply each
    # what it belongs to, where examples are not independent
    "unit": Fact(unit="other", per="example"),
}
