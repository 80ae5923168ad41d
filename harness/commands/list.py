"""`python -m harness.list`: methods, tasks, models and experiments; `harness.list pqcache` shows a card."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from harness.config.catalogue import (
    CONF,
    EXPERIMENT,
    GROUPS,
    ConfigError,
    Entry,
    Experiment,
    entries,
    experiments,
)
from harness.config.errors import as_command
from harness.config.keys import parameters_of, settings_text
from harness.reports.papers import Published, published
from harness.terminal.arguments import Parser
from harness.terminal.notices import say
from harness.terminal.tables import aligned

SETTINGS = "settings"
ByGroup = Mapping[str, Mapping[str, Entry | Experiment]]  # by group and name


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("list", __doc__)
    kinds = ", ".join((*GROUPS, EXPERIMENT))
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help=f"a name, one of {kinds}, or {SETTINGS}"
    )
    parser.config_dirs()
    options = parser.parse_args(arguments)
    folders = (CONF, *options.config_dir)
    known: dict[str, Mapping[str, Entry | Experiment]] = {
        group: entries(group, folders) for group in GROUPS
    }
    known[EXPERIMENT] = experiments(folders)
    for word in options.what:
        say("\n".join(_answer(word, known)))
    if not options.what:
        say("\n".join(_summary(known)))


def _answer(word: str, known: ByGroup) -> list[str]:
    """Return what a word of the command line asks for: the list of settings, the list of a group
    (`method`), or the card of each thing with that name."""
    if word == SETTINGS:
        return [settings_text().rstrip()]
    if word in known:
        return [_overview(word, list(known[word].values()))]
    group, equals, name = word.partition("=")
    places, name = ({group: known.get(group, {})}, name) if equals else (known, word)
    cards = [(kind, named[name]) for kind, named in places.items() if name in named]
    if not cards:
        names = [*known, SETTINGS, *(name for named in places.values() for name in named)]
        near = get_close_matches(name, names, n=1, cutoff=0.5)
        end = (
            f"did you mean {near[0]}?" if near else "`python -m harness.list` shows what there is."
        )
        raise ConfigError(f"There is no {word!r}; {end}")
    return [
        _card(kind, entry) if isinstance(entry, Entry) else experiment_card(entry)
        for kind, entry in cards
    ]


def _summary(known: ByGroup) -> Iterator[str]:
    """Yield one line per method, task and model; presets and experiments are only counted."""
    for group in GROUPS:
        every = list(known[group].values())
        own = [entry for entry in every if not (isinstance(entry, Entry) and entry.base)]
        yield _overview(group, own).rstrip()
        if len(own) < len(every):
            yield f"  and {len(every) - len(own)} presets of these: `python -m harness.list {group}`"
        yield ""
    yield f"{EXPERIMENT}=\n  {len(known[EXPERIMENT])} figures and tables: `python -m harness.list {EXPERIMENT}`"
    yield "\nA card with all parameters: `python -m harness.list pqcache`. Settings: `python -m harness.list settings`."


def _overview(group: str, named: Sequence[Entry | Experiment]) -> str:
    width = max(len(entry.name) for entry in named)
    return "\n".join(
        [f"{group}=", *(f"  {entry.name:<{width}}  {entry.headline}" for entry in named), ""]
    )


def _card(group: str, entry: Entry) -> str:
    facts = aligned((name.replace("_", " "), text) for name, text in entry.facts().items())
    parameters = aligned((f"{group}.{given}", meaning) for given, meaning in parameters_of(entry))
    parts = [
        f"{group}={entry.name}",
        *([entry.headline] if entry.base else []),
        "",
        entry.card(),
        "",
    ]
    parts += ["Card", *facts, ""] if facts else []
    return "\n".join([*parts, "Parameters", *(parameters or ["  (no parameters)"]), ""])


def experiment_card(experiment: Experiment) -> str:
    """Return the card of an experiment: the table or figure that it reproduces, its cost, the
    paper's numbers, and the command that runs it."""
    numbers = [f"  {row.said}" for row in expected(experiment)]
    grid = aligned((key.lstrip("+"), values) for key, values in experiment.grid.items())
    parts = [
        f"{EXPERIMENT}={experiment.name}",
        experiment.headline,
        "",
        *aligned(experiment.facts.items()),
    ]
    parts += ["", "Command", f"  {experiment.command}"]
    parts += ["", "Grid", *grid] if grid else []
    parts += ["", "Published", *numbers] if numbers else []
    return "\n".join([*parts, "", "File", f"  {experiment.file}", ""])


def expected(experiment: Experiment) -> list[Published]:
    """Return the published numbers for an experiment; if it has none, those for the experiments
    that it is a variant of."""
    return published(experiment.name) or [
        row for base in experiment.bases for row in expected(base)
    ]


if __name__ == "__main__":
    sys.exit(main())
