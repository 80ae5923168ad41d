"""`python -m harness.list`: what there is. `python -m harness.list method=pqcache`: one card with its parameters."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.catalogue import CONF, GROUPS, Entry, config_dirs, entries
from harness.plugins import suggestion

USAGE = "usage: python -m harness.list [method|task|model][=NAME] ... [--config-dir DIR]"


def main(arguments: Sequence[str]) -> int:
    folders = (CONF, *config_dirs(arguments))
    asked = [argument for argument in arguments if argument.partition("=")[0] in GROUPS]
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
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
    rows = [(f"{group}.{name}={_plain(value)}", comment) for name, value, comment in entry.parameters()]
    width = min(60, max((len(left) for left, _ in rows), default=0))
    table = [f"  {left:<{width}}  {comment}".rstrip() for left, comment in rows] or ["  (no parameters)"]
    return "\n".join([f"{group}={entry.name}", "", entry.card(), "", "Parameters", *table, ""])


def _plain(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_plain, value))}]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value).replace("\n", "\\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
