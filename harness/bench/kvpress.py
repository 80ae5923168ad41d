"""`python -m harness.bench kvpress --python VENV/bin/python`: whole samples beside NVIDIA's kvpress.

The same examples, token ids, weights, budget and dtype go through our runner and through kvpress, which runs in its own
environment (`pip install kvpress`, no release of which takes our transformers). Both take every example in turn, one
waiting while the other works. kvpress compresses all but the last token of a prompt, since it must be asked something.
Answers end as they will, so a wrong one may take long; `--new` makes them all of one length, to compare speed alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import yaml

from evals.base import Task
from harness.bench.common import arguments, methods, output
from harness.bench.common.load import LoadWatch, MarkedSeconds
from harness.bench.common.measure import estimate, marks, ratios, turned
from harness.bench.common.output import Cell
from harness.config import plugins
from harness.config.catalogue import CONF
from harness.config.settings import Data, GenerationSettings, Settings
from harness.engine.attach import Attachment
from harness.engine.hf import routed
from harness.jobs.job import Job
from harness.jobs.planning.items import Item
from harness.jobs.runner import Runner
from harness.models.base import DTYPES, LoadedModel
from harness.models.embedded import SmolLM2
from harness.terminal.numbers import share
from kernels.temporary import TemporaryFolder

WORKER = Path(__file__).with_name("kvpress_worker.py")
SIDES = ("ours", "kvpress")


class Press(NamedTuple):
    """A class of kvpress, and our method with the same parameters."""

    method: str
    name: str | None
    attention: str = "sdpa"
    options: dict[str, Any] = {}  # noqa: RUF012 (read only)


PRESSES = {
    "full": Press("full", None),
    "snapkv": Press("snapkv:window=64,kernel=5,pooling=avg", "SnapKVPress", options={"window_size": 64}),
    "streaming": Press("streaming:sinks=4,positions=original", "StreamingLLMPress", options={"n_sink": 4}),
    "h2o": Press("h2o", "ObservedAttentionPress", "eager"),
}


class Sample(NamedTuple):
    seconds: MarkedSeconds
    score: float
    tokens: int


PressKey = tuple[str, str]  # press, dtype
Answering = Callable[[Item, int], Sample]  # an example and its new tokens


class Peer:
    """The other environment, with the model in `folder`."""

    def __init__(self, process: subprocess.Popen[str], task: Task, budget: float, eos: Sequence[int]) -> None:
        self.process, self.task, self.budget, self.eos = process, task, budget, list(eos)

    def run(self, key: PressKey, item: Item, new: int) -> Sample:
        press, ids = PRESSES[key[0]], list(item.prompt.ids)
        options = press.options | ({"compression_ratio": 1 - self.budget} if press.name else {})
        asked = {"press": press.name, "options": options, "attention": press.attention, "dtype": DTYPES[key[1]]}
        watch = LoadWatch(self.process.pid)
        made = self._answer(asked | {"context": ids[:-1], "rest": ids[-1:], "new": new, "eos": self.eos})
        seconds = MarkedSeconds(made["seconds"], watch.disturbed())
        return Sample(seconds, self.task.score(item.example, made["text"]).value, made["tokens"])

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("kvpress has ended: its error stands above. Is it installed beside that --python?")
        made: dict[str, Any] = json.loads(line)
        return made


@contextmanager
def peer(python: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Started in an empty folder: transformers would take ours, `kernels`, for a package of that name."""
    words = [python, "-c", WORKER.read_text(), str(folder), str(torch.get_num_threads())]
    with TemporaryFolder("kv-kvpress-") as empty:
        try:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=empty)
        except OSError as error:
            raise ValueError(
                f"--python {python} cannot be started ({error.strerror}): name one beside kvpress."
            ) from error
        with process:
            yield process
            assert process.stdin is not None
            process.stdin.close()


def ours(job: Job, loaded: LoadedModel) -> Answering:
    attachment = Attachment(loaded.model, job.method, job.budget)
    runner = Runner(job.task, job.settings, job.folder, attachment, loaded)

    def run(item: Item, new: int) -> Sample:
        watch = LoadWatch()
        with routed(loaded.model):
            record = runner.record(*runner.answers([replace(item, new_tokens=new)]))
        return Sample(watch.seconds(), record.score, len(record.tokens))

    return run


def runs_of(
    options: argparse.Namespace, loaded: dict[str, LoadedModel], full: Job, other: Peer
) -> dict[tuple[str, PressKey], Answering]:
    runs: dict[tuple[str, PressKey], Answering] = {}
    for name in options.presses:
        method = methods.parsed(PRESSES[name].method)[1]
        for dtype, model in loaded.items():
            wanted = replace(full.settings, budget=options.budget, dtype=dtype)
            job = Job.plan(method, full.task, full.model, wanted, full.items)
            runs["ours", (name, dtype)] = ours(job, model)
            runs["kvpress", (name, dtype)] = partial(other.run, (name, dtype))
    return runs


Samples = dict[tuple[str, PressKey], list[Sample]]


def interleaved(runs: dict[tuple[str, PressKey], Answering], items: Sequence[Item]) -> Iterator[tuple[Item, Samples]]:
    """Every example through everything, in an order that turns round; one short warm-up each. After each example: all
    samples so far."""
    for run in runs.values():
        run(items[0], 4)
    samples: Samples = defaultdict(list)
    for place, item in enumerate(items):
        for key in turned(runs, place):
            samples[key].append(runs[key](item, item.new_tokens))
        yield item, samples


def _progress(item: Item, samples: Samples) -> str:
    times = (f"{name} {dtype} {side} {done[-1].seconds:.2f} s" for (side, (name, dtype)), done in samples.items())
    return f"{item.example.id}: {', '.join(times)}"


def rows_of(samples: Samples) -> list[dict[str, Any]]:
    """One per press and dtype, then each side's best dtype against the other's."""
    keys = list(dict.fromkeys(key for _, key in samples))
    rows = [_row(name, dtype, *(samples[side, (name, dtype)] for side in SIDES)) for name, dtype in keys]
    for name in dict.fromkeys(name for name, _ in keys):
        best = [min((samples[side, key] for key in keys if key[0] == name), key=_mean) for side in SIDES]
        rows.append(_row(name, "best", *best))
    return rows


def _mean(samples: Sequence[Sample]) -> float:
    return fmean(sample.seconds for sample in samples)


def _row(name: str, dtype: str, own: list[Sample], theirs: list[Sample]) -> dict[str, Any]:
    times = [[sample.seconds for sample in side] for side in (own, theirs)]
    row: dict[str, Any] = {"press": name, "dtype": dtype, "label": f"{name}, {dtype}", "n": len(own)}
    for side, samples, seconds in zip(SIDES, (own, theirs), times, strict=True):
        row[side] = {
            "seconds": estimate(seconds),
            "per_minute": 60 / fmean(seconds),
            "score": fmean(sample.score for sample in samples),
            "tokens": fmean(sample.tokens for sample in samples),
        }
    return row | {"ratio": ratios(times[1], times[0])} | marks(*times)


TABLE = output.table(
    Cell("press", "press", left=True),
    Cell("dtype", "dtype", left=True),
    *(Cell(side, f"{side}.seconds", "s") for side in SIDES),
    Cell("kvpress / ours", "ratio"),
    *(
        Cell(side, f"{side}.{key}", unit, factor)
        for key, unit, factor in (("per_minute", "samples/min", 1), ("score", "score", 100), ("tokens", "tokens", 1))
        for side in SIDES
    ),
    Cell("n", "n"),
)


def ruler(options: argparse.Namespace) -> Task:
    values = yaml.safe_load((CONF / "task" / "ruler.yaml").read_text(encoding="utf-8"))
    task: Task = plugins.build(
        values | {"tasks": options.tasks, "lengths": [options.length], "samples": options.samples}, "task"
    )
    return task


def parser() -> argparse.ArgumentParser:
    presses = {"nargs": "+", "default": list(PRESSES), "choices": PRESSES}
    tasks = {"tasks": ["niah_single_1", "niah_single_2", "niah_multikey_1"], "length": 2048, "samples": 3}
    runs = {"budget": {"type": share, "default": 0.2}, "dtypes": ["fp32", "bf16"], "new": None}
    shared = tasks | runs | {"data_root": None} | arguments.OUT
    return arguments.parser("kvpress", __doc__, python=None, presses=presses, **shared)


def main(options: argparse.Namespace) -> None:
    source, task = SmolLM2(), ruler(options)
    loaded = {dtype: source.load(dtype, "cpu") for dtype in options.dtypes}
    length = GenerationSettings(max_new_tokens=options.new, force_length=options.new is not None)
    plain = Settings(data=Data(root=options.data_root), generation=length)
    job = Job.plan(methods.load("full"), task, source, plain)
    task_names, model = ", ".join(options.tasks), source.identity().name
    title = f"Samples beside kvpress: RULER {task_names} at {options.length} tokens, {model}, budget {options.budget}"
    title += f", {options.new} new tokens each" if options.new else ""
    with peer(options.python, source.folder()) as process:
        ends = () if options.new else next(iter(loaded.values())).eos_ids
        runs = runs_of(options, loaded, job, Peer(process, task, options.budget, ends))
        report = output.Report("kvpress", title, options, TABLE)
        for item, samples in interleaved(runs, job.items):
            report.show(rows_of(samples), _progress(item, samples))
            if report.out_of_time(f"the examples behind {item.example.id}"):
                break
    report.finish(partial(output.bars, label="label", y="ratio", unit="times kvpress's speed"))
