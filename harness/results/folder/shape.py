"""Whether run.json, config.yaml and lines can be what a run wrote, for those that no checksum covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.config.catalogue import GROUPS
from harness.config.settings import Settings
from harness.results.files import Line
from harness.results.measures import MEASURES
from harness.results.records import KV, MEASURED, PEAKS, Record, RecordError
from methods.tiers.tier import TIERS, bytes_key


class _Time:
    """ISO 8601, with its zone."""


NUMBER = (int, float)
MACHINE = {"cpu": str, "cpus_usable": int, "threads": int, "load_average": [NUMBER], "device_id": str}
PROVENANCE = {
    "git": {"commit": str},
    "versions": {"torch": str},
    "machine": MACHINE | {"device_name": str},
    "process": {"host": str, "pid": int},
}
SESSION: dict[str, Any] = {
    "status": str, "started": _Time, "ended": _Time, "load_average_ended": [NUMBER], "provenance": PROVENANCE,
}  # fmt: skip
SCORED = {"task_version": str, "mean": NUMBER}
# What is read of run.json, and what it is; each may be lacking or null.
INFO: dict[str, Any] = SESSION | {
    "earlier": [SESSION],
    "identity": {"code": {}},
    "identity_sha256": str,
    "method": str,
    "task": str,
    "presets": {"method": str, "task": str, "model": str},
    "task_info": {"metric": str, "chance": NUMBER},
    "num_expected": int,
    "began_with": int,
    "prepare_s": NUMBER,
    "backends": {},
    "budget_use": {"windows": {}},
    "measured": {},
    "rescored": {"first": SCORED, "present": SCORED, "changed": int, "at": _Time},
}

# the kinds of a record's fields, as they are annotated
KINDS: dict[str, Any] = {
    "int": int, "float": NUMBER, "bool": bool, "str": str, "list[int]": [int], "list[float]": [NUMBER],
    "list[str]": [str], "dict[str, Any]": {}, "dict[str, int | None]": dict.fromkeys(PEAKS, int), "list[Reply]": [{}],
}  # fmt: skip
RECORD = {
    field.name: KINDS[str(field.type).removesuffix(" | None")]
    for field in fields(Record)
    if field.name not in (KV, MEASURED)
} | {
    "trace": {"parts_s": {}, "step_s": NUMBER, "steps": int},
    **{bytes_key(tier): int for tier in TIERS},
    **dict.fromkeys(MEASURES, NUMBER),
}


def check_info(info: Mapping[str, Any], path: Path) -> None:
    if "status" not in info:
        raise RecordError(f"{path} holds no status, which every run writes")
    _check(info, INFO, str(path), "")


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Against the kinds of values that settings have today: an older run may lack some, and have others."""
    groups: dict[str, Any] = {kind: {} for kind in GROUPS}
    _check(config, {key: _kind(value) for key, value in asdict(Settings()).items()} | groups, str(path), "")


def check_line(line: Line) -> None:
    """A line of examples.jsonl or rescored.jsonl."""
    _check(line.plain, RECORD | {"turns": [RECORD]}, line.where, "")


def _kind(usual: Any) -> Any:
    if isinstance(usual, Mapping):
        return {key: _kind(value) for key, value in usual.items()}
    if isinstance(usual, bool):
        return bool
    if isinstance(usual, NUMBER):
        return NUMBER
    return [object] if isinstance(usual, list) else (str, *NUMBER)


def _check(value: Any, kind: Any, where: str, key: str) -> None:
    """Raises `RecordError` where a value is of another kind than a run writes; null is of every kind."""
    if value is None:
        return
    if isinstance(kind, Mapping) and isinstance(value, Mapping):
        for name in value.keys() & kind.keys():
            _check(value[name], kind[name], where, f"{key}.{name}".removeprefix("."))
    elif isinstance(kind, list) and isinstance(value, list):
        for part in value:
            _check(part, kind[0], where, key)
    elif not _is(value, kind):
        raise RecordError(f"{where}: {key} is {str(value)[:40]!r}, which no run writes")


def _is(value: Any, kind: Any) -> bool:
    if kind is _Time:
        try:
            return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
        except ValueError:
            return False
    if isinstance(kind, (Mapping, list)):
        return False
    return isinstance(value, kind) and (kind is object or kind is bool or not isinstance(value, bool))
