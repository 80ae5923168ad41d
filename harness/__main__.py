"""`python -m harness` and `kv-harness`: with a command's name in front that command, else a run (commands/run.py).

A hyphen in a name stands for an underscore: `kv-harness lm-eval`.
"""

from __future__ import annotations

import runpy
import sys

from harness.config.catalogue import commands


def main() -> int:
    """`python -m harness report DIR` is `python -m harness.report DIR`."""
    typed = next(iter(sys.argv[1:]), "")
    name = typed.replace("-", "_")
    if name in commands():
        sys.argv[:2] = [f"{sys.argv[0]} {typed}"]
        runpy.run_module(f"harness.{name}", run_name="__main__", alter_sys=True)
        return 0  # it has not exited by itself
    from harness.commands.run import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
