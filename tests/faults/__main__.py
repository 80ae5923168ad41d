"""Faults drawn with a seed: something happens to a file or to the process that writes it, and the same command starts
again.

`python -m tests.faults --seed 7` (`make test-faults SEED=7`) draws every kind with every target at least twice. Behind
each fault no answer or score may differ from those of an undisturbed run unless its row is stamped, no command may
print a traceback, and the next start leaves no file that an undisturbed one does not. What fails is listed with the
words that repeat it alone.

A full disk is a small one that is mounted for the fault and filled, in a namespace of this command's own. Where a
system allows no such thing, these faults are said to be not tried.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from harness.terminal.tables import table
from tests.faults.draw import Fault, faults
from tests.faults.harm import FULL, KINDS
from tests.faults.targets import TARGETS
from tests.faults.trial import Bench, Outcome, can_mount

UNSHARE = ["unshare", "--map-root-user", "--mount"]
INSIDE = "KV_HARNESS_FAULTS_IN_NAMESPACE"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="how many faults; 100 has every pair twice")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these of them alone, with all they print")
    options = parser.parse_args(arguments)
    drawn = list(islice(faults(options.seed), max(options.count, *(options.only or [0]))))
    wanted = [fault for fault in drawn if not options.only or fault.number in options.only]
    started = monotonic()
    with TemporaryDirectory(prefix="kv-faults-") as folder:
        outcomes = tried(wanted, Path(folder), aloud=bool(options.only))
    print(f"\n{as_table(wanted, outcomes)}\n")
    failed = [fault for fault in wanted if fault in outcomes and outcomes[fault].wrong]
    print(
        f"seed {options.seed}: {len(wanted)} faults in {monotonic() - started:.0f} s, {len(outcomes) - len(failed)} "
        f"passed, {len(failed)} failed, {len(wanted) - len(outcomes)} not tried"
    )
    for fault in failed:
        print(
            f"python -m tests.faults --seed {options.seed} --only {fault.number}", *outcomes[fault].wrong, sep="\n    "
        )
    return int(bool(failed))


def tried(wanted: Sequence[Fault], folder: Path, aloud: bool = False) -> dict[Fault, Outcome]:
    bench, mounts, outcomes = Bench(folder), can_mount(folder), dict[Fault, Outcome]()
    for fault in wanted:
        if fault.kind == FULL and not mounts:
            print(f"{fault}: not tried, for nothing can be mounted here", flush=True)
            continue
        outcomes[fault] = made = bench.outcome(fault)
        print(f"{fault}: {'; '.join(made.wrong) or 'passed'}", flush=True)
        if aloud:
            print(made.harmed, made.told, sep="\n")
    return outcomes


def as_table(wanted: Sequence[Fault], outcomes: dict[Fault, Outcome]) -> str:
    """Passed of drawn, by kind and target."""
    drawn = Counter((fault.kind, fault.target.name) for fault in wanted)
    passed = Counter((fault.kind, fault.target.name) for fault, made in outcomes.items() if not made.wrong)
    rows = [[target.name, *(_cell(passed, drawn, (kind, target.name)) for kind in KINDS)] for target in TARGETS]
    return table(["passed of drawn", *KINDS], rows)


def _cell(passed: Counter[tuple[str, str]], drawn: Counter[tuple[str, str]], pair: tuple[str, str]) -> str:
    return f"{passed[pair]} of {drawn[pair]}" if drawn[pair] else ""


if __name__ == "__main__":
    if INSIDE not in os.environ and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0:
        os.execvpe(UNSHARE[0], [*UNSHARE, *sys.orig_argv], os.environ | {INSIDE: "1", "OMP_NUM_THREADS": "1"})
    sys.exit(main())
