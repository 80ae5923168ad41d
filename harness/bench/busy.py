"""`python -m harness.bench busy`: a method's decode step on an idle machine, and beside a process that never sleeps.

One layer as in `bench layer`. The busy process is stopped and started in turn, so both times come from one run; a step
beside it should take at most 2.5 times as long on two cores. CPU only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import torch

from harness.bench.common import arguments, methods, output
from harness.bench.common.measure import DTYPES, estimate, seconds
from harness.bench.layer import Decoding
from harness.terminal.tables import Column

STEPS = 25  # of each kind in a round
SETTLE_S = 0.3  # until the system has moved threads about


@contextmanager
def busy_process() -> Iterator[Callable[[bool], None]]:
    """Yields a switch: True lets the process run."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def switch(on: bool) -> None:
        os.kill(process.pid, signal.SIGCONT if on else signal.SIGSTOP)
        sleep(SETTLE_S)

    try:
        switch(False)
        yield switch
    finally:
        process.kill()
        process.wait()


@torch.inference_mode()
def measure(decoding: Decoding, rounds: int, switch: Callable[[bool], None]) -> dict[str, Any]:
    def steps(count: int) -> list[float]:
        times = []
        for _ in range(count):
            decoding.advance()
            times.append(float(seconds(decoding.step, decoding.shape.device)))
        return times

    alone, beside = [], []
    for _ in range(rounds):
        switch(False)
        steps(3)  # the first ones still feel the neighbour
        alone += steps(STEPS)
        switch(True)
        beside += steps(STEPS)
    switch(False)
    slowest = sorted(beside)[int(0.9 * len(beside))]
    return {
        "alone_s": estimate(alone),
        "beside_s": estimate(beside),
        "beside_p90_s": slowest,
        "ratio": median(beside) / median(alone),
    }


def table(rows: Sequence[output.Row]) -> list[Column]:
    return [
        output.column("tokens", "", rows, lambda row: str(row["tokens"])),
        output.column("method", "", rows, lambda row: row["method"], left=True),
        output.column("alone", "ms", rows, output.scaled("alone_s", 1e3)),
        output.column("beside a busy process", "ms", rows, output.scaled("beside_s", 1e3)),
        output.column("its 90th percentile", "ms", rows, lambda row: row["beside_p90_s"] * 1e3),
        output.column("times as long", "", rows, lambda row: row["ratio"]),
    ]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.bench busy", description=__doc__)
    made.add_argument("--tokens", nargs="+", type=arguments.count, default=[131072])
    made.add_argument("--budget", type=arguments.budget, default=2048)
    made.add_argument("--dtype", default="bf16", choices=DTYPES)
    made.add_argument("--rounds", type=arguments.count, default=4)
    arguments.add_shape(made)
    arguments.add_method(made)
    made.add_argument("--out", type=Path, help="folder for the table and the figures")
    return made


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    chosen = methods.chosen(options.methods or ["full", "pqcache", "quest", "sparq", "shadowkv"])
    shape = arguments.shape(options)
    title = f"One decode step of one layer alone and beside a busy process, on {torch.get_num_threads()} threads"
    report = output.Report("busy", title, options, table)
    with busy_process() as switch:
        for tokens in options.tokens:
            for name, method in chosen.items():
                room = argparse.Namespace(**vars(options) | {"rounds": 2 * STEPS * options.rounds})
                row = measure(Decoding(method, shape, tokens, room), options.rounds, switch)
                row = {"method": name, "tokens": tokens, **row}
                report.add(row, f"{name} at {tokens}: {row['ratio']:.2f} times as long")
    report.finish()
    return 0
