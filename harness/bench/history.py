"""`python -m harness.bench history`: what a further turn waits for its first token, by where its history lies.

A turn of --new tokens comes behind --tokens of history: computed again, in a cache that stayed on the device, or loaded
from the device, host or disk tier of a store. All ways take turns; ratios are of neighbours. Disk is cold: before each
turn the system is told to forget the store's files, and what the turn then read from storage is in the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from harness.bench.common import arguments, methods, models, output
from harness.bench.common.history import SESSION, History, forget
from harness.bench.common.load import Watch
from harness.bench.common.measure import Seconds, estimate, marks, ratios, rounds_of
from harness.conversations.conversation import Conversation
from harness.conversations.histories import DevicePrefix, Histories, Recompute
from harness.engine.attach import Attachment, attached
from harness.history.store import HistoryStore
from harness.models.base import LoadedModel
from harness.prompts.calibration import calibration_text
from harness.terminal.tables import Column
from kernels.temporary import TemporaryFolder
from methods.tiers.tier import DEVICE, TIERS, tier_of

RECOMPUTE, STAYED = "recompute", "device_prefix"


class Timed(NamedTuple):
    ttft_s: float
    load_s: float  # of it, waiting for layers
    hidden_s: float  # in which layers came beside the computing
    token: int
    storage_bytes: int  # read from there meanwhile, by this process


class Turn:
    """A turn behind a history, in every way."""

    def __init__(self, behind: History, folder: Path, closing: ExitStack) -> None:
        self.behind, self.folder = behind, folder
        self.ways: dict[str, Histories] = {RECOMPUTE: Recompute(behind.start), STAYED: DevicePrefix(behind.start)}
        self.stores: dict[str, HistoryStore] = {}
        for tier in TIERS:
            stored = behind.stored(tier, folder, closing)
            self.ways[tier], self.stores[tier] = stored, stored.store

    def prepare(self, way: str) -> None:
        """In no clock: a cache that stays has taken in the turn before; the system may have kept the files."""
        if way == STAYED:
            cache = self.behind.start(len(self.behind.text))
            cache.refill(self.behind.cache.contents())
            self.ways[way].save(SESSION, self.behind.tokens, cache)
        if way in TIERS and tier_of(way).in_files:
            forget(self.folder)

    @torch.inference_mode()
    def run(self, way: str) -> Timed:
        self.prepare(way)
        read, talk = from_storage(), Conversation(self.ways[way], SESSION, len(self.behind.text), turns=1)
        talk.ask(self.behind.text)
        watch, began = Watch(), perf_counter()
        talk.resume()
        token = self.behind.first_token(talk)
        seconds = Seconds(perf_counter() - began, watch.disturbed())
        found, expected = talk.found, {RECOMPUTE: None, STAYED: DEVICE}.get(way, way)
        if found.tier != expected:
            raise ValueError(f"{way}: the history was found in {found.tier}; give the store more room.")
        return Timed(seconds, found.load_s, found.hidden_s, token, from_storage() - read)

    def stored_bytes(self, way: str) -> int | None:
        return sum(self.stores[way].bytes_by_tier().values()) if way in self.stores else None


def from_storage() -> int:
    """Bytes that this process has had fetched from storage so far; 0 where the system does not count."""
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                return int(value)
    return 0


def rows_of(method: str, turn: Turn, done: Mapping[str, Sequence[Timed]]) -> list[dict[str, Any]]:
    """One for each way."""
    again = done[RECOMPUTE]
    return [
        {
            "method": method,
            "tokens": turn.behind.count,
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
    return [
        output.column("method", "", rows, lambda row: row["method"], left=True),
        output.column("history", "tokens", rows, lambda row: str(row["tokens"])),
        output.column("comes from", "", rows, lambda row: row["way"], left=True),
        output.column("TTFT", "ms", rows, output.scaled("ttft_s", 1e3)),
        output.column("waiting for rows", "ms", rows, output.scaled("load_s", 1e3)),
        output.column("hidden", "ms", rows, output.scaled("hidden_s", 1e3)),
        output.column("recompute / this", "", rows, lambda row: row["speedup"]),
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
    with TemporaryFolder("store-", report.folder) as folder, ExitStack() as closing:
        turn = Turn(History(kv, loaded, text, tokens), folder, closing)
        for way in (STAYED, *TIERS):
            turn.run(way)
        calls = {way: partial(turn.run, way) for way in turn.ways}
        for number, done in enumerate(rounds_of(calls, rounds), start=1):
            rows = rows_of(name, turn, done)
            told = (f"{row['way']} {1e3 * row['ttft_s'].median:.0f} ms" for row in rows)
            report.show([*before, *rows], f"{name} behind {tokens} tokens, round {number}: {', '.join(told)}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.bench history", description=__doc__)
    made.add_argument(
        "--tokens", nargs="+", type=arguments.count, default=[512, 1024, 2048, 4096], help="lengths of the history"
    )
    made.add_argument("--new", type=arguments.count, default=32, help="tokens of the turn")
    made.add_argument("--methods", nargs="*", default=["full"], help="names, or quest:select_per=kv_head")
    made.add_argument("--budget", type=arguments.budget, default=0.2)
    models.add_run(made)
    return made
