"""Whether run.json, config.yaml and lines can be what a run wrote, for those that no checksum covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from evals.shapes import Shape, misfit
from harness.config.catalogue import GROUPS
from harness.config.settings import Settings
from harness.results.files import RunLine
from harness.results.measures import MEASURES
from harness.results.records import KV, MEASURED, PEAKS, Record, RecordError
from methods.tiers.tier import TIERS, bytes_key

WHOLE, NUMBER, TEXT, TIME = "a whole number", "a number", "text", "a time with its zone"
MACHINE = {"cpu": TEXT, "device_id": TEXT, "device_name": TEXT, "cpus_usable": WHOLE, "threads": WHOLE}
PROVENANCE = {
    "git": {"commit": TEXT},
    "versions": {"torch": TEXT},
    "machine": MACHINE | {"load_average": [NUMBER]},
    "process": {"host": TEXT, "pid": WHOLE},
}
SESSION = {"status": TEXT, "started": TIME, "ended": TIME, "load_average_ended": [NUMBER], "provenance": PROVENANCE}
SCORED = {"task_version": TEXT, "mean": NUMBER}
INFO = SESSION | {  # what is read of run.json, and what it is
    "earlier": [SESSION],
    "identity": {"code": {}},
    **dict.fromkeys(("identity_sha256", "method", "task"), TEXT),
    "presets": dict.fromkeys(GROUPS, TEXT),
    "task_info": {"metric": TEXT, "chance": NUMBER},
    **dict.fromkeys(("num_expected", "began_with"), WHOLE),
    "prepare_s": NUMBER,
    "backends": {},
    "measured": {},
    "budget_use": {"windows": {}},
    "rescored": {"first": SCORED, "present": SCORED, "changed": WHOLE, "at": TIME},
}
KINDS: Mapping[str, Shape] = {  # the kinds of a record's fields, as they are annotated
    "int": WHOLE, "float": NUMBER, "bool": "true or false", "str": TEXT, "list[int]": [WHOLE], "list[float]": [NUMBER],
    "list[str]": [TEXT], "dict[str, Any]": {}, "dict[str, int | None]": dict.fromkeys(PEAKS, WHOLE),
    "list[Reply]": [{}],
}  # fmt: skip
RECORD = {
    **{
        one.name: KINDS[str(one.type).removesuffix(" | None")]
        for one in fields(Record)
        if one.name not in (KV, MEASURED)
    },
    "trace": {"parts_s": {}, "step_s": NUMBER, "steps": WHOLE},
    **dict.fromkeys(map(bytes_key, TIERS), WHOLE),
    **dict.fromkeys(MEASURES, NUMBER),
}


def check_info(info: Mapping[str, Any], path: Path) -> None:
    if "status" not in info:
        raise RecordError(f"{path} holds no status, which every run writes")
    _check(info, INFO, str(path))


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Against the kinds of values that settings have today: an older run may lack some, and have others."""
    _check(config, _kind(asdict(Settings())) | {group: {} for group in GROUPS}, str(path))


def check_line(line: RunLine) -> None:
    """A line of examples.jsonl or rescored.jsonl."""
    _check(line.plain, RECORD | {"turns": [RECORD]}, line.where)


def _kind(usual: Any) -> Shape:
    if isinstance(usual, Mapping):
        return {key: _kind(value) for key, value in usual.items()}
    if isinstance(usual, bool):
        return "true or false"
    if isinstance(usual, (int, float)):
        return NUMBER
    return [] if isinstance(usual, list) else f"{TEXT} or {NUMBER}"


def _check(value: Mapping[str, Any], shape: Mapping[str, Shape], where: str) -> None:
    """Raises `RecordError` where something is of another kind than a run writes."""
    if wrong := misfit(value, _optional(shape)):
        raise RecordError(f"{where} {wrong}: no run writes that")


def _optional(shape: Shape) -> Shape:
    """The same with keys that may all be lacking or null."""
    if isinstance(shape, list):
        return [_optional(part) for part in shape]
    return {f"{key}?": _optional(part) for key, part in shape.items()} if isinstance(shape, Mapping) else shape
