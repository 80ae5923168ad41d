"""Wrong input as one clear sentence: which errors are the user's to mend, and how they are put."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException

from harness.catalogue import Entry
from harness.config import NESTED, Settings, SettingsError
from harness.plugins import spell, suggestion

GROUPS = ("method", "task", "model")


def is_known(error: BaseException) -> bool:
    """Whether the message was written for the user. ValueError and its kind are ours by convention, down to the
    libraries below us; memory and disk are the machine's."""
    return isinstance(error, (ValueError, NotImplementedError, OSError, MemoryError, HydraException)) or _no_memory(
        error
    )


def sentence(error: BaseException) -> str:
    """What to print in place of a traceback."""
    if _no_memory(error):
        return (
            f"Out of memory ({str(error).splitlines()[0] if str(error) else 'host'}): use shorter lengths, a smaller "
            "batch, prefill_chunk=2048, or dtype=bf16; `dry_run=true` predicts the bytes."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"The disk is full ({error.filename or 'results.root'}): free some space and run the same command again."
    return " ".join(str(error).split())


def _no_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text


def check_overrides(overrides: list[str], options: Mapping[str, list[str]]) -> None:
    """Refuse unknown methods, tasks and models by name, for every point of a sweep, before anything runs."""
    for override in parse(overrides):
        if override.key_or_group == "hydra/launcher" and override.value() != "basic":
            raise SettingsError(
                f"hydra/launcher={override.value()} cannot serve: the jobs of a sweep share a loaded model, Full's run "
                "and one table, and so run one after the other; leave it out."
            )
        for group in GROUPS:
            if override.key_or_group != group:
                continue
            for value in _values(override):
                if value not in options[group]:
                    raise SettingsError(f"There is no {group} {value!r}{suggestion(value, options[group])}")


def parse(overrides: list[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        words = re.split(r"\n", str(error))[0]
        raise SettingsError(f"Cannot read the command line: {words}; write key=value, lists as key=[1,2].") from error


def _values(override: Override) -> Iterator[str]:
    value = override.value()
    if override.is_choice_sweep():
        yield from (str(item) for item in override.sweep_iterator())
    elif value is not None:
        yield str(value)


def explain(error: HydraException, keys: list[str]) -> str:
    """Hydra's complaint about one override, with the nearest key or the type that was wanted."""
    if isinstance(error, MissingConfigException):
        return f"Cannot find {error.missing_cfg_file}{suggestion(str(error.missing_cfg_file), error.options or [])}"
    if isinstance(error, OverrideParseException):
        return f"Cannot read {error.override!r}: write key=value, lists as key=[1,2]."
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    if unknown:
        group, _, name = unknown[1].rpartition(".")
        beside = [key.rpartition(".")[2] for key in keys if group and key.rpartition(".")[0] == group]
        if beside:
            return f"There is no setting {unknown[1]}{suggestion(name, beside).replace('mean ', f'mean {group}.')}"
        return f"There is no setting {unknown[1]}{suggestion(unknown[1], [*keys, *GROUPS])}"
    merging = re.search(r"Error merging override (\S+)", str(error))
    if isinstance(error, ConfigCompositionException) and merging:
        return f"{merging[1]} has the wrong type{_wanted(merging[1].partition('=')[0])}."
    return sentence(error)


def default_keys(conf: Path, overrides: list[str]) -> list[str]:
    """Every key the command line could have set, given the groups that it names."""
    chosen = {"method": "pqcache", "task": "niah", "model": "smollm2"}
    for override in overrides:
        name, _, value = override.partition("=")
        if name in chosen:
            chosen[name] = value.partition(",")[0]
    keys = flatten(yaml.safe_load((conf / "config.yaml").read_text()))
    for group, name in chosen.items():
        file = conf / group / f"{name}.yaml"
        if file.is_file():
            keys += [f"{group}.{key}" for key in Entry(name, file).values()]
    return [key for key in keys if not key.startswith(("defaults", "hydra")) and "_target_" not in key]


def _wanted(key: str) -> str:
    """ ": it should be a whole number" for a setting whose type is known."""
    *parents, name = key.lstrip("+~").split(".")
    owner = NESTED.get(parents[0]) if parents else Settings
    hint = get_type_hints(owner).get(name) if owner else None
    return f": it should be {spell(hint)}" if hint else ""


def flatten(config: Any, prefix: str = "") -> list[str]:
    """All keys of a nested mapping, dotted."""
    if not isinstance(config, Mapping):
        return [prefix[:-1]]
    return [key for name, value in config.items() for key in flatten(value, f"{prefix}{name}.")] or [prefix[:-1]]
