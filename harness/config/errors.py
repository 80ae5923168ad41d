"""Turns wrong input into one clear sentence; knows which errors are the user's to fix."""

from __future__ import annotations

import errno
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException

from evals.base import NO_DATA_ROOT
from harness.config.catalogue import not_yaml
from harness.config.plugins import spell, suggestion
from harness.config.settings import NESTED, Settings
from harness.terminal.control_characters import visible
from harness.terminal.notices import complain

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("evals", "harness", "kernels", "methods")


def is_known(error: BaseException) -> bool:
    """Whether the message was written for the user. ValueError and its kind are ours by convention, down to the
    libraries below us; memory and disk are the machine's."""
    kinds = (ValueError, NotImplementedError, OSError, MemoryError, HydraException, yaml.MarkedYAMLError)
    return isinstance(error, kinds) or is_memory(error)


def sentence(error: BaseException, data_root: str = "data.root=FOLDER") -> str:
    """What to print in place of a traceback. `data_root`: how the command names the folder of the data."""
    return visible(_sentence(error, data_root))


def _sentence(error: BaseException, data_root: str) -> str:
    if is_memory(error):
        return (
            f"Out of memory ({str(error).splitlines()[0] if str(error) else 'host'}): use shorter lengths, a smaller "
            "batch, prefill_chunk=2048, or dtype=bf16; `dry_run=true` predicts the bytes."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" ({error.filename})" if error.filename else ""
        return f"The disk is full{where}: free some space and run the same command again."
    if isinstance(error, yaml.MarkedYAMLError):
        return not_yaml(error)
    return " ".join(str(error).split()).replace(NO_DATA_ROOT, f"(none is set: {data_root} names one)")


def one_sentence(error: BaseException) -> str:
    """One sentence for any error; of one that nobody foresaw, its kind, the user's own line, and where the traceback
    lies."""
    notes: list[str] = getattr(error, "__notes__", [])  # a run that failed keeps the traceback in its folder
    line = own_line(error)
    if is_known(error):
        text = sentence(error)
        return f"{text.rstrip('.')} ({line}). {notes[0]}" if line and notes and isinstance(error, ValueError) else text
    where = notes[0] if notes else f"The traceback is in {_kept(error)}."
    return f"{type(error).__name__}: {sentence(error).rstrip('.')}{f' ({line})' * bool(line)}. {where}"


def exit_code(work: Callable[[], int | None]) -> int:
    """What a command exits with: the code of its work, 0 where that gives none. An error is said in one sentence; it
    gives 2 where it is the user's to fix, else 1."""
    try:
        return work() or 0
    except Exception as error:
        complain(one_sentence(error))
        return 2 if is_known(error) else 1


def own_line(error: BaseException) -> str | None:
    """The last line of the user's own code that was under way: of a plug-in from outside this project."""
    others = [*(ROOT / name for name in PACKAGES), *map(Path, {*sysconfig.get_paths().values(), sys.prefix})]
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(other) for other in others):
            found = f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}, line {frame.lineno}"
    return found


def _kept(error: BaseException) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="kv-harness-", suffix=".txt", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return file.name


def is_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, torch's on a CPU, or a GPU's."""
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text


def explain(error: HydraException) -> str:
    """Hydra's complaint about one override, with the type that was wanted."""
    if isinstance(error, MissingConfigException):
        return f"Cannot find {error.missing_cfg_file}{suggestion(str(error.missing_cfg_file), error.options or [])}"
    merging = re.search(r"Error merging override (\S+)", str(error))
    if isinstance(error, ConfigCompositionException) and merging:
        shown = merging[1].lstrip("+")
        key, _, value = shown.partition("=")
        return (
            f"{shown} has the wrong type{_share(key, value) or _wanted(key)}{_listed(key, value)}."
            if value
            else f"{key} is empty{_wanted(key)}."
        )
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return f"There is no setting {unknown[1]}{_near(unknown[1], error)}"
    return sentence(error)


def _near(key: str, error: BaseException) -> str:
    """What there is beside `key`, as OmegaConf knows it."""
    beside = getattr(error.__cause__, "parent_node", None) or ()
    return suggestion(key.rpartition(".")[2], [name for name in map(str, beside) if not name.startswith("_")])


def _listed(key: str, value: str) -> str:
    """How to write a single value where a list is wanted."""
    return f", as in {key}=[{value}]" if get_origin(_hint(key)) is list and not value.startswith("[") else ""


def _share(key: str, value: str) -> str:
    """For a percentage where a share may stand: with its point, for a whole 1 is one token."""
    percent, hint = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value), _hint(key)
    if not percent or float not in (hint, *get_args(hint)):
        return ""
    share = float(f"{float(percent[1]) / 100:g}")
    return f": write {share} for {percent[1]} %" if share <= 1 else ": a share is at most 1.0"


def _wanted(key: str) -> str:
    """ ": it should be a whole number" for a setting whose type is known."""
    if key in NESTED:
        return f": it holds settings, to be named one by one, as {key}.{fields(NESTED[key])[0].name}=VALUE"
    hint = _hint(key)
    return f": it should be {spell(hint)}" if hint else ""


def _hint(key: str) -> Any:
    """The type of a setting; None where it is not known."""
    *parents, name = key.split(".")
    owner = NESTED.get(parents[0]) if parents else Settings
    return get_type_hints(owner).get(name) if owner else None
