"""`python -m harness.simulate policy=scheduler_aware,lru disk=2TB,10TB`: a multi-turn KV store at its paper's scale.

Sends a trace of conversations (drawn as ShareGPT's) through the store's own policies and a model of a server, event by
event; nothing is computed. One run per combination of the values given. The table goes to the
terminal, with all figures to simulation.json and simulation.csv in a folder of the command's own, or in --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.config.errors import as_command
from harness.results.files import digest, write_csv, write_json
from harness.terminal.arguments import Parser
from harness.terminal.notices import say

SCHEMA = 1
ROOT = Path("results/runs/simulations")


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("simulate", __doc__)
    parser.overrides("docs/conversations.md has the keys")
    parser.add_argument(
        "--figure",
        metavar="N",
        help="of the paper, 13 to 17, 21, 22, 24, 25: its runs, with its numbers for comparison",
    )
    parser.path("--costs", "FILE", "yaml in place of the paper's costs")
    parser.path("--out", "DIR", f"for all files (default: a folder in {ROOT} for each command)")
    options = parser.parse_intermixed_args(arguments)
    from harness.cachedattention.simulation import costs, outcome, paper
    from harness.cachedattention.simulation.scenario import scenarios
    from harness.results.provenance import provenance

    figure = None if options.figure is None else paper.figure(options.figure)
    runs = list(figure.scenarios(options.overrides) if figure else scenarios(options.overrides))
    known = costs.load(options.costs) if options.costs else costs.load()
    # the same runs at the same costs
    asked = digest({"runs": [asdict(run) for run in runs], "costs": asdict(known)})
    kind = f"figure_{options.figure}" if figure else f"{len(runs)}-runs"
    folder = options.out or ROOT / f"{kind}-{asked[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [outcome.simulated(run, known) for run in runs]
    say(outcome.table(rows, runs))
    if figure:
        say(f"\n{figure.table(rows)}")
    result = {
        "schema": SCHEMA,
        "figure": options.figure,
        "words": options.overrides,
        "costs": asdict(known),
    }
    write_json(folder / "simulation.json", result | {"provenance": provenance(), "runs": rows})
    write_csv(folder / "simulation.csv", [row["settings"] | row["figures"] for row in rows])
    say(f"\nwrote {folder}/simulation.json, .csv")


if __name__ == "__main__":
    sys.exit(main())
