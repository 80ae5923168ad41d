"""`python -m harness.bench replay`: do steps whose rows cross a link take as long as their replayed schedule?

A method decodes in three ways, in turn: its rows come while the model computes (overlap on), it waits for them (off),
and no link holds them up. The last one says how long computing and copying take here; the replay adds the link by
arithmetic. A link is as fast as brings a layer's rows in --transfer-ms at least. A cell is one method, length, link and
way; it goes on until --rounds of its samples are undisturbed, for three times as many rounds at most, and does not
count with fewer. The prompt's keys and values are random.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from harness.bench import calibrate
from harness.bench.calibrate import Limits
from harness.bench.common import arguments, methods, models, output
from harness.bench.common.load import MarkedSeconds
from harness.bench.common.measure import Estimate, estimate, marks, rounds_of
from harness.bench.common.output import Cell
from harness.bench.decode import CALIBRATION, ModelDecoding, attachment
from harness.engine.hf import routed
from harness.machines.costs import CostTable, LinkCost
from harness.machines.recorder import recorded
from harness.machines.replay import replay
from harness.machines.schedule import TO_DEVICE, LayerBorder, ScheduleEvent, Submitted, TokenOut
from harness.models.base import LoadedModel
from harness.prompts.calibration import calibration_text
from harness.terminal.notices import say
from methods.base import BudgetError, Method
from methods.tiers.tier import HOST
from methods.tiers.transfer.engine import TransferEngine
from methods.tiers.transfer.links import Links

ON, OFF, FREE = "on", "off", "no link"
FAST = 1e15  # a link that holds nothing up
LOW, HIGH = 0.85, 1.20  # live / replayed, of a replay that can be trusted
MOST = 3  # times --rounds


class LiveStep(NamedTuple):
    """A mean step of a turn."""

    seconds: MarkedSeconds
    moved: float  # bytes
    exposed_s: float  # in which the model stood still for rows


class Live:
    """One method over one prompt, in the three ways; `link` is that of the first two."""

    def __init__(
        self, method: Method, loaded: LoadedModel, text: list[int], tokens: int, options: argparse.Namespace
    ) -> None:
        turns = argparse.Namespace(
            **vars(options) | {"rounds": 2 + 3 * MOST * options.rounds * len(options.transfer_ms)}
        )
        ids = torch.tensor([(text * (tokens // len(text) + 1))[-tokens:]], device=loaded.model.device)
        self.link = FAST  # nothing that is recorded depends on it
        self.kv = {way: attachment(method, loaded, text, turns, overlap=way == ON) for way in (ON, OFF)}
        self.engine = TransferEngine(links=Links(FAST))  # of its own, since its links change
        for kv in self.kv.values():
            kv.engine = self.engine
        self.decoding = {way: ModelDecoding(kv, ids, turns) for way, kv in self.kv.items()}
        self.schedules = {way: self._recorded(way) for way in self.kv}

    def close(self) -> None:
        for kv in self.kv.values():
            kv.close()

    def step(self, way: str) -> LiveStep:
        of = ON if way == ON else OFF
        self.engine.links = None if way == FREE else Links(self.link)
        decoding = self.decoding[of]
        seconds = decoding.timed_turn()
        return LiveStep(seconds, decoding.moved[-1], decoding.exposed_s[-1])

    def layer_bytes(self) -> int:
        """The fewest that any layer brings in a step, of those that bring some; 0 where none does. Some of the first
        step's rows were asked for before."""
        sizes, layer, steps = Counter[int](), -1, -2
        for event in self.schedules[OFF]:
            steps += isinstance(event, TokenOut)
            if isinstance(event, LayerBorder):
                layer = event.layer
            elif isinstance(event, Submitted) and event.lane == TO_DEVICE and steps >= 0:
                sizes[layer] += event.nbytes
        return min(sizes.values(), default=0) // steps

    def _recorded(self, way: str) -> list[ScheduleEvent]:
        decoding = self.decoding[way]
        self.engine.links = Links(self.link)
        with recorded(decoding.cache.method_layers) as schedule:
            decoding.turn()
        return list(_with_tokens(schedule))


def _with_tokens(schedule: Sequence[ScheduleEvent]) -> Iterator[ScheduleEvent]:
    """A token before the first step of a turn, and behind each."""
    first = next(event.layer for event in schedule if isinstance(event, LayerBorder))
    for event in schedule:
        if isinstance(event, LayerBorder) and event.layer == first:
            yield TokenOut()
        yield event
    yield TokenOut()


def replayed_s(live: Live, way: str, free: LiveStep, limits: Limits, dtype: str) -> float:
    """A step with its link. Operations share what a step without one took, beside its copies, by the time that each
    takes at the machine's limits."""
    costs = CostTable(read_bytes_s=1e9 * limits["read_gb_s"], flop_s=1e9 * limits["matmul_gflop_s"][dtype])
    slower = (free.seconds - free.exposed_s) / _tpot_s(live.schedules[OFF], costs)
    costs = replace(
        costs,
        read_bytes_s=costs.read_bytes_s / slower,
        flop_s=costs.flop_s / slower,
        copied_bytes_s=free.moved / free.exposed_s,
        to_device=LinkCost(live.link),
        to_host=LinkCost(live.link),
    )
    return _tpot_s(live.schedules[way], costs)


def _tpot_s(schedule: Sequence[ScheduleEvent], costs: CostTable) -> float:
    tpot_s = replay(schedule, costs).tpot_s
    assert tpot_s is not None
    return tpot_s


def measure(live: Live, options: argparse.Namespace, limits: Limits) -> list[dict[str, Any]]:
    """The cells of one link, one with overlap and one without."""
    calls = {way: lambda way=way: live.step(way) for way in (FREE, ON, OFF)}
    ratios: dict[str, list[MarkedSeconds]] = {}
    replayed: dict[str, list[float]] = {}
    for done in rounds_of(calls, MOST * options.rounds):
        free = done[FREE][-1]
        for way in (ON, OFF):
            step = done[way][-1].seconds
            replayed.setdefault(way, []).append(replayed_s(live, way, free, limits, options.dtype))
            disturbed = step.disturbed or free.seconds.disturbed
            ratios.setdefault(way, []).append(MarkedSeconds(step / replayed[way][-1], disturbed))
        if all(len(_undisturbed(ratios[way])) >= options.rounds for way in ratios):
            break
    return [
        {
            "way": way,
            "link_gb_s": live.link / 1e9,
            "tpot_s": estimate([step.seconds for step in done[way]]),
            "free_s": estimate([step.seconds for step in done[FREE]]),
            "replayed_s": estimate(replayed[way]),
            "ratio": estimate(_undisturbed(ratios[way]) or ratios[way]),
            "undisturbed": len(_undisturbed(ratios[way])),
            "counts": len(_undisturbed(ratios[way])) >= options.rounds,
            **marks(ratios[way]),
        }
        for way in ratios
    ]


def _undisturbed(samples: Sequence[MarkedSeconds]) -> list[MarkedSeconds]:
    return [sample for sample in samples if not sample.disturbed]


def run(
    options: argparse.Namespace, loaded: LoadedModel, text: list[int], limits: Limits, report: output.Report
) -> None:
    for tokens in options.tokens:
        for name, method in methods.chosen(options.methods or _offloading(), options.config_dir).items():
            row: dict[str, Any] = {"method": name, "tokens": tokens}
            if report.out_of_time(f"{name} at {tokens}"):
                continue
            try:
                with closing(Live(method, loaded, text, tokens, options)) as live, routed(loaded.model):
                    _cells(live, row, options, limits, report)
            except (BudgetError, torch.OutOfMemoryError) as error:
                report.add(row | {"label": name, "error": str(error)}, f"{name} at {tokens}: {error}")


def _cells(live: Live, row: dict[str, Any], options: argparse.Namespace, limits: Limits, report: output.Report) -> None:
    name = f"{row['method']} at {row['tokens']}"
    if not (moved := live.layer_bytes()):
        report.add(row | {"label": name, "error": "Nothing crosses the link."}, f"{name}: nothing crosses the link")
        return
    for transfer_ms in options.transfer_ms:
        if report.out_of_time(f"{name}, {transfer_ms:g} ms"):
            continue
        live.link = 1e3 * moved / transfer_ms
        for cell in measure(live, options, limits):
            line = f"{name}, {transfer_ms:g} ms, overlap {cell['way']}: live / replayed {cell['ratio'].median:.3f}"
            report.add(row | {"transfer_ms": transfer_ms} | cell, line)


def _offloading() -> list[str]:
    return [*(name for name in methods.names() if methods.load(name).offloads), "full_offloaded"]


def verdict(rows: Sequence[output.BenchRow]) -> str:
    """How many cells are as replayed, of those that count."""
    counting = [Estimate(*row["ratio"]).median for row in rows if row["counts"]]
    near = sum(LOW <= ratio <= HIGH for ratio in counting)
    return (
        f"{near} of {len(counting)} cells lie within {LOW} to {HIGH} times the replay; {len(rows) - len(counting)} "
        "more have too few undisturbed samples to count."
    )


TABLE = output.table(
    Cell("tokens", "tokens"),
    Cell("method", "method", left=True),
    Cell("overlap", "way", left=True),
    Cell("a layer's rows", "transfer_ms", "ms"),
    Cell("link", "link_gb_s", "GB/s"),
    Cell("no link", "free_s", "ms", 1e3),
    Cell("live", "tpot_s", "ms", 1e3),
    Cell("replayed", "replayed_s", "ms", 1e3),
    Cell("live / replayed", "ratio"),
    Cell("undisturbed", "undisturbed", "samples"),
    Cell("counts", lambda row: "yes" if row["counts"] else "no", left=True),
)


def parser() -> argparse.ArgumentParser:
    model = {"shape": None, "layers": None, "transfer_ms": [20.0, 40.0], "methods": [], "config_dir": []}
    shared = model | {"reuse_steps": 0} | arguments.FAST
    made = arguments.parser("replay", __doc__, tokens=[4096], new=6, budget=0.2, **shared)
    made.set_defaults(synthetic=True, graphs=False, placement=HOST, link=FAST, device="cpu")
    return made


@torch.inference_mode()
def main(options: argparse.Namespace) -> None:
    if options.device != "cpu":
        raise ValueError("A link stands for a bus that a CPU does not have: use --device cpu.")
    if options.new < 4:
        raise ValueError(f"--new {options.new} leaves no step to time behind the second token: use at least 4.")
    methods.chosen(options.methods, options.config_dir)  # a wrong name is found now
    limits = calibrate.told(options.device)
    source = models.source(options.shape, options.layers)
    loaded = source.load(options.dtype, options.device)
    text = calibration_text(source.tokenizer(), CALIBRATION)
    title = (
        f"Live against replayed steps with {loaded.name}, {options.dtype}, budget {options.budget}, placement {HOST}; "
        "prompt KV synthetic"
    )
    facts = {"limits": limits, "synthetic": True, "model": loaded.name}
    report = output.Report("replay", title, options, TABLE, **facts)
    run(options, loaded, text, limits, report)
    say(verdict(report.finish(_draw)))


def _draw(path: Any, rows: Sequence[output.BenchRow], title: str) -> None:
    shown = [
        {**row, "label": f"{row['method']}, {row['tokens']}, {row['transfer_ms']:g} ms, overlap {row['way']}"}
        for row in rows
    ]
    output.bars(path, shown, label="label", y="ratio", unit="live / replayed", title=title)
