"""Lists every key of the command line with its default and meaning, for `--help` and
docs/settings.md.

It is made from the comments of conf/ and the types in harness/config/settings.py. It imports
neither torch nor hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

from harness.config.catalogue import CONF, GROUPS, Entry, entries, plain
from harness.config.plugins import spell
from harness.config.settings import CHOICES, NESTED, Settings
from harness.terminal.tables import aligned

_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?:.*? # *(?P<comment>.*))?")
EXAMPLES = """  python -m harness method=pqcache task=niah                one run, Full with it, a table at the end
  python -m harness -m method=full,pqcache budget=0.1,0.2   a sweep: every combination
  python -m harness -m +experiment=small/pqcache_fig9b      a paper's table or figure at a small size"""
_USAGE = f"""python -m harness [-m] [method=NAME] [task=NAME] [model=NAME] [KEY=VALUE ...]

{EXAMPLES}
  python -m harness method=pqcache --help                   this text with the parameters of PQCache
  python -m harness.list                                    what each method, task and model is
"""
WITHOUT_WORDS = f"""Name a method and a task, for example:

{EXAMPLES}

`python -m harness.list` describes methods, tasks and models; `python -m harness --help` lists the settings."""
_FLAGS = """Flags
  -m                sweep over values that commas separate
  --config-dir DIR  look for method/, task/, model/ and experiment/ there, too
  --cfg job         print the composed configuration, run nothing
  --version         print version and commit
  --hydra-help      Hydra's own flags"""

RARE_SECTIONS = ("Conversations of several turns", "Where else finished runs are shown")  # left out of --help


class Setting(NamedTuple):
    section: str
    key: str
    default: str
    values: str  # what it may be; empty where `key` is a group of keys, like `windows`
    meaning: str

    @property
    def given(self) -> str:
        """The setting with its default, as the command line writes it; a group of keys has no
        default."""
        return f"{self.key}={self.default}" if self.values else self.key

    @property
    def described(self) -> str:
        """The meaning, after the values that can be chosen, if it is a choice."""
        return f"({self.values}) {self.meaning}" if self.key in CHOICES else self.meaning


def settings() -> list[Setting]:
    """Return the settings of conf/config.yaml, in its order."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    body = text.partition("\n\n")[2].partition("\nhydra:")[0]
    return list(_settings(body.splitlines(), yaml.safe_load(text)))


def _settings(lines: Iterable[str], config: dict[str, Any]) -> Iterator[Setting]:
    section, group, hints = "", "", get_type_hints(Settings)
    for line in lines:
        if line.startswith("#"):
            section = line.removeprefix("#").strip()
        elif match := _LINE.match(line):
            name, comment = match["name"], match["comment"] or ""
            if match["indent"]:
                key, hint = f"{group}.{name}", get_type_hints(NESTED[group])[name]
                yield Setting(section, key, plain(config[group][name]), _values(key, hint), comment)
            elif name in NESTED:
                group = name
                yield Setting(section, group, "", "", comment)
            else:
                yield Setting(section, name, plain(config[name]), _values(name, hints[name]), comment)


def _values(key: str, hint: Any) -> str:
    return ", ".join(map(plain, CHOICES[key])) if key in CHOICES else spell(hint)


def parameters_of(entry: Entry) -> list[tuple[str, str]]:
    """Return `name=default` and the meaning of each parameter of a method, task or model."""
    return [(f"{name}={plain(value)}", comment) for name, value, comment in entry.parameters()]


def help_text(words: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> str:
    """Return what `--help` prints: the settings, and the parameters of those methods, tasks and
    models that the command line names."""
    found = {group: entries(group, (CONF, *config_dirs)) for group in GROUPS}
    parts = [_USAGE, "\n".join(_names(group, found[group]) for group in GROUPS), settings_text(leave_out=RARE_SECTIONS)]
    for group, name in _named(words):
        for entry in (entry for entry in found[group] if entry.name == name):
            rows = aligned((f"{group}.{given}", meaning) for given, meaning in parameters_of(entry))
            parts.append("\n".join([f"{group}={name}", *rows, ""]))
    return "\n".join([*parts, _FLAGS])


def _names(group: str, found: Sequence[Entry]) -> str:
    """Return one line with the names of a group; presets are counted, not named."""
    names = [entry.name for entry in found if entry.base is None]
    presets = f" and {len(found) - len(names)} presets (harness.list {group})" if len(names) < len(found) else ""
    return f"{group + '=':<8}{', '.join(names)}{presets}"


def _named(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [word.split("=", 1) for word in words if word.startswith(tuple(f"{group}=" for group in GROUPS))]
    return [(group, name) for group, names in pairs for name in names.split(",")]


def settings_text(leave_out: Sequence[str] = ()) -> str:
    """Return the settings as text for a terminal; the titles of sections in `leave_out` are listed
    at the end."""
    lines = []
    for title, rows in sections():
        if title not in leave_out:
            lines += ["", title, *aligned((row.given, row.described) for row in rows)]
    if leave_out:
        lines += ["", f"More settings, with `python -m harness.list settings`: {', '.join(leave_out).lower()}"]
    return "\n".join([*lines, ""])


def sections() -> Iterator[tuple[str, list[Setting]]]:
    shown = [row for row in settings() if row.values or row.meaning]
    return ((title, list(rows)) for title, rows in groupby(shown, key=lambda row: row.section))
