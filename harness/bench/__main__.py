"""`python -m harness.bench KIND`: one benchmark; `--help` after its KIND explains it."""

from __future__ import annotations

import sys
from importlib import import_module

from harness.config.errors import as_command
from harness.terminal.notices import say

KINDS = ("ops", "layer", "decode", "profile", "generate", "suite")


@as_command(
    "the rows so far are written, and marked as partial; the same command measures all anew"
)
def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in KINDS:
        say(f"{__doc__}\nChoose one of {', '.join(KINDS)}.")
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    module = import_module(f"harness.bench.{arguments[0]}")
    module.main(module.parser().parse_args(arguments[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
