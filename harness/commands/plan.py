"""`python -m harness.plan --machine A100-80G --model llama-3.1-8b --tokens 124928 --budget 2048`: which methods give
which batch and rate on a machine, by formula and without weights.

A machine is one that comes with the harness, or a file that `python -m harness.bench calibrate` wrote on it. The table
goes to the terminal; with --out also to table.md, plan.csv and plan.png there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from harness.config.errors import as_command
from harness.config.values import SettingsError, size
from harness.results.files import write_atomically, write_csv
from harness.terminal.lasting_output import lasting_output
from harness.terminal.notices import say
from harness.terminal.numbers import budget, count, length, positive, share
from harness.terminal.paths import typed
from harness.terminal.tables import markdown_table, text_table
from methods.tiers.tier import DEVICE, HOST, TIERS

if TYPE_CHECKING:
    from harness.machines.plan import PlannedRow, Workload

OFFLOADED = "full_offloaded"  # a preset that stands beside the methods, for it is what offloading alone brings


@lasting_output()
@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    from harness.machines import plan_table
    from harness.machines.plan import PlanError

    if options.timelines and not options.out:
        raise PlanError("--timelines needs --out, a folder for them.")
    rows, left_out = _planned(options)
    if not rows:
        raise PlanError(left_out[0])
    title = (
        f"{options.model}, {', '.join(map(str, options.tokens))} prompt and {options.new} new tokens, {options.dtype}"
    )
    title += "" if len(options.machine) > 1 else f", on {rows[0].machine.name}"
    columns, below = plan_table.columns(rows), [*plan_table.notes(rows), *left_out]
    say(f"{title}\n\n{text_table(columns)}\n\n" + "\n".join(below))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        listed = "\n".join(f"- {line}" for line in below)
        write_atomically(options.out / "table.md", f"{title}\n\n{markdown_table(columns)}\n\n{listed}\n")
        write_csv(options.out / "plan.csv", [plan_table.plain(row) for row in rows])
        plan_table.picture(options.out / "plan.png", rows, title)
        say(f"\nwrote {options.out}/table.md, plan.csv, plan.png" + "".join(_timelines(options, rows)))


def _planned(options: argparse.Namespace) -> tuple[list[PlannedRow], list[str]]:
    """Rows, the fastest of each machine and length first, and why others are not there."""
    from harness.machines.machine import machine
    from harness.machines.plan import PlanError, planned
    from harness.models.random import SHAPES, Random

    if options.model not in SHAPES:
        raise PlanError(f"--model {options.model} is unknown: choose one of {', '.join(SHAPES)}.")
    info = Random(options.model, None, 0, "bytes").describe()
    rows: list[PlannedRow] = []
    left_out: dict[str, None] = {}
    for name in options.machine:
        there = machine(name)
        there = replace(there, host_bytes=options.host or there.host_bytes)
        for tokens in options.tokens:
            behind = len(rows)
            for load in _loads(options, tokens, left_out):
                try:
                    rows.append(planned(there, info, load, options.batch, options.tpot / 1e3))
                except ValueError as error:  # of this row alone: it does not fit, or suit the model
                    left_out[str(error)] = None
            rows[behind:] = sorted(rows[behind:], key=lambda row: -row.rate)
    return rows, list(left_out)


def _loads(options: argparse.Namespace, tokens: int, left_out: dict[str, None]) -> Iterator[Workload]:
    from harness.bench.common import methods
    from harness.machines.plan import Workload

    for name, method in methods.chosen(options.methods or [*methods.names(), OFFLOADED], options.config_dir).items():
        places = [place for place in options.placement if (place == DEVICE or method.offloads)]
        if name.partition(":")[0] == OFFLOADED and len(places) > 1:
            places = [place for place in places if place != DEVICE]  # there it is Full
        if not places:
            left_out[f"{name} keeps everything on the device: add --placement {DEVICE} for its row."] = None
        for placement in places:
            for asked in options.budget if method.uses_budget else [None]:
                yield Workload(
                    method=method,
                    name=name,
                    budget=asked,
                    placement=placement,
                    tokens=tokens,
                    new=options.new,
                    dtype=options.dtype,
                    hits=options.hits,
                )


def _timelines(options: argparse.Namespace, rows: Sequence[PlannedRow]) -> Iterator[str]:
    """The steps of every row, drawn and as a trace for chrome://tracing; gives the names of the files."""
    from harness.machines import timeline
    from harness.machines.plan import row_times

    if options.timelines:
        yield " and a timeline of each row"
    for number, row in enumerate(rows, start=1) if options.timelines else ():
        times = row_times(row)
        name = f"{number:02}-{row.load.name.partition(':')[0]}-{row.load.placement}"
        timeline.write_trace(options.out / f"{name}.json", times)
        timeline.picture(options.out / f"{name}.png", times, f"Three tokens of {row.load.name}, batch {row.batch}")


def _bytes(text: str) -> int:
    try:
        return size("--host", text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.plan", description=__doc__)
    parser.add_argument("--machine", nargs="+", required=True, metavar="NAME|FILE", help="see docs/plan.md")
    parser.add_argument("--model", default="llama-3.1-8b", help="a shape that model=random has")
    parser.add_argument("--tokens", nargs="+", type=length, default=[32768], help="of the prompt, as 32768 or 32K")
    parser.add_argument("--new", type=count, default=128, help="tokens of an answer")
    parser.add_argument("--budget", nargs="+", type=budget, default=[0.2], help="as 0.2, or 2048 tokens")
    parser.add_argument("--methods", nargs="*", default=[], help="names, or quest:select_per=kv_head; all by default")
    parser.add_argument("--config-dir", "-cd", type=typed, action="append", default=[], help="look there for more")
    parser.add_argument(
        "--placement", nargs="+", choices=TIERS, default=[DEVICE, HOST], help="of what is read by choice"
    )
    parser.add_argument("--hits", type=share, help="share of the chosen rows that a step finds on the device")
    parser.add_argument("--host", type=_bytes, metavar="SIZE", help="host memory, as 512GB; else that of the machine")
    parser.add_argument("--batch", type=count, help="sequences at a time (default: as many as fit)")
    parser.add_argument("--tpot", type=positive, default=inf, metavar="MS", help="most milliseconds per output token")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of weights and cache")
    parser.add_argument("--timelines", action="store_true", help="draw the steps of every row as well; needs --out")
    parser.add_argument("--out", type=typed, metavar="DIR", help="for table.md, plan.csv and plan.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
