"""Lists every key of the command line with its default and meaning, for `--help` and
docs/settings.md.

It is made from the entries and types in harness/config/settings.py and the comments of conf/. It
imports neither torch nor hydra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, get_type_hints

from harness.config.catalogue import CONF, GROUPS, Entry, entries, plain
from harness.config.entry import RARE_SECTIONS, SECTIONS
from harness.config.plugins import spell
from harness.config.settings import CHOICES, ENTRIES, NESTED, Settings
from harness.terminal.tables import aligned

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
    """Return the settings in the order of conf/config.yaml: by section."""
    defaults = Settings()
    rows = [_row(key, attrgetter(key)(defaults)) for key in ENTRIES]
    return sorted(rows, key=lambda row: SECTIONS.index(row.section))


def _row(key: str, default: object) -> Setting:
    entry = ENTRIES[key]
    if key in NESTED:
        return Setting(entry.section, key, "", "", entry.meaning)
    group, _, name = key.rpartition(".")
    hint = get_type_hints(NESTED[group] if group else Settings)[name]
    values = ", ".join(map(plain, entry.choices)) if entry.choices else spell(hint)
    return Setting(entry.section, key, plain(default), values, entry.meaning)


def parameters_of(entry: Entry) -> list[tuple[str, str]]:
    """Return `name=default` and the meaning of each parameter of a method, task or model."""
    return [(f"{name}={plain(value)}", comment) for name, value, comment in entry.parameters()]


def help_text(words: Sequence[str] = (), config_dirs: Sequence[Path] = ()) -> str:
    """Return what `--help` prints: the settings, and the parameters of those methods, tasks and
    models that the command line names."""
    found = {group: entries(group, (CONF, *config_dirs)) for group in GROUPS}
    parts = [
        _USAGE,
        "\n".join(_names(group, found[group]) for group in GROUPS),
        settings_text(leave_out=RARE_SECTIONS),
    ]
    for group, name in _named(words):
        if entry := found[group].get(name):
            rows = aligned((f"{group}.{given}", meaning) for given, meaning in parameters_of(entry))
            parts.append("\n".join([f"{group}={name}", *rows, ""]))
    return "\n".join([*parts, _FLAGS])


def _names(group: str, found: Mapping[str, Entry]) -> str:
    """Return one line with the names of a group; presets are counted, not named."""
    names = [name for name, entry in found.items() if entry.base is None]
    presets = (
        f" and {len(found) - len(names)} presets (harness.list {group})"
        if len(names) < len(found)
        else ""
    )
    return f"{group + '=':<8}{', '.join(names)}{presets}"


def _named(words: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [
        word.split("=", 1)
        for word in words
        if word.startswith(tuple(f"{group}=" for group in GROUPS))
    ]
    return [(group, name) for group, names in pairs for name in names.split(",")]


def settings_text(leave_out: Sequence[str] = ()) -> str:
    """Return the settings as text for a terminal; the titles of sections in `leave_out` are listed
    at the end."""
    lines = []
    for title, rows in sections():
        if title not in leave_out:
            lines += ["", title, *aligned((row.given, row.described) for row in rows)]
    if leave_out:
        lines += [
            "",
            f"More settings, with `python -m harness.list settings`: {', '.join(leave_out).lower()}",
        ]
    return "\n".join([*lines, ""])


def sections() -> Iterator[tuple[str, list[Setting]]]:
    shown = [row for row in settings() if row.values or row.meaning]
    return ((title, list(rows)) for title, rows in groupby(shown, key=lambda row: row.section))
