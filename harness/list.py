"""`python -m harness.list`: all methods, tasks and models. `python -m harness.list method=pqcache`: a card, parameters.

`--markdown` writes docs/methods.md: the cards of all methods. `settings --markdown` writes docs/settings.md.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from harness.config.catalogue import CONF, GROUPS, ConfigError, Entry, config_dirs, entries
from harness.config.keys import parameters_of, settings_page, settings_text
from harness.config.plugins import suggestion
from harness.terminal.markup import aligned, code, table

USAGE = "usage: python -m harness.list [method|task|model][=NAME] ... [settings] [--config-dir DIR] [--markdown]"

COMPARED = ("prefill", "rule", "unit", "group_rule", "dense_layers", "sinks", "window")  # columns of the table
_TITLE = """# The methods

What must be known before two of them are compared, with the defaults of conf/method/. Written by
`python -m harness.list --markdown`; change the card in a method's file and the comments in its yaml, not this page."""


def main(arguments: Sequence[str]) -> int:
    try:
        return _main(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _main(arguments: Sequence[str]) -> int:
    folders = (CONF, *config_dirs(arguments))
    asked = [argument for argument in arguments if argument.partition("=")[0] in GROUPS]
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    if "settings" in arguments:
        print(settings_page() if "--markdown" in arguments else settings_text(), end="")
        return 0
    if "--markdown" in arguments:
        print(markdown(entries("method", folders)), end="")
        return 0
    unknown = [a for a in arguments if a not in asked and not a.startswith("-") and not _is_value(a, arguments)]
    if unknown:
        print(f"error: there is no kind {unknown[0]!r}{suggestion(unknown[0], GROUPS)}\n{USAGE}", file=sys.stderr)
        return 2
    for argument in asked or GROUPS:
        group, _, name = argument.partition("=")
        found = {entry.name: entry for entry in entries(group, folders)}
        if not name:
            print(_overview(group, list(found.values())))
        elif name in found:
            print(_card(group, found[name]))
        else:
            print(f"error: there is no {group} {name!r}{suggestion(name, found)}", file=sys.stderr)
            return 2
    return 0


def _is_value(argument: str, arguments: Sequence[str]) -> bool:
    place = list(arguments).index(argument)
    return place > 0 and arguments[place - 1] in ("--config-dir", "-cd")


def _overview(group: str, found: Sequence[Entry]) -> str:
    width = max(len(entry.name) for entry in found)
    return "\n".join([f"{group}=", *(f"  {entry.name:<{width}}  {entry.headline}" for entry in found), ""])


def _card(group: str, entry: Entry) -> str:
    facts = aligned((_words(name), text) for name, text in entry.facts().items())
    parameters = aligned((f"{group}.{given}", meaning) for given, meaning in parameters_of(entry))
    parts = [f"{group}={entry.name}", *([entry.headline] if entry.base else []), "", entry.card(), ""]
    parts += ["Card", *facts, ""] if facts else []
    return "\n".join([*parts, "Parameters", *(parameters or ["  (no parameters)"]), ""])


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
