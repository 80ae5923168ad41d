"""`python -m harness.bench decode`: time per output token against context length, for every method.

A method's cache and Full's over the same prompt decode in turn, a few tokens at a time; the seal and the first two
tokens of each turn are not counted. With random weights, or `--synthetic`, nobody computes the prompt: its keys and
values are random, as prefill is not the question. With `--link` a method whose rows lie elsewhere decodes in two ways,
in turn: its rows come while the model computes, and they come while it waits for them. On a CPU each layer's attention
is clocked as well: what weights take of a step, and with `--layers` what a step of all layers would.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.bench import calibrate
from harness.bench.calibrate import Limits
from harness.bench.common import arguments, methods, models, output
from harness.bench.common.all_layers import AttentionClock, Clocked, WholeModel, weights
from harness.bench.common.load import LoadWatch, MarkedSeconds
from harness.bench.common.measure import estimate, marks, ratios, rounds_of
from harness.bench.common.output import Cell
from harness.bench.common.synthetic import LayerShape
from harness.engine.attach import Attachment
from harness.engine.batch.generation import Generation
from harness.engine.engine import Engine
from harness.engine.graph import graphs_on
from harness.engine.hf import routed
from harness.machines.costs import CostTable
from harness.machines.recorder import recorded
from harness.machines.replay import replay
from harness.models.base import LoadedModel
from harness.models.random import SHAPES
from harness.prompts.calibration import calibration_text
from methods.base import Method
from methods.full import Full
from methods.tiers.tier import DEVICE, TIERS
from methods.tiers.transfer.links import Links

Attach = Callable[..., Attachment]
CALIBRATION = 4096  # tokens of ordinary text for methods that calibrate themselves


class ModelDecoding:
    """A cache over `prompt` [1 S] that decodes turn after turn; the model is routed meanwhile."""

    def __init__(self, kv: Attachment, prompt: Tensor, options: argparse.Namespace) -> None:
        self.engine = Engine(kv, graphs=graphs_on(kv.model.device) if options.graphs else None)
        self.new, self.question = options.new, prompt[:, :0]
        self.cache = self.engine.cache(prompt, options.new * (options.rounds + 1))
        if options.synthetic:
            _shape(kv).fill(self.cache.layers, prompt.shape[1], attending=not kv.method.dense_prefill)
            self.cache.num_tokens = prompt.shape[1]
            self.logits = torch.zeros(1, kv.model.config.vocab_size, device=kv.model.device)
        else:
            self.logits = self.engine.prefill(self.cache, prompt, whole=True)
        self.first = self.turn()  # with the seal; not counted
        self.cache.state.checks.on = False  # every turn of this cache would be checked as the first one of a run is
        calls = kv.model.device.type == "cpu" and not options.graphs  # which a replayed step does not make
        self.clock = AttentionClock(self.cache.method_layers if calls else [])
        self.attention_s: list[list[float] | None] = []  # per step of a turn, of each layer
        self.moved: list[float] = []
        self.exposed_s: list[float] = []  # per step of a turn
        self.hidden_s: list[float] = []

    def turn(self) -> Generation:
        """`new` tokens, the first of which is not computed; each turn begins with the prompt's next token."""
        return self.engine.complete(
            self.cache, self.logits, self.question, began=perf_counter(), max_new_tokens=self.new
        )

    def timed_turn(self) -> MarkedSeconds:
        """Of a token behind the second."""
        traffic = self.cache.traffic
        before, watch = replace(traffic), LoadWatch()
        self.last = self.turn()
        disturbed, steps = watch.disturbed(), self.new - 1
        self.moved.append((traffic.total_bytes - before.total_bytes) / steps)
        self.exposed_s.append((traffic.exposed_s - before.exposed_s) / steps)
        self.hidden_s.append((traffic.hidden_s - before.hidden_s) / steps)
        self.attention_s.append(self.clock.taken())
        times = self.last.token_s
        return MarkedSeconds((times[-1] - times[1]) / (len(times) - 2), disturbed)

    def clocked(self, times: Sequence[float]) -> list[Clocked]:
        """Give each turn's time with its attention: their difference is what a step takes beside."""
        method = self.engine.attachment.method
        return [Clocked(method, *turn) for turn in zip(times, self.attention_s, strict=True)]


def _shape(kv: Attachment) -> LayerShape:
    spec = kv.specs[0]
    return LayerShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, kv.model.dtype, kv.model.device)


def measure(
    attach: Attach, full: Attachment, ids: Tensor, options: argparse.Namespace, limits: Limits
) -> dict[str, Any]:
    """Of one row. ids [1 S]: the prompt."""
    with ExitStack() as attachments:
        asked = attachments.enter_context(closing(attach(overlap=options.overlap or options.link is not None)))
        attachments.enter_context(routed(asked.model))
        own, beside = (ModelDecoding(kv, ids, options) for kv in (asked, full))
        ways = {"own": own.timed_turn, "full": beside.timed_turn}
        if asked.ahead:
            waiting = attachments.enter_context(closing(attach(overlap=False)))
            ways["waiting"] = ModelDecoding(waiting, ids, options).timed_turn
        *_, times = rounds_of(ways, options.rounds)
        in_threads = asked.ahead and asked.engine.beside  # whose order no recording knows
        replayed = None if in_threads else replayed_s(own, limits, options.dtype)
    tpot_s, made = estimate(times["own"]), own.last
    layers = here = len(own.cache.method_layers)
    if options.shape and here == asked.model.config.num_hidden_layers:  # none of them slides
        layers = SHAPES[options.shape]["num_hidden_layers"]
    floor = floor_s(own, limits["read_gb_s"])
    return {
        "tpot_s": tpot_s,
        "full_s": estimate(times["full"]),
        "speedup": None if asked.method == full.method else ratios(times["full"], times["own"]),
        "floor_s": floor,
        "of_limit": floor / tpot_s.median,
        "replayed_s": replayed,
        **WholeModel(layers, weights(asked.model)).beside(beside.clocked(times["full"]), own.clocked(times["own"])),
        "seal_s": own.first.seal_s,
        "capture_s": made.capture_s,
        "plain_steps": own.engine.plain_steps,
        "attended_prompt": made.measured.get("attended_prompt"),
        **{f"{tier}_bytes": size for tier, size in made.kv.items()},
        "moved_bytes_per_step": fmean(own.moved),
        "exposed_s": fmean(own.exposed_s) if asked.ahead else None,
        "hidden_s": fmean(own.hidden_s) if asked.ahead else None,
        "waiting_s": estimate(times["waiting"]) if "waiting" in times else None,
        "saved": ratios(times["own"], times["waiting"]) if "waiting" in times else None,
        "fallback": made.fallback,
        **marks(*times.values()),
    }


def attachment(
    method: Method, loaded: LoadedModel, text: list[int], options: argparse.Namespace, overlap: bool = False
) -> Attachment:
    placement: str = options.placement if method.offloads else DEVICE
    reuse_steps = options.reuse_steps if method.uses_budget else 0
    calibration, links = torch.tensor([text]), Links(options.link) if options.link else None
    return Attachment(
        loaded.model, method, options.budget, placement, calibration, reuse_steps, overlap=overlap, links=links
    )


def floor_s(decoding: ModelDecoding, read_gb_s: float) -> float:
    """A step that does nothing but read the weights and the keys and values it attends to, once each."""
    model, specs = decoding.engine.model, decoding.engine.attachment.specs
    attended = decoding.last.measured.get("attended_total") or 0.0
    rows = sum(2 * spec.num_kv_heads * spec.head_dim * attended for spec in specs) * model.dtype.itemsize
    return (weights(model).total + rows) / read_gb_s / 1e9


@torch.inference_mode()
def replayed_s(decoding: ModelDecoding, limits: Limits, dtype: str) -> float:
    """A step whose every operation takes no more than what it reads and writes at the best bandwidth, or its products
    at the best speed; bytes cross links in no time."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=decoding.engine.model.device)
    with recorded(decoding.cache.method_layers) as schedule:
        decoding.engine.decode(token, decoding.cache, None)
    flop_s = 1e9 * limits["matmul_gflop_s"][dtype]
    return replay(schedule, CostTable(read_bytes_s=1e9 * limits["read_gb_s"], flop_s=flop_s)).end_s


def run(
    options: argparse.Namespace, loaded: LoadedModel, text: list[int], limits: Limits, report: output.Report
) -> None:
    full = attachment(Full(), loaded, text[-CALIBRATION:], options)

    def behind(tokens: int) -> methods.MeasureMethod:
        ids = torch.tensor([_prompt(text, tokens, loaded, options)], device=loaded.model.device)
        return lambda method: measure(
            partial(attachment, method, loaded, text[-CALIBRATION:], options), full, ids, options, limits
        )

    def told(row: dict[str, Any]) -> str:
        beside = f", {row['speedup'].median:.2f} x Full" if row["speedup"] else ""
        return f"{row['tpot_s'].median * 1e3:.2f} ms{beside}"

    methods.measured(options, report, behind, told)


def _prompt(text: list[int], tokens: int, loaded: LoadedModel, options: argparse.Namespace) -> list[int]:
    """The last of `text`, repeated where it is too short and nobody reads it."""
    if options.synthetic:
        return (text * (tokens // len(text) + 1))[-tokens:]
    needed = tokens + options.new * (options.rounds + 1)
    if needed > loaded.window or tokens > len(text):
        raise ValueError(
            f"--tokens {tokens} with its new tokens makes {needed}, and {loaded.name} has a window of {loaded.window}: "
            "use fewer, or --synthetic."
        )
    return text[-tokens:]


TABLE = output.table(
    Cell("tokens", "tokens"),
    Cell("method", "method", left=True),
    Cell("TPOT", "tpot_s", "ms", 1e3),
    Cell("Full / it", "speedup"),
    Cell("of limit", "of_limit", "%", 100),
    Cell("replayed", "replayed_s", "ms", 1e3),
    Cell("layers", "all_layers.layers"),
    Cell("all layers", "all_layers.tpot_s", "ms", 1e3),
    Cell("Full / it, all layers", "all_layers.speedup"),
    Cell("weights", "weights_share", "%", 100),
    Cell("attended", "attended_prompt"),
    Cell("seal", "seal_s", "s"),
    *(Cell(tier.head, output.some(f"{name}_bytes"), "MiB", 2**-20) for name, tier in TIERS.items()),
    Cell("moved", output.some("moved_bytes_per_step"), "MiB/step", 2**-20),
    Cell("exposed", output.some("exposed_s"), "ms/step", 1e3),
    Cell("hidden", output.some("hidden_s"), "ms/step", 1e3),
    Cell("waiting", "waiting_s", "ms", 1e3),
    Cell("it / waiting", "saved"),
    Cell("graph", "capture_s", "s"),
    Cell("no graph because", "plain_steps", left=True),
    Cell("fell back", "fallback", left=True),
)


def parser() -> argparse.ArgumentParser:
    model = {"shape": None, "layers": None, "synthetic": False, "graphs": False, "link": None, "overlap": False}
    shared = model | arguments.METHODS | arguments.FAST
    return arguments.parser("decode", __doc__, tokens=[2048, 4096, 7936], new=16, budget=0.2, **shared)


def main(options: argparse.Namespace) -> None:
    if options.new < 3:
        raise ValueError(f"--new {options.new} leaves no step to time behind the second token: use at least 3.")
    options.synthetic |= options.shape is not None
    arguments.check_bus(options)
    methods.chosen(options.methods, options.config_dir)  # a wrong name is found now
    source = models.source(options.shape, options.layers)
    limits = calibrate.told(options.device)
    loaded = source.load(options.dtype, options.device)
    text = calibration_text(
        source.tokenizer(), max(CALIBRATION, *options.tokens) if not options.synthetic else CALIBRATION
    )
    filled = "prompt KV synthetic" if options.synthetic else "real prefill"
    title = (
        f"Decoding with {loaded.name}, {options.dtype}, {options.device}, budget {options.budget}, "
        f"placement {options.placement}{arguments.crossed(options)}{', captured steps' * options.graphs}; {filled}"
    )
    facts = {"limits": limits, "synthetic": options.synthetic, "model": loaded.name}
    report = output.Report("decode", title, options, TABLE, **facts)
    run(options, loaded, text, limits, report)
    labels = ("prompt tokens", "seconds per output token")
    report.finish(partial(output.lines, x="tokens", y="tpot_s", series="method", labels=labels))
