"""`python -m harness.list`: all methods, tasks, models and experiments; `method=pqcache` behind it shows one card."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence

from harness.config.catalogue import CONF, GROUPS, ConfigError, Entry, entries
from harness.config.errors import as_command
from harness.config.experiments import GROUP as EXPERIMENT
from harness.config.experiments import Experiment, experiments
from harness.config.keys import parameters_of, settings_text
from harness.config.plugins import suggestion
from harness.reports.papers import Published, published
from harness.terminal.notices import say
from harness.terminal.paths import typed
from harness.terminal.tables import aligned

SETTINGS = "settings"
KINDS = (*GROUPS, EXPERIMENT)


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    folders = (CONF, *options.config_dir)
    for asked in options.what:
        if (group := asked.partition("=")[0]) not in (*KINDS, SETTINGS):
            raise ConfigError(f"There is no kind {asked!r}{suggestion(group, (*KINDS, SETTINGS))}")
    for asked in options.what or KINDS:
        group, _, name = asked.partition("=")
        if group == SETTINGS:
            say(settings_text().rstrip())
            continue
        known = experiments(folders) if group == EXPERIMENT else {one.name: one for one in entries(group, folders)}
        if name and name not in known:
            raise ConfigError(f"There is no {group} {name!r}{suggestion(name, known)}")
        say(_told(group, known, name))


def _told(group: str, found: Mapping[str, Entry] | Mapping[str, Experiment], name: str) -> str:
    """All there are, or the card of one."""
    if not name:
        return _overview(group, list(found.values()))
    one = found[name]
    return _card(group, one) if isinstance(one, Entry) else experiment_card(one)


def _overview(group: str, found: Sequence[Entry | Experiment]) -> str:
    width = max(len(entry.name) for entry in found)
    return "\n".join([f"{group}=", *(f"  {entry.name:<{width}}  {entry.headline}" for entry in found), ""])


def _card(group: str, entry: Entry) -> str:
    facts = aligned((_words(name), text) for name, text in entry.facts().items())
    parameters = aligned((f"{group}.{given}", meaning) for given, meaning in parameters_of(entry))
    parts = [f"{group}={entry.name}", *([entry.headline] if entry.base else []), "", entry.card(), ""]
    parts += ["Card", *facts, ""] if facts else []
    return "\n".join([*parts, "Parameters", *(parameters or ["  (no parameters)"]), ""])


def experiment_card(one: Experiment) -> str:
    """What it reproduces and costs, what the paper says, what it runs."""
    numbers = [f"  {row.said}" for row in expected(one)]
    grid = aligned((key.lstrip("+"), values) for key, values in one.grid.items())
    parts = [
        f"{EXPERIMENT}={one.name}",
        one.headline,
        "",
        *aligned(one.facts.items()),
        "",
        "Command",
        f"  {one.command}",
    ]
    parts += ["", "Grid", *grid] if grid else []
    parts += ["", "Published", *numbers] if numbers else []
    return "\n".join([*parts, "", "File", f"  {one.file}", ""])


def expected(one: Experiment) -> list[Published]:
    """What is published for it, or for the experiment that it is a variant of."""
    return published(one.name) or [row for base in one.bases for row in expected(base)]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.list", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"{SETTINGS}, or {', '.join(KINDS)}: =NAME for a card")
    parser.add_argument("--config-dir", "-cd", type=typed, action="append", default=[], help="more yaml files")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program, not with a traceback
    sys.exit(main())
