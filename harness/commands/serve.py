"""`python -m harness.serve method=full history=store,recompute rate=0.2,0.5,1.0`: conversations that arrive and wait.

Sessions come as a Poisson process, their turns wait for a slot, first come, first served, and run side by side; after
an answer the user thinks. Every combination of values is a run on the same conversations. Each run's turns go to a
folder in --out, and a run that is there is not made again; serving.json and serving.csv with the figures of all runs go
to a folder of the command's own in --out/tables.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.config.errors import as_command
from harness.terminal.arguments import Parser
from harness.terminal.notices import say, say_once

OUT = Path("results/runs/serving")


@as_command("the same command goes on after the runs that are finished")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("serve", __doc__)
    parser.overrides("see docs/conversations.md; a key may have several values")
    parser.path("--costs", "FILE", "yaml with prices, in place of the paper's")
    parser.path("--out", "DIR", "for all files (default: %(default)s)", default=OUT)
    parser.config_dirs()
    options = parser.parse_intermixed_args(arguments)
    say_once.cache_clear()
    from harness.cachedattention.serving.plan import points
    from harness.cachedattention.serving.runs import Runs
    from harness.cachedattention.simulation import costs
    from harness.config.settings import SettingsError
    from harness.results.files import unwritable

    if why := unwritable(options.out):
        raise SettingsError(
            f"--out {options.out} cannot be written, for {why}: name another folder."
        )
    prices = (costs.load(options.costs) if options.costs else costs.load()).prices
    runs = Runs(points(options.overrides), options.out, prices, options.config_dir)
    runs.serve()
    if runs.rows:
        say(f"\n{runs.text()}")
        say("\nwrote " + ", ".join(str(path) for path in runs.write()))
    return int(len(runs.rows) < len(runs.plans))


if __name__ == "__main__":
    sys.exit(main())
