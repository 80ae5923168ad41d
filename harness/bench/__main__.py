"""`python -m harness.bench KIND`: one benchmark; `--help` behind its KIND explains it."""

from __future__ import annotations

import sys
from importlib import import_module

from harness.terminal.lasting_output import lasting_output
from harness.terminal.notices import complain, say
from harness.terminal.stopping import Stoppable

KINDS = ("layer", "decode", "ops", "generate", "kvpress", "overflow", "history", "overlap", "busy", "calibrate")


@lasting_output()
def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in KINDS:
        say(f"{__doc__}\nChoose one of {', '.join(KINDS)}.")
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    with Stoppable("the rows so far are written, and marked as partial; the same command measures all anew") as stop:
        code = _bench(*arguments)
    return stop.code or code


def _bench(kind: str, *words: str) -> int:
    module = import_module(f"harness.bench.{kind}")
    try:
        module.main(module.parser().parse_args(words))
    except (ValueError, OSError) as error:  # written for the user by convention, as in harness/config/errors.py
        complain(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
