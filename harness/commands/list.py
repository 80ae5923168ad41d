"""`python -m harness.list`: methods, tasks, models and experiments; `harness.list pqcache` shows a card."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from harness.config.catalogue import CONF, GROUPS, ConfigError, Entry, entries
from harness.config.errors import as_command
from harness.config.experiments import GROUP as EXPERIMENT
from harness.config.experiments import Experiment, experiments
from harness.config.keys import parameters_of, settings_text
from harness.config.plugins import suggestion
from harness.reports.papers import Published, published
from harness.terminal.arguments import typed
from harness.terminal.notices import say
from harness.terminal.tables import aligned

SETTINGS = "settings"
KINDS = (*GROUPS, EXPERIMENT)


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    folders = (CONF, *options.config_dir)
    known: dict[str, Mapping[str, Entry | Experiment]] = {
        group: {entry.name: entry for entry in entries(group, folders)} for group in GROUPS
    }
    known[EXPERIMENT] = experiments(folders)
    for word in options.what:
        say("\n".join(_told(word, known)))
    if not options.what:
        say("\n".join(_summary(known)))


def _told(word: str, known: Mapping[str, Mapping[str, Entry | Experiment]]) -> list[str]:
    """Return what a word of the command line asks for: the settings, all of a group, or the cards of a name."""
    group, equals, name = word.partition("=")
    if word == SETTINGS:
        return [settings_text().rstrip()]
    if word in known:
        return [_overview(word, list(known[word].values()))]
    if equals and group not in known:
        raise ConfigError(f"There is no kind {group!r}{suggestion(group, (*known, SETTINGS))}")
    places = {group: known[group]} if equals else known
    found = [(kind, entries[name or word]) for kind, entries in places.items() if (name or word) in entries]
    if not found:
        names = [*(known[group] if equals else (*known, SETTINGS, *(name for one in known.values() for name in one)))]
        raise ConfigError(f"There is no {group if equals else 'entry'} {name or word!r}{_near(name or word, names)}")
    return [_card(kind, one) if isinstance(one, Entry) else experiment_card(one) for kind, one in found]


def _near(word: str, names: Sequence[str]) -> str:
    near = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "; `python -m harness.list` shows what there is."


def _summary(known: Mapping[str, Mapping[str, Entry | Experiment]]) -> Iterator[str]:
    """Describe each method, task and model in a line; presets and experiments are counted."""
    for group in GROUPS:
        every = list(known[group].values())
        own = [entry for entry in every if not (isinstance(entry, Entry) and entry.base)]
        yield _overview(group, own).rstrip()
        if len(own) < len(every):
            yield f"  and {len(every) - len(own)} presets of these: `python -m harness.list {group}`"
        yield ""
    yield f"{EXPERIMENT}=\n  {len(known[EXPERIMENT])} figures and tables: `python -m harness.list {EXPERIMENT}`"
    yield "\nA card with all parameters: `python -m harness.list pqcache`. Settings: `python -m harness.list settings`."


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
    """Return the card of an experiment: what it reproduces and costs, what the paper says, what it runs."""
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
    """Return the numbers that are published for an experiment, or for the one that it is a variant of."""
    return published(one.name) or [row for base in one.bases for row in expected(base)]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.list", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"a name, one of {', '.join(KINDS)}, or {SETTINGS}")
    parser.add_argument("--config-dir", "-cd", type=typed, action="append", default=[], help="more yaml files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
