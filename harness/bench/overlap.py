"""`python -m harness.bench overlap`: what loading and saving a history cost a turn, beside its computing and before it.

Loading: a turn of --new tokens comes behind --tokens of stored history, and another job runs until it begins. `off`:
all layers are loaded, then the turn computes. `buffer 0`: it computes while they come. `buffer n`: n layers come while
the job before is running; `formula` is the paper's size, from what the rounds so far have measured. Saving: a history
goes to disk, and another job begins when the save returns. The pages of files are cold. All ways take turns; ratios are
of neighbours. Those with the job beside say whether loading has slowed it down.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.bench.common import arguments, models, output
from harness.bench.common.load import Watch
from harness.bench.common.measure import Seconds, estimate, marks, ratios
from harness.bench.history import ROOM, SESSION, forget
from harness.conversations.fingerprint import fingerprint
from harness.conversations.stored import StoredHistories
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.history.store import HistoryStore
from harness.models.base import LoadedModel
from harness.prompts.calibration import calibration_text
from harness.terminal.tables import Column
from methods.full import Full

OFF, FORMULA = "off", "formula"


class Timed(NamedTuple):
    """Seconds."""

    turn_s: float  # until the first token, or of a save
    beside_s: float  # of the job before the turn, or behind the save
    waited_s: float | None  # for rows
    hidden_s: float
    layers: int | None  # in the read buffer

    @property
    def both_s(self) -> float:
        return self.turn_s + self.beside_s


class Jobs:
    """A model with a text, whose beginning is a history; the job beside computes --beside tokens of it."""

    def __init__(self, kv: Attachment, loaded: LoadedModel, text: Sequence[int], history: int, beside: int) -> None:
        self.kv, self.loaded, self.text, self.history = kv, loaded, list(text), history
        self.engine, self._other = Engine(kv), self.text[:beside]
        self.saved = self.start(history)
        self.prefill(self.saved, self.text[:history])
        self.saved.seal()

    def start(self, capacity: int) -> KVCache:
        return self.kv.start(KVCache, capacity=capacity)

    def prefill(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        return self.engine.prefill(cache, torch.tensor([tokens], device=self.kv.model.device))

    def beside(self) -> float:
        """-> seconds"""
        began = perf_counter()
        int(self.prefill(self.start(len(self._other)), self._other).argmax())
        return perf_counter() - began

    def histories(self, closing: ExitStack, **settings: Any) -> StoredHistories:
        on = str(self.kv.model.device)
        store = closing.enter_context(HistoryStore(fingerprint(self.kv, self.loaded), on=on, **settings))
        return StoredHistories(self.start, self.kv, store)


class Load:
    """Of one tier."""

    def __init__(self, jobs: Jobs, tier: str, buffers: Sequence[int], folder: Path, closing: ExitStack) -> None:
        self.name, self.jobs, self.folder = f"load from {tier}", jobs, folder
        place: dict[str, Any] = {tier: ROOM, "folder": folder if tier == "disk" else None}
        self.histories = jobs.histories(closing, **place)
        self.histories.save(SESSION, jobs.text[: jobs.history], jobs.saved)
        self.histories.store.flush()
        self.ways: dict[str, int | None] = {OFF: 0, **{f"buffer {layers}": layers for layers in (0, *buffers)}}
        self.ways[FORMULA] = None
        self.tokens: set[int] = set()  # the first of every answer

    def run(self, way: str) -> Timed:
        jobs, histories = self.jobs, self.histories
        forget(self.folder)
        histories.read_buffer = self.ways[way]
        histories.ahead(SESSION, jobs.text[:-1])
        beside_s = jobs.beside()
        watch, began = Watch(), perf_counter()
        found = histories.resume(SESSION, jobs.text[:-1], len(jobs.text))
        loading = found.loading
        assert loading is not None
        if way == OFF:
            found.cache.await_layers()
        found, logits = histories.compute(found, jobs.text, jobs.prefill)
        assert logits is not None
        token = int(logits.argmax())
        turn_s = Seconds(perf_counter() - began, watch.disturbed())
        self.tokens.add(token)
        assert len(self.tokens) == 1
        return Timed(turn_s, beside_s, found.load_s, found.hidden_s, loading.overlap.read_buffer)


class Save:
    """Of a whole history."""

    def __init__(self, jobs: Jobs, folder: Path, closing: ExitStack) -> None:
        self.name, self.jobs, self._names = "save to disk", jobs, count()
        ways = {OFF: {"write_buffer": 0}, "write buffer": {"write_buffer": ROOM}}
        size = {"disk": 2 * sum(x.nbytes for state in jobs.saved.contents() for x in state.values())}
        self.ways = {
            way: jobs.histories(closing, folder=folder / way, **size, **settings) for way, settings in ways.items()
        }

    def run(self, way: str) -> Timed:
        jobs, histories = self.jobs, self.ways[way]
        before = histories.store.statistics.saving_s
        watch = Watch()
        save_s = histories.save(str(next(self._names)), jobs.text[: jobs.history], jobs.saved)
        turn_s = Seconds(save_s, watch.disturbed())
        beside_s = jobs.beside()
        histories.store.flush()
        saving_s = histories.store.statistics.saving_s - before
        return Timed(turn_s, beside_s, None, 0.0 if way == OFF else saving_s, None)


def rounds_of(measured: Load | Save, rounds: int) -> Iterator[Mapping[str, Sequence[Timed]]]:
    """Every way `rounds` times in turn, the order turning round from round to round: all runs so far, after each."""
    for way in measured.ways:
        measured.run(way)
    done: dict[str, list[Timed]] = {way: [] for way in measured.ways}
    for place in range(rounds):
        for way in list(done)[:: -1 if place % 2 else 1]:
            done[way].append(measured.run(way))
        yield done


def rows_of(measured: Load | Save, done: Mapping[str, Sequence[Timed]]) -> list[dict[str, Any]]:
    """One for each way."""
    off = done[OFF]
    return [
        {
            "tokens": measured.jobs.history,
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


def table(rows: Sequence[output.Row]) -> list[Column]:
    def ms(key: str) -> Callable[[output.Row], list[float] | None]:
        return lambda row: None if row[key] is None else [1e3 * value for value in row[key]]

    return [
        output.column("", "", rows, lambda row: row["what"], left=True),
        output.column("history", "tokens", rows, lambda row: str(row["tokens"])),
        output.column("way", "", rows, lambda row: row["way"], left=True),
        output.column("read buffer", "layers", rows, lambda row: row["layers"]),
        output.column("TTFT or save", "ms", rows, ms("turn_s")),
        output.column("waiting for rows", "ms", rows, ms("waited_s")),
        output.column("hidden", "ms", rows, ms("hidden_s")),
        output.column("job beside", "ms", rows, ms("beside_s")),
        output.column("off / this", "", rows, lambda row: row["speedup"]),
        output.column("with the job beside", "", rows, lambda row: row["both"]),
    ]


@torch.inference_mode()
def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    source = models.source(options.shape)
    loaded = source.load(options.dtype, options.device)
    models.check_window(loaded, max(options.tokens), options.new)
    text = calibration_text(source.tokenizer(), max(options.tokens) + options.new)
    title = (
        f"Loading and saving beside computing: turns of {options.new} tokens, a job of {options.beside} beside them, "
        f"{loaded.name}, {options.dtype}, {options.device}"
    )
    report = output.Report("overlap", title, options, table, model=loaded.name)
    with attached(loaded.model, Full()) as kv:
        for tokens in options.tokens:
            if not report.out_of_time(f"{tokens} tokens"):
                jobs = Jobs(kv, loaded, text[: tokens + options.new], tokens, options.beside)
                _measure(report, jobs, options.buffers, options.rounds)
    report.finish()
    return 0


def _measure(report: output.Report, jobs: Jobs, buffers: Sequence[int], rounds: int) -> None:
    with TemporaryDirectory(dir=report.folder) as folder, ExitStack() as closing:
        place = Path(folder)
        loads = [Load(jobs, tier, buffers, place / tier, closing) for tier in ("host", "disk")]
        kinds: list[Load | Save] = [*loads, Save(jobs, place / "save", closing)]
        for measured in kinds:
            before = report.rows
            for number, done in enumerate(rounds_of(measured, rounds), start=1):
                rows = rows_of(measured, done)
                told = (f"{row['way']} {1e3 * row['turn_s'].median:.0f} ms" for row in rows)
                report.show([*before, *rows], f"{measured.name}, {jobs.history}, round {number}: {', '.join(told)}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.bench overlap", description=__doc__)
    made.add_argument("--tokens", nargs="*", type=int, default=[4096], help="lengths of the history")
    made.add_argument("--new", type=int, default=32, help="tokens of the turn")
    made.add_argument("--beside", type=int, default=256, help="tokens of the job before a turn, behind a save")
    made.add_argument("--buffers", nargs="*", type=int, default=[5, 10, 15, 30], help="layers of the read buffer")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    made.add_argument("--device", default="cpu", type=arguments.device)
    models.add_shape(made)
    arguments.add_out(made)
    return made
