"""`python -m harness.bench history`: what a further turn waits for its first token, by where its history lies.

A turn of --new tokens comes behind --tokens of history: computed again, in a cache that stayed on the device, or loaded
from the device, host or disk tier of a store. All ways take turns; ratios are of neighbours. Disk is cold: before each
turn the system is told to forget the store's files, and what the turn then read from storage is in the table.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.bench.common import arguments, methods, models, output
from harness.bench.common.load import Watch
from harness.bench.common.measure import Seconds, estimate, marks, ratios
from harness.conversations.fingerprint import fingerprint
from harness.conversations.histories import DevicePrefix, Histories, Recompute
from harness.conversations.stored import StoredHistories
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.history.store import HistoryStore
from harness.models.base import LoadedModel
from harness.prompts.calibration import calibration_text
from harness.terminal.tables import Column

SESSION = "session"
RECOMPUTE, STAYED, TIERS = "recompute", "device_prefix", ("device", "host", "disk")
ROOM = 1 << 50  # bytes of a tier: all there is


class Timed(NamedTuple):
    ttft_s: float
    load_s: float  # of it, waiting for layers
    hidden_s: float  # in which layers came beside the computing
    token: int
    storage_bytes: int  # read from there meanwhile, by this process


class Turn:
    """A turn behind `history` tokens of `text`, in every way."""

    def __init__(
        self, kv: Attachment, loaded: LoadedModel, text: Sequence[int], history: int, folder: Path, closing: ExitStack
    ) -> None:
        self.kv, self.text, self.history, self.folder = kv, list(text), history, folder
        self.engine = Engine(kv)
        self.first = self._start(history)
        self._prefill(self.first, self.text[:history])
        self.first.seal()
        self.ways: dict[str, Histories] = {RECOMPUTE: Recompute(self._start), STAYED: DevicePrefix(self._start)}
        self.stores: dict[str, HistoryStore] = {}
        for tier in TIERS:
            place: dict[str, Any] = {tier: ROOM, "folder": folder if tier == "disk" else None}
            store = HistoryStore(fingerprint(kv, loaded), **place, on=str(kv.model.device))
            self.stores[tier] = closing.enter_context(store)
            self.ways[tier] = StoredHistories(self._start, kv, store)
            self.ways[tier].save(SESSION, self.text[:history], self.first)
            store.flush()

    def _prefill(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        return self.engine.prefill(cache, torch.tensor([tokens], device=self.kv.model.device))

    def _start(self, capacity: int) -> KVCache:
        return self.kv.start(KVCache, capacity=capacity)

    def prepare(self, way: str) -> None:
        """In no clock: a cache that stays has taken in the turn before; the system may have kept the files."""
        if way == STAYED:
            cache = self._start(len(self.text))
            cache.refill(self.first.contents())
            self.ways[way].save(SESSION, self.text[: self.history], cache)
        if way == "disk":
            forget(self.folder)

    @torch.inference_mode()
    def run(self, way: str) -> Timed:
        self.prepare(way)
        read, histories = from_storage(), self.ways[way]
        watch, began = Watch(), perf_counter()
        found, logits = histories.compute(
            histories.resume(SESSION, self.text[:-1], len(self.text)), self.text, self._prefill
        )
        assert logits is not None
        token = int(logits.argmax())
        seconds = Seconds(perf_counter() - began, watch.disturbed())
        expected = {RECOMPUTE: None, STAYED: "device"}.get(way, way)
        if found.tier != expected:
            raise ValueError(f"{way}: the history was found in {found.tier}; give the store more room.")
        return Timed(seconds, found.load_s, found.hidden_s, token, from_storage() - read)

    def stored_bytes(self, way: str) -> int | None:
        return sum(self.stores[way].bytes_by_tier().values()) if way in self.stores else None


def forget(folder: Path) -> None:
    """Lets the system drop the pages of all files in `folder`, which are on disk already."""
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_storage() -> int:
    """Bytes that this process has had fetched from storage so far; 0 where the system does not count."""
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                return int(value)
    return 0


def rounds_of(turn: Turn, rounds: int) -> Iterator[Mapping[str, Sequence[Timed]]]:
    """Every way `rounds` times in turn, the order turning round from round to round: all runs so far, after each."""
    for way in (STAYED, *TIERS):
        turn.run(way)
    done: dict[str, list[Timed]] = {way: [] for way in turn.ways}
    for place in range(rounds):
        for way in list(done)[:: -1 if place % 2 else 1]:
            done[way].append(turn.run(way))
        yield done


def rows_of(method: str, turn: Turn, done: Mapping[str, Sequence[Timed]]) -> list[dict[str, Any]]:
    """One for each way."""
    again = done[RECOMPUTE]
    return [
        {
            "method": method,
            "tokens": turn.history,
            "way": way,
            "series": f"{method} {way}",
            "ttft_s": estimate([one.ttft_s for one in runs]),
            "load_s": None if way == RECOMPUTE else estimate([one.load_s for one in runs]),
            "hidden_s": estimate([one.hidden_s for one in runs]) if turn.stored_bytes(way) else None,
            "speedup": ratios([one.ttft_s for one in again], [one.ttft_s for one in runs]),
            "same_token": all(one.token == again[0].token for one in runs),
            "stored_bytes": turn.stored_bytes(way),
            "storage_bytes": median(one.storage_bytes for one in runs),
            **marks([one.ttft_s for one in runs]),
        }
        for way, runs in done.items()
    ]


def table(rows: Sequence[output.Row]) -> list[Column]:
    def scaled(key: str, factor: float) -> Callable[[output.Row], list[float] | None]:
        return lambda row: None if row[key] is None else [value * factor for value in row[key]]

    return [
        output.column("method", "", rows, lambda row: row["method"], left=True),
        output.column("history", "tokens", rows, lambda row: str(row["tokens"])),
        output.column("comes from", "", rows, lambda row: row["way"], left=True),
        output.column("TTFT", "ms", rows, scaled("ttft_s", 1e3)),
        output.column("waiting for rows", "ms", rows, scaled("load_s", 1e3)),
        output.column("hidden", "ms", rows, scaled("hidden_s", 1e3)),
        output.column("recompute / this", "", rows, scaled("speedup", 1)),
        output.column("stored", "MB", rows, lambda row: row["stored_bytes"] and row["stored_bytes"] / 1e6),
        output.column("read from storage", "MB", rows, lambda row: row["storage_bytes"] / 1e6 or None),
        output.column("first token", "", rows, lambda row: "same" if row["same_token"] else "other", left=True),
    ]


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    source = models.source(options.shape)
    loaded = source.load(options.dtype, options.device)
    models.check_window(loaded, max(options.tokens), options.new)
    text = calibration_text(source.tokenizer(), max(options.tokens) + options.new)
    chosen = methods.chosen(options.methods)
    title = f"A further turn of {options.new} tokens: {loaded.name}, {options.dtype}, {options.device}"
    report = output.Report("history", title, options, table, model=loaded.name)
    for name, method in chosen.items():
        with attached(loaded.model, method, budget=options.budget, calibration=torch.tensor([text])) as kv:
            for tokens in options.tokens:
                if not report.out_of_time(f"{name} behind {tokens} tokens"):
                    _measure(report, name, kv, loaded, text[: tokens + options.new], tokens, options.rounds)
    shown = report.finish()
    if not options.no_plot:
        labels = ("tokens of history", "seconds to the first token")
        axes: dict[str, Any] = {"x": "tokens", "y": "ttft_s", "series": "series", "labels": labels}
        output.lines(report.folder / "plot.png", shown, title=title, **axes)
    return 0


def _measure(
    report: output.Report, name: str, kv: Attachment, loaded: LoadedModel, text: Sequence[int], tokens: int, rounds: int
) -> None:
    before = report.rows
    with TemporaryDirectory(dir=report.folder) as folder, ExitStack() as closing:
        turn = Turn(kv, loaded, text, tokens, Path(folder), closing)
        for number, done in enumerate(rounds_of(turn, rounds), start=1):
            rows = rows_of(name, turn, done)
            told = (f"{row['way']} {1e3 * row['ttft_s'].median:.0f} ms" for row in rows)
            report.show([*before, *rows], f"{name} behind {tokens} tokens, round {number}: {', '.join(told)}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.bench history", description=__doc__)
    made.add_argument("--tokens", nargs="*", type=int, default=[512, 1024, 2048, 4096], help="lengths of the history")
    made.add_argument("--new", type=int, default=32, help="tokens of the turn")
    made.add_argument("--methods", nargs="*", default=["full"], help="names, or quest:select_per=kv_head")
    made.add_argument("--budget", type=arguments.budget, default=0.2)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    made.add_argument("--device", default="cpu", type=arguments.device)
    models.add_shape(made)
    arguments.add_out(made)
    return made
