"""`python -m harness.bench overlap`: what loading and saving a history cost a turn, beside its computing and before it.

Loading: a turn of --new tokens comes behind --tokens of stored history, and another job runs until it begins. `off`:
all layers are loaded, then the turn computes. `buffer 0`: it computes while they come. `buffer n`: n layers come while
the job before is running; `formula` is the paper's size, from what the rounds so far have measured. Saving: a history
goes to disk, and another job begins when the save returns. Turns: a prompt of --prompts tokens is prefilled, --steps
tokens are decoded, its rows go to host memory; `off` copies them when the turn has ended, `asynchronous` while it
decodes and while the next job runs. The pages of files are cold. All ways take turns; ratios are of neighbours. Those
with the job beside say whether loading or saving has slowed it down.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from harness.bench.common import arguments, models, output
from harness.bench.common.history import ROOM, SESSION, History, forget
from harness.bench.common.load import LoadWatch, MarkedSeconds
from harness.bench.common.measure import estimate, marks, ratios
from harness.bench.common.output import Cell
from harness.conversations.conversation import Conversation
from harness.engine.attach import attached
from kernels.temporary import TemporaryFolder
from methods.full import Full
from methods.tiers.tier import DEVICE, TIERS

OFF, FORMULA = "off", "formula"


class TimedWay(NamedTuple):
    """MarkedSeconds."""

    turn_s: float  # until the first token, of a save, or of a turn with its save
    beside_s: float  # of the job before the turn, or behind the save
    waited_s: float | None  # for rows, or of a turn for its save
    hidden_s: float
    layers: int | None  # in the read buffer

    @property
    def both_s(self) -> float:
        return self.turn_s + self.beside_s


class Jobs:
    """A turn behind a history, and the job beside it: `beside` tokens of the same text, computed."""

    def __init__(self, behind: History, beside: int) -> None:
        self.behind, self._other = behind, behind.text[:beside]

    def beside(self) -> float:
        """-> seconds"""
        began = perf_counter()
        int(self.behind.prefill(self.behind.start(len(self._other)), self._other).argmax())
        return perf_counter() - began


class LoadedTurn:
    """Of one tier."""

    def __init__(self, jobs: Jobs, tier: str, buffers: Sequence[int], folder: Path, closing: ExitStack) -> None:
        self.name, self.jobs, self.folder, self.count = f"load from {tier}", jobs, folder, jobs.behind.count
        self.histories = jobs.behind.stored(tier, folder, closing)
        self.ways: dict[str, int | None] = {OFF: 0, **{f"buffer {layers}": layers for layers in (0, *buffers)}}
        self.ways[FORMULA] = None
        self.tokens: set[int] = set()  # the first of every answer

    def run(self, way: str) -> TimedWay:
        behind = self.jobs.behind
        talk = Conversation(self.histories, SESSION, len(behind.text), turns=1)
        forget(self.folder)
        self.histories.read_buffer = self.ways[way]
        talk.ahead(behind.text)
        beside_s = self.jobs.beside()
        talk.ask(behind.text)
        watch = LoadWatch()
        talk.resume()
        loading = talk.found.loading
        assert loading is not None
        if way == OFF:
            talk.found.cache.await_layers()
        self.tokens.add(behind.first_token(talk))
        turn_s = watch.seconds()
        assert len(self.tokens) == 1
        return TimedWay(turn_s, beside_s, talk.found.load_s, talk.found.hidden_s, loading.overlap.read_buffer)


class Save:
    """Of a whole history."""

    def __init__(self, jobs: Jobs, folder: Path, closing: ExitStack) -> None:
        self.name, self.jobs, self.count, self._names = "save to disk", jobs, jobs.behind.count, count()
        ways = {OFF: {"write_buffer": 0}, "write buffer": {"write_buffer": ROOM}}
        size = {"disk": 2 * sum(x.nbytes for state in jobs.behind.cache.contents() for x in state.values())}
        self.ways = {
            way: jobs.behind.opened(closing, folder=folder / way, **size, **settings) for way, settings in ways.items()
        }

    def run(self, way: str) -> TimedWay:
        behind, histories = self.jobs.behind, self.ways[way]
        before = histories.store.statistics.saving_s
        watch = LoadWatch()
        saved = histories.save(str(next(self._names)), behind.tokens, behind.cache)
        turn_s = MarkedSeconds(saved.save_s, watch.disturbed())
        beside_s = self.jobs.beside()
        histories.store.flush()
        saving_s = histories.store.statistics.saving_s - before
        return TimedWay(turn_s, beside_s, None, 0.0 if way == OFF else saving_s, None)


class SavedTurn:
    """A turn with its answer and its save (CachedAttention, figure 20)."""

    def __init__(self, jobs: Jobs, prompt: Sequence[int], steps: int, closing: ExitStack) -> None:
        self.name, self.jobs, self.count, self._prompt, self._steps = "turn", jobs, len(prompt), list(prompt), steps
        ways = {OFF: {"io_threads": 0}, "asynchronous": {}}
        self.ways = {way: jobs.behind.opened(closing, host=ROOM, **settings) for way, settings in ways.items()}

    def run(self, way: str) -> TimedWay:
        behind, histories, prompt = self.jobs.behind, self.ways[way], self._prompt
        talk = Conversation(histories, SESSION, len(prompt) + self._steps, turns=2)
        talk.ask(prompt)
        watch = LoadWatch()
        cache = behind.start(talk.capacity)
        logits = behind.prefill(cache, prompt)
        talk.begin(cache)
        talk.answered(behind.decode(cache, logits, self._steps, talk.decoded), "length")
        saved = talk.save()
        turn_s = watch.seconds()
        beside_s = self.jobs.beside()
        hidden_s = saved.hidden_s()
        histories.store.truncate(SESSION, 0.0)
        return TimedWay(turn_s, beside_s, talk.save_ahead_s + saved.save_s, hidden_s, None)


Measured = LoadedTurn | Save | SavedTurn


def rows_of(measured: Measured, done: Mapping[str, Sequence[TimedWay]]) -> list[dict[str, Any]]:
    """One for each way."""
    off = done[OFF]
    return [
        {
            "tokens": measured.count,
            "what": measured.name,
            "way": way,
            "turn_s": estimate([one.turn_s for one in runs]),
            "waited_s": None if runs[0].waited_s is None else estimate([one.waited_s or 0.0 for one in runs]),
            "hidden_s": estimate([one.hidden_s for one in runs]),
            "beside_s": estimate([one.beside_s for one in runs]),
            "layers": None if runs[0].layers is None else estimate([one.layers or 0 for one in runs]).median,
            "speedup": ratios([one.turn_s for one in off], [one.turn_s for one in runs]),
            "both": ratios([one.both_s for one in off], [one.both_s for one in runs]),
            **marks([one.turn_s for one in runs]),
        }
        for way, runs in done.items()
    ]


TABLE = output.table(
    Cell("", "what", left=True),
    Cell("history or prompt", "tokens", "tokens"),
    Cell("way", "way", left=True),
    Cell("read buffer", "layers", "layers"),
    Cell("TTFT, save or turn", "turn_s", "ms", 1e3),
    Cell("waiting", "waited_s", "ms", 1e3),
    Cell("hidden", "hidden_s", "ms", 1e3),
    Cell("job beside", "beside_s", "ms", 1e3),
    Cell("off / this", "speedup"),
    Cell("with the job beside", "both"),
)


def parser() -> argparse.ArgumentParser:
    tokens = {"nargs": "*", "default": [4096]}
    turns = {"new": 32, "beside": 256, "prompts": [1024, 1312, 1600], "steps": 20, "buffers": [5, 10, 15, 30]}
    return arguments.parser("overlap", __doc__, tokens=tokens, **turns, shape=None, **arguments.RUN)


@torch.inference_mode()
def main(options: argparse.Namespace) -> None:
    if not (options.tokens or options.prompts):
        raise ValueError("There is nothing to measure: give --tokens or --prompts a length.")
    longest = max([*(tokens + options.new for tokens in options.tokens), *options.prompts])
    loaded, text = models.opened(options, longest, options.steps)
    title = (
        f"Loading and saving beside computing: turns of {options.new} tokens, a job of {options.beside} beside them, "
        f"{loaded.name}, {options.dtype}, {options.device}"
    )
    report = output.Report("overlap", title, options, TABLE, model=loaded.name)
    with attached(loaded.model, Full()) as kv:
        for tokens in options.tokens:
            if not report.out_of_time(f"{tokens} tokens"):
                jobs = Jobs(History(kv, loaded, text[: tokens + options.new], tokens), options.beside)
                _loads_and_saves(report, jobs, options.buffers, options.rounds)
        with ExitStack() as closing:
            jobs = Jobs(History(kv, loaded, text, options.beside), options.beside)
            for prompt in options.prompts:
                if not report.out_of_time(f"prompts of {prompt} tokens"):
                    _measure(report, SavedTurn(jobs, text[:prompt], options.steps, closing), options.rounds)
    report.finish()


def _loads_and_saves(report: output.Report, jobs: Jobs, buffers: Sequence[int], rounds: int) -> None:
    with TemporaryFolder("store-", report.folder) as place, ExitStack() as closing:
        for measured in [LoadedTurn(jobs, tier, buffers, place / tier, closing) for tier in TIERS if tier != DEVICE]:
            _measure(report, measured, rounds)
        _measure(report, Save(jobs, place / "save", closing), rounds)


def _measure(report: output.Report, measured: Measured, rounds: int) -> None:
    calls = {way: partial(measured.run, way) for way in measured.ways}
    for call in calls.values():
        call()
    report.measure(f"{measured.name}, {measured.count}", calls, rounds, partial(rows_of, measured), _told)


def _told(row: output.BenchRow) -> str:
    return f"{row['way']} {1e3 * row['turn_s'].median:.0f} ms"
