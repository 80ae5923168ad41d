"""What can be named on the command line: the yaml files of conf/ and of `--config-dir`. Imports no plug-in."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("method", "task", "model")


@dataclass(frozen=True, slots=True)
class Entry:
    """One yaml file of a group."""

    name: str
    file: Path

    @property
    def headline(self) -> str:
        """The file's first comment line."""
        first = self.file.read_text(encoding="utf-8").partition("\n")[0]
        return first.removeprefix("#").strip()

    def parameters(self) -> list[tuple[str, Any, str]]:
        """Name, default, and the comment behind it, in the file's order."""
        text = self.file.read_text(encoding="utf-8")
        values = {key: value for key, value in yaml.safe_load(text).items() if key not in ("_target_", "defaults")}
        lines = {line.partition(":")[0]: line for line in text.splitlines() if line[:1].isidentifier()}
        return [(key, value, _comment(lines.get(key, ""))) for key, value in values.items()]

    @property
    def target(self) -> str | None:
        target: str | None = yaml.safe_load(self.file.read_text(encoding="utf-8")).get("_target_")
        return target

    def card(self) -> str:
        """Docstring of the module that defines the plug-in, read without importing it."""
        spec = find_spec(str(self.target).rpartition(".")[0]) if self.target else None
        if spec is None or spec.origin is None:
            return ""
        return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def entries(group: str, folders: Sequence[Path] = (CONF,)) -> list[Entry]:
    found = {
        file.stem: Entry(file.stem, file) for folder in folders for file in sorted((folder / group).glob("*.yaml"))
    }
    return [found[name] for name in sorted(found)]


def names(group: str, arguments: Sequence[str] = ()) -> list[str]:
    """What `group` may be, with `--config-dir` (-cd) of the command line looked at too."""
    return [entry.name for entry in entries(group, (CONF, *config_dirs(arguments)))]


def config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Values of --config-dir, in any of argparse's spellings."""
    found = []
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            found.append(Path(value if equals else [*arguments, ""][place + 1]))
    return found


def _comment(line: str) -> str:
    return line.partition(" #")[2].strip()
