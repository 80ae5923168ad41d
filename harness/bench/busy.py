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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import sleep
from typing import Any

import torch

from harness.bench.common import arguments, methods, output
from harness.bench.common.measure import estimate, seconds
from harness.bench.common.output import Cell
from harness.bench.layer import LayerDecoding

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
def measure(decoding: LayerDecoding, rounds: int, switch: Callable[[bool], None]) -> dict[str, Any]:
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


TABLE = output.table(
    Cell("tokens", "tokens"),
    Cell("method", "method", left=True),
    Cell("alone", "alone_s", "ms", 1e3),
    Cell("beside a busy process", "beside_s", "ms", 1e3),
    Cell("its 90th percentile", "beside_p90_s", "ms", 1e3),
    Cell("times as long", "ratio"),
)


def parser() -> argparse.ArgumentParser:
    shared = arguments.LAYER | arguments.METHODS | {"dtype": arguments.FAST["dtype"], "rounds": 4, "out": None}
    usual = ["full", "pqcache", "quest", "sparq", "shadowkv"]
    return arguments.parser("busy", __doc__, tokens=[131072], budget=2048, **shared | {"methods": usual})


def main(options: argparse.Namespace) -> None:
    shape = arguments.shape(options)
    title = f"One decode step of one layer alone and beside a busy process, on {torch.get_num_threads()} threads"
    report = output.Report("busy", title, options, TABLE)
    with busy_process() as switch:

        def behind(tokens: int) -> methods.MeasureMethod:
            return lambda method: measure(
                LayerDecoding(method, shape, tokens, options, 3 * STEPS * options.rounds), options.rounds, switch
            )

        methods.measured(options, report, behind, lambda row: f"{row['ratio']:.2f} times as long")
    report.finish()
