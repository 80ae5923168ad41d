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
from typing import Any, NamedTuple

import torch

from harness.bench.common import arguments, methods, models, output
from harness.bench.common.history import SESSION, History, forget
from harness.bench.common.load import LoadWatch
from harness.bench.common.measure import estimate, marks, ratios
from harness.bench.common.output import Cell
from harness.conversations.conversation import Conversation
from harness.conversations.histories import DevicePrefix, Histories, Recompute
from harness.engine.attach import attached
from harness.history.store import HistoryStore
from kernels.temporary import TemporaryFolder
from methods.tiers.tier import DEVICE, TIERS, tier_of

RECOMPUTE, STAYED = "recompute", "device_prefix"


class TimedTurn(NamedTuple):
    ttft_s: float
    load_s: float  # of it, waiting for layers
    hidden_s: float  # in which layers came beside the computing
    token: int
    storage_bytes: int  # read from there meanwhile, by this process


class TurnBehind:
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
    def run(self, way: str) -> TimedTurn:
        self.prepare(way)
        read, talk = from_storage(), Conversation(self.ways[way], SESSION, len(self.behind.text), turns=1)
        talk.ask(self.behind.text)
        watch = LoadWatch()
        talk.resume()
        token = self.behind.first_token(talk)
        seconds = watch.seconds()
        found, expected = talk.found, {RECOMPUTE: None, STAYED: DEVICE}.get(way, way)
        if found.tier != expected:
            raise ValueError(f"{way}: the history was found in {found.tier}; give the store more room.")
        return TimedTurn(seconds, found.load_s, found.hidden_s, token, from_storage() - read)

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


def rows_of(method: str, turn: TurnBehind, done: Mapping[str, Sequence[TimedTurn]]) -> list[dict[str, Any]]:
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


TABLE = output.table(
    Cell("method", "method", left=True),
    Cell("history", "tokens", "tokens"),
    Cell("comes from", "way", left=True),
    Cell("TTFT", "ttft_s", "ms", 1e3),
    Cell("waiting for rows", "load_s", "ms", 1e3),
    Cell("hidden", "hidden_s", "ms", 1e3),
    Cell("recompute / this", "speedup"),
    Cell("stored", "stored_bytes", "MB", 1e-6),
    Cell("read from storage", output.some("storage_bytes"), "MB", 1e-6),
    Cell("first token", lambda row: "same" if row["same_token"] else "other", left=True),
)


def parser() -> argparse.ArgumentParser:
    shared = {"methods": ["full"], "config_dir": [], "budget": 0.2, "shape": None} | arguments.RUN
    return arguments.parser("history", __doc__, tokens=[512, 1024, 2048, 4096], new=32, **shared)


def main(options: argparse.Namespace) -> None:
    chosen = methods.chosen(options.methods, options.config_dir)
    loaded, text = models.opened(options, max(options.tokens) + options.new, 0)
    title = f"A further turn of {options.new} tokens: {loaded.name}, {options.dtype}, {options.device}"
    report = output.Report("history", title, options, TABLE, model=loaded.name)
    for name, method in chosen.items():
        with attached(loaded.model, method, budget=options.budget, calibration=torch.tensor([text])) as kv:
            for tokens in options.tokens:
                if not report.out_of_time(f"{name} behind {tokens} tokens"):
                    behind = History(kv, loaded, text[: tokens + options.new], tokens)
                    _measure(report, name, behind, options.rounds)
    labels = ("tokens of history", "seconds to the first token")
    report.finish(partial(output.lines, x="tokens", y="ttft_s", series="series", labels=labels))


def _measure(report: output.Report, method: str, behind: History, rounds: int) -> None:
    with TemporaryFolder("store-", report.folder) as folder, ExitStack() as closing:
        turn = TurnBehind(behind, folder, closing)
        for way in (STAYED, *TIERS):
            turn.run(way)
        calls = {way: partial(turn.run, way) for way in turn.ways}
        what = f"{method} behind {behind.count} tokens"
        report.measure(what, calls, rounds, partial(rows_of, method, turn), _told)


def _told(row: output.BenchRow) -> str:
    return f"{row['way']} {1e3 * row['ttft_s'].median:.0f} ms"
