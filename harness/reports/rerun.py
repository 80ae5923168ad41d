"""Builds the command line that makes a row of a report again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from harness.config.catalogue import GROUPS, entries, flatten, plain
from harness.config.plugins import TARGET
from harness.config.settings import WITHOUT_EFFECT, recorded_defaults
from harness.results.run_folder import StoredRun

BARE = re.compile(r"[\w./+-]+")  # what Hydra reads as one word


def command(run: StoredRun) -> str:
    """Return the command line that makes this run again: method, task and model as they were typed,
    then every key that is not at its default. For a plug-in of the user's own it contains
    `--config-dir DIR`, where DIR has to be filled in, because a run does not record that folder."""
    presets = {kind: _preset(run, kind) for kind in GROUPS}
    threads = run.config.get("threads")  # a setting of older runs
    words = [f"OMP_NUM_THREADS={threads}"] * bool(threads) + ["python", "-m", "harness"]
    if None in presets.values():
        words += ["--config-dir", "DIR"]
    for kind, preset in presets.items():
        name, usual = preset or (_typed(run, kind), {})
        mine = run.config.get(kind) or {}
        # a server's address, which no folder of a run holds
        words += [f"{kind}={name}", *["model.url=URL"] * ("url" in {*usual} - {*mine})]
        words += _changed(mine, usual, f"{kind}.")
    return shlex.join(
        [
            *words,
            *_changed(_settings(run), flatten(recorded_defaults(str(run.config.get("device"))))),
        ]
    )


def _preset(run: StoredRun, kind: str) -> tuple[str, dict[str, Any]] | None:
    """Return name and values of the yaml file in conf/ that the run was started with; for an older
    run, which did not record it, the first file with the same class. None if there is no such
    file."""
    target = (run.config.get(kind) or {}).get(TARGET)
    same = [(name, values) for name, values in _presets(kind) if values.get(TARGET) == target]
    named = [(name, values) for name, values in same if name == _typed(run, kind)]
    return next(iter([*named, *same]), None)


@cache
def _presets(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Return name and values of every yaml file of a group; cached, because each row asks for
    them."""
    return [(name, entry.values()) for name, entry in entries(kind).items()]


def _typed(run: StoredRun, kind: str) -> str:
    module = str((run.config.get(kind) or {}).get(TARGET, kind)).split(".")
    return str((run.info.get("presets") or {}).get(kind) or module[-2 if len(module) > 1 else 0])


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return the settings that a command line has to repeat: those that affect the result, and the
    folder of the data. A budget of null is left out, because only Full has it."""
    known = recorded_defaults()
    kept = flatten(
        {
            key: value
            for key, value in run.config.items()
            if key in known and (key not in WITHOUT_EFFECT or key == "data")
        }
    )
    return {key: value for key, value in kept.items() if (key, value) != ("budget", None)}


def _changed(mine: Mapping[str, Any], usual: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in mine.items():
        same = key in usual and type(value) is type(usual[key]) and value == usual[key]
        if key != TARGET and not same:
            yield f"{prefix}{key}={spelled(value)}"


def spelled(value: Any) -> str:
    """Return a value as text that Hydra reads back as the same value: 512 is a number, "512" a
    string."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{spelled(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return plain(value)
    if not isinstance(value, str) or (BARE.fullmatch(value) and not _is_other(value)):
        return str(value)
    # or OmegaConf puts in another value, as of ${oc.env:HOME}
    literal = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', literal)
    return '"' + re.sub(r"(\\+)$", r"\1\1", escaped) + '"'


def _is_other(text: str) -> bool:
    """Return True if Hydra would read the bare word as a number, a truth value or null, not as
    text."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return text.lower() in ("null", "true", "false", "nan", "inf")
    return True
