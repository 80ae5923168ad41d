"""`python -m harness.bench KIND`: one benchmark; `--help` behind its KIND explains it."""

from __future__ import annotations

import sys
from importlib import import_module

from harness.config.errors import explained
from harness.terminal.lasting_output import lasting_output
from harness.terminal.notices import say
from harness.terminal.stopping import Stoppable

KINDS = ("layer", "decode", "ops", "generate", "kvpress", "overflow", "history", "overlap", "busy", "calibrate", "fit")


@lasting_output()
def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in KINDS:
        say(f"{__doc__}\nChoose one of {', '.join(KINDS)}.")
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    with Stoppable("the rows so far are written, and marked as partial; the same command measures all anew") as stop:
        code = _bench(*arguments)
    return stop.code or code


@explained
def _bench(kind: str, *words: str) -> None:
    module = import_module(f"harness.bench.{kind}")
    module.main(module.parser().parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
