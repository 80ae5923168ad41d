"""`python -m harness.bench KIND`: one benchmark; `--help` behind its KIND explains it."""

from __future__ import annotations

import sys
from importlib import import_module

KINDS = ("layer", "decode", "ops", "generate", "kvpress", "overflow", "history", "overlap", "busy", "calibrate")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in KINDS:
        print(f"{__doc__}\nChoose one of {', '.join(KINDS)}.")
        return 0 if arguments[:1] in ([], ["-h"], ["--help"]) else 2
    try:
        made: int = import_module(f"harness.bench.{arguments[0]}").main(arguments[1:])
    except (ValueError, OSError) as error:  # written for the user by convention, as in harness/config/errors.py
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped: the rows so far are written, and marked as partial.", file=sys.stderr)
        return 130
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
