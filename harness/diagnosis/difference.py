"""What differs between two stored runs, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.config.catalogue import GROUPS, plain
from harness.config.nested import Flat, flatten
from harness.config.plugins import TARGET
from harness.config.settings import WITHOUT_EFFECT, recorded_defaults
from harness.results.identity import PARTS, word
from harness.results.run_folder import StoredRun

PROMPTS = "prompts"  # they differ wherever task or model do


def apart(one: StoredRun, other: StoredRun) -> list[str]:
    """Settings with both values, then code and versions; of two methods, tasks or models, their names alone."""
    ours, theirs = _values(one), _values(other)
    replaced = [kind for kind in GROUPS if ours.get(f"{kind}.{TARGET}") != theirs.get(f"{kind}.{TARGET}")]
    found = [f"{kind} ({_name(one, kind)} | {_name(other, kind)})" for kind in replaced]
    for key in ours | theirs:
        if key.partition(".")[0] not in replaced and _counts(key, one, other) and ours.get(key) != theirs.get(key):
            found.append(f"{key} ({plain(ours.get(key))} | {plain(theirs.get(key))})")
    return [*found, *(part for part in _parts(one, other) if not found or part != word(PROMPTS))]


def _values(run: StoredRun) -> Flat:
    """Its configuration without what changes no result; of an older run, later settings at their defaults."""
    own = flatten(recorded_defaults()) | flatten(run.config)
    return {key: value for key, value in own.items() if not {key, key.partition(".")[0]} & set(WITHOUT_EFFECT)}


def _counts(key: str, *runs: StoredRun) -> bool:
    """A parameter that only one of them has came later, and was at its default unless that one's identity names it."""
    lacking = [run for run in runs if key.partition(".")[0] in GROUPS and key not in flatten(run.config)]
    return not lacking or any(key in flatten(_identity(run)) for run in runs)


def _parts(one: StoredRun, other: StoredRun) -> Iterator[str]:
    ours, theirs = flatten(_identity(one)), flatten(_identity(other))
    for key in ours:
        if (key in PARTS or key.startswith("code.")) and key in theirs and ours[key] != theirs[key]:
            yield word(key)


def _identity(run: StoredRun) -> Mapping[str, Any]:
    return run.info.get("identity") or {}


def _name(run: StoredRun, kind: str) -> str:
    """As it was typed, else the module's."""
    module = str((run.config.get(kind) or {}).get(TARGET, "none")).split(".")
    return str((run.info.get("presets") or {}).get(kind) or module[-2 if len(module) > 1 else 0])
