"""Ends a command with one line if Ctrl-C comes while its modules are imported, before a `Stoppable` hears it. Imports
nothing that takes long itself."""

from __future__ import annotations

import os
import signal
import sys


def asked() -> str:
    """Return the module that `python -m` is looking for now, or else the path of the script that is running."""
    script = next(iter(getattr(sys, "argv", [])), "")
    return (
        sys.orig_argv[sys.orig_argv.index("-m") + 1]
        if script == "-m" and "-m" in sys.orig_argv
        else script
    )


def end(*_: object) -> None:
    """Handle Ctrl-C: print a line, and exit with 130. It does not raise KeyboardInterrupt, because
    an import might turn that into another error."""
    try:
        os.write(2, b"\ninterrupted\n")
    finally:
        os._exit(128 + signal.SIGINT)


_is_command = os.path.basename(asked()).partition(".")[0] in ("harness", "kv-harness")
# not ignored, as under `cron`
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
