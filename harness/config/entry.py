"""Declares a setting once: all that is known of it besides its name, type and default.

The entry stands with its field in harness/config/settings.py, and `ENTRIES` there holds all of them.
conf/config.yaml, `--help`, docs/settings.md, the identity of a run, the names of rows in tables and the commands that
read some settings only are made from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from harness.config.values import Range

READ = "What a step may read"
RUN = "How a prompt runs"
MEASURED = "What is run and measured"
PICKED = "How tokens are picked"
FOLDERS = "Where data come from and runs go"
SHOWN = "Where else finished runs are shown"
TURNS = "Conversations of several turns"
# in the order of conf/config.yaml and of `--help`
SECTIONS = (READ, RUN, MEASURED, PICKED, FOLDERS, SHOWN, TURNS)
RARE_SECTIONS = (TURNS, SHOWN)  # left out of --help

SERVE, LM_EVAL, OBSERVE = "serve", "lm_eval", "observe"
BOTH = (SERVE, LM_EVAL)
ALL = (SERVE, LM_EVAL, OBSERVE)
DEFAULT = object()

# When a row of a report names the setting: never; if rows of the same method differ in it; also if it is not at its
# default and other rows differ in it; whenever it is not at its default.
Named = Literal["never", "among_namesakes", "if_unusual", "always"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Describe a setting. `meaning`, `section` and `neutral` are for each setting to say; the other
    fields have defaults that suit most settings."""

    meaning: str  # as `--help` shows it
    # one of SECTIONS; empty for a setting in a group, which has that of the group
    section: str = ""
    choices: Collection[str | None] = ()  # all values that it can have; empty if it is no choice
    within: Range | None = None
    is_path: bool = False  # a `~` in it becomes the user's home
    neutral: Any = DEFAULT  # the value of a run whose method has no use for it
    identifies: bool = True  # part of a run's identity: it changes an output or a measured cost
    after_prefill: bool = False  # jobs that share a prefill may differ in it
    one_table: bool = False  # runs that differ in it are never rows of one table
    named: Named = "if_unusual"
    read_by: tuple[str, ...] = ()  # commands that read it besides `python -m harness`


def setting(default: Any, meaning: str = "", section: str = "", **facts: Any) -> Any:
    """Return a field of a dataclass with its entry. `default`: a value, or a class (a group of settings, `list`) that
    is called for one. `facts`: further arguments of `Entry`."""
    metadata = {"entry": Entry(meaning=meaning, section=section, **facts)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


# a field that says what a step may read: jobs that differ in it may share a prefill
of_reading = partial(setting, section=READ, after_prefill=True, read_by=BOTH)


def entry_of(metadata: Mapping[str, Any]) -> Entry:
    """Return the entry in the metadata of a field that `setting` made."""
    entry: Entry = metadata["entry"]
    return entry
