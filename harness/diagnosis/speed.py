"""Why a run is as fast or slow as it is, in sentences; the same rules as in quality.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from harness.diagnosis.subject import Subject
from harness.engine.step_parts import PARTS
from harness.results.alarms.times import sessions
from harness.terminal.tables import BYTES, SECONDS, digits, percent, with_unit

NAMES = {
    "select": "selecting tokens",
    "fetch": "gathering and moving them",
    "attend": "attention",
    "rest": "the rest of the method",
    "model": "the model around it",
}


def sentences(subject: Subject) -> Iterator[str]:
    if not subject.run.records or subject.run.status == "failed":
        return
    yield from _token(subject)
    yield from _parts(subject)
    yield from _moved(subject)
    yield from _seal(subject)
    yield from _path(subject.run.info)
    yield from _load(subject)


def _token(subject: Subject) -> Iterator[str]:
    row = subject.summary
    own = row["tpot_s"]["p50"]
    if own is None:
        yield f"The time per token was not measured: {_untimed(row)}."
        return
    theirs = subject.full_summary["tpot_s"]["p50"] if subject.full_summary else None
    told = f"A token takes {with_unit(own, SECONDS)} (median TPOT)"
    if subject.is_full or not theirs:
        yield told + "."
    else:
        yield f"{told}, {digits(own / theirs)} times Full's {with_unit(theirs, SECONDS)}."


def _untimed(row: Mapping[str, Any]) -> str:
    if row["simulated"]:
        return "the run shared its prefill, so run with shared_prefill=false"
    if row["traced"]:
        return "clocks inside the step cost time, so run with trace=off"
    return "no answer has a third token, so run with generation.force_length=true"


def _parts(subject: Subject) -> Iterator[str]:
    found = subject.traced
    if not found:
        yield "Where a step spends its time was not measured: run with trace=on."
        return
    parts = sorted(PARTS, key=lambda part: -found[f"{part}_s"])
    told = [f"{NAMES[part]} {percent(found[f'{part}_s'] / found['step_s'])} %" for part in parts]
    yield f"Of a decode step of {with_unit(found['step_s'], SECONDS)} (with trace=on), {', '.join(told)}."


def _moved(subject: Subject) -> Iterator[str]:
    keys = ("moved_bytes_per_step", "from_disk_bytes_per_step", "hit_rate")
    moved, read, hits = map(subject.summary["memory"].get, keys)
    if not moved:
        return
    told = f"A step moves {with_unit(moved, BYTES)} between host and device"
    if subject.summary["host_is_cpu"]:
        told += ", the same memory here, so no bus is paid for"
    if read:
        told += f"; files give {with_unit(read, BYTES)} of it"
    if hits is not None:
        told += f"; {percent(hits)} % of the rows asked for were on the device"
    yield f"{told}."


def _seal(subject: Subject) -> Iterator[str]:
    seals = [record.seal_s for record in subject.run.records if record.seal_s is not None]
    if not seals or subject.is_full:
        return
    told = f"Sealing a prompt takes {with_unit(median(seals), SECONDS)}"
    ttft = subject.summary["ttft_s"]["p50"]
    yield told + (f", beside a TTFT of {with_unit(ttft, SECONDS)}." if ttft else ".")


def _path(info: Mapping[str, Any]) -> Iterator[str]:
    if reason := info.get("plain_steps"):
        yield f"Steps were not captured: {str(reason).rstrip('.')}."
    if reason := info.get("own_forward"):
        yield f"The model ran its own forward, which takes more time between operations: {str(reason).rstrip('.')}."


def _load(subject: Subject) -> Iterator[str]:
    """As the caution above a table has it."""
    *_, last = own = sessions(subject.run)
    if not last.loads:
        yield "The load of the machine was not recorded."
        return
    told = " and ".join(f"{load:g} when it {what}" for load, what in zip(last.loads, ("began", "ended"), strict=False))
    yield f"The machine's load was {told}, on {last.cpus} CPUs; the run's own work accounts for {last.own}."
    if any(one.crowded for one in own):
        yield "Others used it as well, so its times mean little."
    elif subject.full and any(one.crowded for one in sessions(subject.full)):
        yield "Others used it while Full ran, so Full's times mean little."
