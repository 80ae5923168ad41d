"""`python -m harness.tune method=snapkv task=ruler budget=0.2`: search a method's own parameters at equal budget.

One parameter after the other takes its best value: chosen on one half of examples that no table is about, reported on
the other half, left as a preset (`python -m harness --config-dir results/tuning method=snapkv_tuned`).
`method.kernel=3,7,15` searches that alone; without it, all parameters that the method declares.
The same command goes on where it was stopped; `dry_run=true` says how much it would run.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from harness.config.catalogue import CONF, Entry
from harness.config.compose import built, composed, read_search
from harness.config.errors import as_command
from harness.config.plugins import build, describe
from harness.config.settings import Results, SettingsError
from harness.results.files import write_atomically
from harness.terminal.arguments import Parser
from harness.terminal.notices import say, say_once
from harness.terminal.progress import forget

if TYPE_CHECKING:
    from methods.base import Method

ROOT = "results/tuning"  # beside results/runs, so that no report takes one for the other


@as_command("the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser("tune", __doc__)
    parser.overrides("as for python -m harness; method.PARAMETER may name several", "+")
    parser.path("--out", "DIR", f"for the preset, else results.root ({ROOT})")
    parser.config_dirs()
    options = parser.parse_intermixed_args(given)
    say_once.cache_clear()
    forget()
    asked = read_search(options.overrides, options.config_dir)
    method, task, model, settings = built(composed(asked.words, options.config_dir))
    if settings.results.root == Results().root:
        settings = replace(settings, results=replace(settings.results, root=ROOT))

    from harness.commands.report import print_report
    from harness.tuning.search import Search

    names = {group: entry.name for group, entry in asked.chosen.items()}
    out = options.out or Path(settings.results.root)
    command = f"python -m harness.tune {shlex.join(given)}"
    path = preset_path(out, names["method"], command)
    search = Search.plan(method, task, model, settings, names, asked.values)
    say("\n".join(search.lines()))
    if settings.dry_run:
        return
    best, chosen = search.best()
    held = search.run("held-out", search.held_out, list(dict.fromkeys([search.start.method, best])))
    for title, runs in (("Chosen by", chosen), ("Held out:", held)):
        say(f"\n{title} {len(search.choosing if runs is chosen else search.held_out)} examples")
        full = {run.full_folder: None for run in runs.values() if run.full_folder}
        print_report([*full, *(run.folder for run in runs.values())], options.config_dir)
    origin = list(search.origin(best, held))
    headline = (
        f"{names['method']} tuned on {names['task']}: {search.changed(best) or 'its own values'}."
    )
    write_preset(path, asked.chosen["method"], best, [headline, command, *origin])
    say("\n".join(["", *origin, f"wrote {path}"]))
    say(f"run it: python -m harness --config-dir {out} method={path.stem} ...")


def preset_path(folder: Path, method: str, command: str) -> Path:
    """Return the file of a method's preset in `folder`. Raise `SettingsError` if it exists and
    another command wrote it."""
    path = folder / "method" / f"{method}_tuned.yaml"
    if path.is_file() and f"# {command}" not in path.read_text(encoding="utf-8").splitlines():
        raise SettingsError(
            f"{path} is there already, and not from this search: give another --out."
        )
    return path


def write_preset(path: Path, base: Entry, method: Method, comments: Sequence[str]) -> None:
    """Write a method as a preset to `path`: the parameters in which it differs from `base`, the yaml file of the start,
    or all of them if the file will not lie where `base` can be named."""
    values, defaults = describe(method), list[str]()
    if base.file.parent in (CONF / "method", path.parent.resolve()):
        usual = describe(build(base.values(), "method"))
        values = {name: value for name, value in values.items() if value != usual[name]}
        defaults = [f"defaults: [{base.name}]"]
    plain = {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
    body = (
        yaml.safe_dump(plain, default_flow_style=None, sort_keys=False, width=1000) if plain else ""
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join([*(f"# {line}" for line in comments), *defaults, body]))


if __name__ == "__main__":
    sys.exit(main())
