"""Experiments: yaml files in conf/experiment/ that stand for the words of a command line, each with a card.

Hydra composes them (`# @package _global_`); here they are read to be checked, and to be listed. A small variant names
another experiment in its `defaults` and changes what makes it slow. What several files share stands in one whose name
begins with `_`: it is a part of them, and no experiment of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.errors import HydraException

from harness.config.catalogue import (
    CONF,
    GROUPS,
    ConfigError,
    entries,
    facts_in,
    first_sentence,
    leading_comment,
    load,
    plain,
)
from harness.config.plugins import suggestion
from harness.config.settings import NESTED

GROUP = "experiment"
FACTS = ("paper", "model", "data", "grid", "cost", "published", "run", "small")  # lines of a card
_PACKAGE = "# @package _global_"


@dataclass(frozen=True)
class ExperimentFile:
    """Holds what one file chooses, sets and sweeps. Keys are dotted, as on the command line."""

    path: Path
    chosen: Mapping[str, str]  # group -> name, from `override /method: ...`
    values: Mapping[str, Any]
    grid: Mapping[str, str]  # hydra.sweeper.params, as written


@dataclass(frozen=True)
class Experiment:
    name: str
    file: Path
    folders: tuple[Path, ...] = (CONF,)

    @cached_property
    def files(self) -> list[ExperimentFile]:
        """The files of an experiment: those it builds on, then its own."""
        return [*(file for base in self.bases for file in base.files), _parsed(self.file, self._content)]

    @property
    def grid(self) -> dict[str, str]:
        return {key: values for file in self.files for key, values in file.grid.items()}

    def words(self) -> Iterator[tuple[Path, Override]]:
        """Yield what the files say, each with its file, in the order in which the last of two words for one key
        holds."""
        for file in self.files:
            for key, value in (*file.chosen.items(), *file.values.items()):
                said = f"{key}={plain(value)}"
                yield file.path, Override(OverrideType.CHANGE, key, ValueType.ELEMENT, value, input_line=said)
        paths = {key: file.path for file in self.files for key in file.grid}
        for key, values in self.grid.items():
            yield paths[key], _swept(paths[key], key, values)

    @cached_property
    def bases(self) -> list[Experiment]:
        """The experiments that its `defaults` name; the last says most, in Hydra as here."""
        named = [line for line in self._content.get("defaults", []) if isinstance(line, str) and line != "_self_"]
        known = _files(self.folders)
        for name in named:
            if name.removeprefix(f"/{GROUP}/") not in known:
                raise ConfigError(f"{self.file}: there is no {GROUP} {name!r}{suggestion(name, known)}")
        return [known[name.removeprefix(f"/{GROUP}/")] for name in named]

    @property
    def headline(self) -> str:
        """The first sentence of its card."""
        return first_sentence(line for line in self._comment if line)

    @property
    def facts(self) -> dict[str, str]:
        """The card, line by line: this file's words over those of its bases."""
        merged = {name: text for base in self.bases for name, text in base.facts.items()}
        merged |= facts_in(self._comment, FACTS)
        return {name: merged[name] for name in FACTS if name in merged}

    @property
    def command(self) -> str:
        """The command line that runs it."""
        sweep = "-m " if self.grid else ""
        return f"{self.facts.get('run') or 'python -m harness'} {sweep}+{GROUP}={self.name}"

    @cached_property
    def _content(self) -> dict[str, Any]:
        content = load(self.file) or {}
        if not isinstance(content, dict):
            raise ConfigError(f"{self.file} must hold keys and values, as a command line would set them.")
        if not self.file.read_text(encoding="utf-8").startswith(_PACKAGE):
            raise ConfigError(f"{self.file} must begin with the line `{_PACKAGE}`, or its keys would set nothing.")
        return content

    @property
    def _comment(self) -> list[str]:
        """The lines of its card, which follows the line that names the package."""
        return leading_comment(self.file)[1:]


def experiments(folders: Sequence[Path] = (CONF,)) -> dict[str, Experiment]:
    """Return the experiments by name; raise `NameTaken` where two folders hold one of the same name."""
    return {name: file for name, file in _files(folders).items() if not name.rpartition("/")[2].startswith("_")}


def _files(folders: Sequence[Path]) -> dict[str, Experiment]:
    """Return all experiments by name, and the parts that they share."""
    return {entry.name: Experiment(entry.name, entry.file, tuple(folders)) for entry in entries(GROUP, folders)}


def _parsed(file: Path, content: Mapping[str, Any]) -> ExperimentFile:
    overrides = [line for line in content.get("defaults", []) if isinstance(line, dict)]
    named = [(str(key), str(name)) for line in overrides for key, name in line.items()]
    chosen = {key.removeprefix("override").strip(" /"): name for key, name in named}
    if where := [key for key in chosen if key.startswith("hydra/")]:
        raise ConfigError(
            f"{file}: an experiment says what runs, not where: type {where[0]}={chosen[where[0]]} instead."
        )
    body = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    params = ((content.get("hydra") or {}).get("sweeper") or {}).get("params") or {}
    return ExperimentFile(file, chosen, dict(_dotted(body)), {str(key): str(values) for key, values in params.items()})


def _dotted(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values, one level deep: what method, task, model and the nested settings hold are
    values of their own."""
    for key, value in body.items():
        if isinstance(value, Mapping) and key in (*GROUPS, *NESTED):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield str(key), value


def _swept(file: Path, key: str, values: str) -> Override:
    try:
        return OverridesParser.create().parse_override(f"{key}={values}")
    except HydraException as error:
        raise ConfigError(f"{file}: cannot read {key}={values}: write the values as on a command line.") from error
