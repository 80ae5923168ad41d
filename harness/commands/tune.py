"""`python -m harness.tune method=snapkv task=ruler budget=0.2`: search a method's own parameters at equal budget.

A curve per parameter around the given values, then the best few together: chosen on one half of examples that no table
is about, reported on the other half, left as a preset (`python -m harness --config-dir results/tuning
method=snapkv_tuned`). `method.kernel=3,7,15` searches that alone; without it, all parameters that the method declares.
The same command goes on where it was stopped; `dry_run=true` says how much it would run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.config.compose import built, composed, read_search
from harness.config.errors import as_command
from harness.config.settings import Results
from harness.terminal.arguments import typed
from harness.terminal.notices import say, say_once, warn
from harness.terminal.progress import forget

ROOT = "results/tuning"  # beside results/runs, so that no report takes one for the other


@as_command("the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_intermixed_args(given)
    say_once.cache_clear()
    forget()
    asked = read_search(options.overrides, options.config_dir)
    method, task, model, settings = built(composed(asked.words, options.config_dir))
    if settings.results.root == Results().root:
        settings = replace(settings, results=replace(settings.results, root=ROOT))

    from harness.tuning.findings import preset_path, search
    from harness.tuning.plan import SearchPlan

    names = {group: entry.name for group, entry in asked.chosen.items()}
    out, command = options.out or Path(settings.results.root), f"python -m harness.tune {shlex.join(given)}"
    path = preset_path(out, names["method"], command)
    plan = SearchPlan.of(method, task, model, settings, names, asked.values)
    say("\n".join(plan.lines()))
    if settings.dry_run:
        return
    findings = search(plan, warn)
    say("\n" + "\n".join(findings.lines()))
    findings.write_preset(path, asked.chosen["method"], command)
    say(f"wrote {path}\nrun it: python -m harness --config-dir {out} method={path.stem} ...")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.tune", description=__doc__)
    parser.add_argument(
        "overrides", nargs="+", metavar="KEY=VALUE", help="as for python -m harness; method.PARAMETER may name several"
    )
    parser.add_argument("--out", type=typed, metavar="DIR", help=f"for the preset, else results.root ({ROOT})")
    parser.add_argument("--config-dir", "-cd", type=typed, action="append", default=[], help="more yaml files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
