"""`python -m harness.list`: all methods, tasks, models, experiments. `python -m harness.list method=pqcache`: its card.

`--markdown` writes docs/methods.md: the cards of all methods. `settings --markdown` writes docs/settings.md,
`experiment --markdown` the table of docs/experiments.md.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence

from harness.config.catalogue import CONF, GROUPS, Entry, config_dirs, entries
from harness.config.errors import explained
from harness.config.experiments import GROUP as EXPERIMENT
from harness.config.experiments import Experiment, experiments
from harness.config.keys import parameters_of, settings_page, settings_text
from harness.config.plugins import suggestion
from harness.reports.papers import Published, published
from harness.terminal.notices import complain, say
from harness.terminal.tables import aligned, code, table

USAGE = (
    "usage: python -m harness.list [method|task|model|experiment][=NAME] ... [settings] [--config-dir DIR] [--markdown]"
)
FLAGS = ("--config-dir", "-cd", "--markdown")
KINDS = (*GROUPS, EXPERIMENT)

COMPARED = ("prefill", "rule", "unit", "group_rule", "dense_layers", "sinks", "window")  # columns of the table
_TITLE = """# The methods

What must be known before two of them are compared, with the defaults of conf/method/. Written by
`python -m harness.list --markdown`; change the card in a method's file and the comments in its yaml, not this page."""


@explained
def main(arguments: Sequence[str]) -> int:
    folders = (CONF, *config_dirs(arguments))
    asked = [argument for argument in arguments if argument.partition("=")[0] in KINDS]
    if "-h" in arguments or "--help" in arguments:
        say(USAGE)
        return 0
    if "settings" in arguments:
        say((settings_page() if "--markdown" in arguments else settings_text()).rstrip())
        return 0
    if "--markdown" in arguments and EXPERIMENT in asked:
        say(experiments_table(experiments(folders)))
        return 0
    if "--markdown" in arguments:
        say(markdown(entries("method", folders)).rstrip())
        return 0
    if strange := [a for a in arguments if a.startswith("-") and a.partition("=")[0] not in FLAGS]:
        complain(f"there is no flag {strange[0]}{suggestion(strange[0], FLAGS)}\n{USAGE}")
        return 2
    unknown = [a for a in arguments if a not in asked and not a.startswith("-") and not _is_value(a, arguments)]
    if unknown:
        complain(f"there is no kind {unknown[0]!r}{suggestion(unknown[0], KINDS)}\n{USAGE}")
        return 2
    for argument in asked or KINDS:
        group, _, name = argument.partition("=")
        found = experiments(folders) if group == EXPERIMENT else {one.name: one for one in entries(group, folders)}
        if name and name not in found:
            complain(f"there is no {group} {name!r}{suggestion(name, found)}")
            return 2
        say(_told(group, found, name))
    return 0


def _told(group: str, found: Mapping[str, Entry] | Mapping[str, Experiment], name: str) -> str:
    """All there are, or the card of one."""
    if not name:
        return _overview(group, list(found.values()))
    one = found[name]
    return _card(group, one) if isinstance(one, Entry) else experiment_card(one)


def _is_value(argument: str, arguments: Sequence[str]) -> bool:
    place = list(arguments).index(argument)
    return place > 0 and arguments[place - 1] in ("--config-dir", "-cd")


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


def experiments_table(found: Mapping[str, Experiment]) -> str:
    """The table of docs/experiments.md."""
    full = [one for name, one in found.items() if not name.startswith("small/")]
    rows = [(code(one.name), one.headline, _short(one.command), _small_cost(one, found)) for one in full]
    return table(("experiment", "what", "made by", "small variant"), rows)


def _short(command: str) -> str:
    return code(" ".join(word for word in command.split()[2:] if not word.startswith(("-", "+"))))


def _small_cost(one: Experiment, found: Mapping[str, Experiment]) -> str:
    if one.name.startswith("tables/"):  # with the embedded model already
        return f"itself: {one.facts.get('cost', '')}"
    small = found.get(f"small/{one.name}")
    return small.facts.get("cost", "") if small else "none"


def markdown(methods: Sequence[Entry]) -> str:
    """One table over all methods, then a section for each, with its presets."""
    presets = {m.name: [one for one in methods if one.base == m] for m in methods}
    full = [m for m in methods if m.base is None]
    return "\n\n".join([_TITLE, _table(full), *(_section(m, presets[m.name]) for m in full)]) + "\n"


def _table(methods: Sequence[Entry]) -> str:
    head = [_words(line) for line in ("method", *COMPARED)]
    return table(head, [[f"[{m.name}](#{m.name})", *(m.facts().get(line, "") for line in COMPARED)] for m in methods])


def _section(entry: Entry, presets: Sequence[Entry]) -> str:
    facts = [(_words(name), text) for name, text in entry.facts().items()]
    parameters = [(code(given), meaning) for given, meaning in parameters_of(entry)]
    changed = [(code(f"method={one.name}"), one.headline) for one in presets]
    named = {"card": facts, "parameter": parameters, "preset": changed}
    tables = [table((name, ""), rows) for name, rows in named.items() if rows or name == "card"]
    return "\n\n".join([f"## {entry.name}", entry.card(), *tables])


def _words(name: str) -> str:
    return name.replace("_", " ")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program, not with a traceback
    sys.exit(main(sys.argv[1:]))
