"""`python -m harness.bench suite`: what this project wants to know of a GPU, in one run of bounded time.

The benchmarks of harness/bench/suite.yaml run one after the other, each for its share of the time and into a folder of
its own. What a share did not suffice for is measured in the time that the others have left. All happens in a process
of its own: where that ends, as after an illegal access or with a row that hangs, another takes over and begins with the
next row. summary.txt says what was cut off; the same command, given again, goes on there.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from math import inf
from multiprocessing import get_context
from pathlib import Path
from time import time

import yaml

from harness.bench.common import arguments, methods, output
from harness.config.errors import breaks_device, one_sentence
from harness.results.files import write_atomically
from harness.terminal.notices import complain, say, warn

# of the time: the most that a row may take, when the last one begins, and when all ends
ROW, LAST, END = 0.2, 0.83, 0.93
PROCESSES = 8  # of which each goes on where the one before it broke off


def plan(options: argparse.Namespace) -> dict[str, tuple[float, list[str]]]:
    """Return the benchmarks to run: by the name of its folder, each one's share of the time and its
    command line, in words."""
    every = {name for name in methods.names() if methods.load(name).dense_prefill}
    every = every - {"coded", "shadowkv"} | {"shadowkv:hit_cache=false"}
    common = " --rounds 3 --no-plot --shape {shape} --device {device}"
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {
        name: (
            share,
            (line + common).format(every=" ".join(sorted(every)), **vars(options)).split(),
        )
        for name, (share, line) in yaml.safe_load(text).items()
    }


def complete(folder: Path) -> bool:
    """Return whether a benchmark has tried all of its rows, and measured one at least."""
    made = output.result_in(folder) or {"rows": []}
    measured = any("error" not in row for row in made["rows"])
    return measured and made["status"] == "complete" and not made["left_out"]


def work(options: argparse.Namespace, until: float) -> None:
    """Run the benchmarks, of which no row begins after `until`, a value of time(): first each in its
    share of the time, then what was left out, in what is left."""
    for most in (60 * options.minutes, inf):
        for name, (share, words) in plan(options).items():
            seconds = min(until - time(), share * most)
            if seconds > 0 and not complete(options.out / name):
                run(name, words, options, seconds / 60)


def run(name: str, words: list[str], options: argparse.Namespace, minutes: float) -> None:
    """Run one benchmark, whose rows begin within so many minutes. Its error is printed; raise it if
    the device answers this process no more."""
    module = import_module(f"harness.bench.{words[0]}")
    own = module.parser().parse_args(words[1:])
    own.out, own.minutes, own.row_s = options.out / name, minutes, ROW * 60 * options.minutes
    say(f"\n{name}: python -m harness.bench {' '.join(words)}")
    try:
        module.main(own)
    except Exception as error:
        if breaks_device(error):
            raise
        complain(f"{name}: {one_sentence(error)}")


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of this benchmark."""
    tokens = {"nargs": 2, "default": [131072, 32768]}
    sizes = {"tokens": tokens, "budget": 2048, "shape": "llama-3.1-8b"}
    layers = {"default": 8, "help": "of the model whose steps are profiled or read host memory"}
    where = {"device": "cuda", "minutes": 5.0, "out": output.ROOT / "suite"}
    return arguments.parser("suite", __doc__, **sizes, layers=layers, **where)


def keep_to(options: argparse.Namespace) -> None:
    """Note beside the results what is measured. Raise `SystemExit` if it is not what was measured there
    before: one summary would mix the two."""
    noted, asked = (
        options.out / "plan.yaml",
        yaml.safe_dump({k: v[1] for k, v in plan(options).items()}),
    )
    if noted.exists() and noted.read_text(encoding="utf-8") != asked:
        sys.exit(
            f"{options.out} holds a measurement of another device, shape or plan: give another folder."
        )
    noted.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(noted, asked)


def main(options: argparse.Namespace) -> None:
    """Run all benchmarks in processes of their own, and say which were cut off."""
    began, whole = time(), 60 * options.minutes
    keep_to(options)
    try:
        for _ in range(PROCESSES):
            process = get_context("spawn").Process(
                target=work, args=(options, began + LAST * whole), daemon=True
            )
            process.start()
            process.join(max(0, began + END * whole - time()))
            if process.exitcode in (None, 0):
                break
            warn(f"The process ended with code {process.exitcode}; another goes on.")
    finally:
        process.kill()
        cut = [name for name in plan(options) if not complete(options.out / name)]
        text = f"CUT OFF, in part or in whole: {', '.join(cut) or 'nothing'}."
        write_atomically(options.out / "summary.txt", text)
        say(f"\n{text} Each benchmark has a folder in {options.out}.")
