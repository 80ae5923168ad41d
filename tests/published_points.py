"""Holds harness.plan against throughputs that others published: `python -m tests.published_points` prints the fits and
the table of docs/plan.md.

The points lie in results/paper/offload_published.csv, which leaves out what was modelled there and not measured. Leave
one out: each point is predicted with constants that the other points were fitted to.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from harness.machines.fitting import TimedStep, bandwidth, layer_s, predicted_s
from harness.machines.machine import Machine, MethodConstants, known
from harness.machines.plan import Workload, first_times, largest, sequence_of
from harness.models.base import ModelInfo
from harness.models.random import Random
from harness.terminal.tables import table
from methods.base import Method
from methods.full import Full
from methods.quest import Quest
from methods.shadowkv import ShadowKV

FILE = Path(__file__).parents[1] / "results" / "paper" / "offload_published.csv"
NEW = 100  # tokens of an answer in ShadowKV's test
LINES = ("A100-80G", "RTX-6000-Ada")
# chosen chunks, outliers and the last chunks together, by the prompt's length: our budget holds all three
SHADOWKV = {61440: 1024 + 192 + 32, 124928: 2048 + 384 + 32, 249856: 4096 + 768 + 32}


@dataclass(frozen=True)
class PublishedPoint:
    """One measured time of a step, or one batch that was used."""

    method: str
    model: str
    tokens: int
    batch: int
    budget: int | None = None
    step_s: float | None = None  # None: the batch is the point


@cache
def rows() -> list[dict[str, str]]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shadowkv_points(metric: str) -> list[PublishedPoint]:
    """Of ShadowKV's page, its own and Full's: `decode throughput`, or `batch used`."""
    points = []
    for row in rows():
        if row["source"] == "ShadowKV repo" and row["metric"] == metric:
            method, tokens, batch = row["method"].removesuffix("_cpu"), int(row["prompt_tokens"]), int(row["batch"])
            budget = None if method == "full" else SHADOWKV[tokens]
            step_s = batch / float(row["value"]) if metric == "decode throughput" else None
            points.append(PublishedPoint(method, row["model"], tokens, batch, budget, step_s))
    return points


def quest_points() -> list[PublishedPoint]:
    """Of Quest's figure 10, with weights in 16 bits: the slower half of its bars."""
    found: dict[tuple[str, int, int | None], float] = {}
    for row in rows():
        if row["source"].startswith("Quest paper"):
            settings = dict(part.split("=") for part in row["setting"].split(",") if "=" in part)
            budget = int(settings["budget"]) if settings else None
            key = ("quest" if budget else "full", int(row["prompt_tokens"]), budget)
            found[key] = max(found.get(key, 0.0), float(row["value"]) / 1e3)
    return [
        PublishedPoint(method, "Llama-2-7B", tokens, 1, budget, step_s)
        for (method, tokens, budget), step_s in found.items()
    ]


@cache
def info_of(model: str) -> ModelInfo:
    """GLM-4 has no shape here, for its rotation is another; its bytes are known."""
    shapes = {
        "Llama-3-8B-1M": "llama-3-8b-1m",
        "Llama-3.1-8B": "llama-3.1-8b",
        "Yi-9B-200K": "yi-9b-200k",
        "Llama-2-7B": "llama-2-7b-chat",
    }
    if model in shapes:
        info = Random(shapes[model], None, 0, "bytes").describe()
        return replace(info, window=max(info.window, 40_000))  # LongChat is Llama 2 with a longer window
    hidden, inner, layers, vocab, kv_heads = 4096, 13696, 40, 151_552, 4
    in_layers = 2 * hidden * (32 + kv_heads) * 128 + 3 * hidden * inner + 2 * hidden
    return replace(
        info_of("Llama-3-8B-1M"),
        name="GLM-4-9B-1M",
        num_layers=layers,
        num_kv_heads=kv_heads,
        inner_size=inner,
        vocab_size=vocab,
        num_parameters=layers * in_layers + 2 * vocab * hidden + hidden,
        layer_windows=(None,) * layers,
    )


def load_of(point: PublishedPoint) -> Workload:
    methods: dict[str, Method] = {"full": Full(), "shadowkv": ShadowKV(rank=160), "quest": Quest(dense_layers=(0, 1))}
    return Workload(
        method=methods[point.method],
        name=point.method,
        budget=point.budget,
        placement="host" if point.method == "shadowkv" else "device",
        tokens=point.tokens,
        new=NEW,
    )


def timed(point: PublishedPoint) -> TimedStep:
    assert point.step_s is not None
    return TimedStep(info_of(point.model), load_of(point), point.batch, point.step_s)


def batch_of(machine: Machine, point: PublishedPoint) -> int:
    """The largest batch; a tensor there holds the rows of all sequences, so none of them is rounded up."""
    info, load = info_of(point.model), load_of(point)
    return largest(machine, info, load, sequence_of(machine, info, load)._replace(rounding=0))[0]


Predict = Callable[[TimedStep, Sequence[TimedStep]], float]  # a step, from the others -> its seconds


def left_out(steps: Sequence[TimedStep], predict: Predict) -> list[float]:
    """By how much each rate is missed, as a share of what was published."""
    return [step.step_s / predict(step, [other for other in steps if other is not step]) - 1 for step in steps]


def published_steps() -> dict[tuple[str, str], list[TimedStep]]:
    """By machine and method."""
    found: dict[tuple[str, str], list[TimedStep]] = {}
    for machine, points in zip(LINES, (shadowkv_points("decode throughput"), quest_points()), strict=True):
        for point in points:
            found.setdefault((machine, point.method), []).append(timed(point))
    return found


@cache
def errors() -> dict[tuple[str, str, str], list[float]]:
    """By machine, method and what was fitted."""
    (a100, ada), steps = (known()[name] for name in LINES), published_steps()
    hits = a100.methods["shadowkv"].hits

    def by_bandwidth(machine: Machine) -> Predict:
        return lambda step, others: predicted_s(
            replace(machine, read_gb_s=bandwidth(machine, others)), step, MethodConstants()
        )

    def by_layer(step: TimedStep, others: Sequence[TimedStep]) -> float:
        return predicted_s(a100, step, MethodConstants(layer_s(a100, others, hits), hits=hits))

    def by_bytes(machine: Machine, hits: float = 0.0) -> Predict:
        return lambda step, others: predicted_s(machine, step, MethodConstants(hits=hits))

    return {
        ("A100-80G", "full", "bandwidth"): left_out(steps["A100-80G", "full"], by_bandwidth(a100)),
        ("A100-80G", "shadowkv", "seconds per layer"): left_out(steps["A100-80G", "shadowkv"], by_layer),
        ("A100-80G", "shadowkv", "nothing: bytes alone"): left_out(steps["A100-80G", "shadowkv"], by_bytes(a100, hits)),
        ("RTX-6000-Ada", "full", "bandwidth"): left_out(steps["RTX-6000-Ada", "full"], by_bandwidth(ada)),
        ("RTX-6000-Ada", "quest", "nothing: bytes alone"): left_out(steps["RTX-6000-Ada", "quest"], by_bytes(ada)),
    }


def prefill_misses() -> list[tuple[int, float, float]]:
    """Prompt tokens, seconds of one layer of Llama 2 7B on an RTX 4090 by the curve that PQCache's authors fitted to
    their times, and by how much the plan's exceed them, as a share."""
    found = []
    for row in rows():
        if row["metric"] == "prefill time of one layer":
            point = PublishedPoint("full", "Llama-2-7B", int(row["prompt_tokens"]), 1)
            first = first_times(known()["RTX-4090"], info_of(point.model), load_of(point))
            assert first
            seconds = float(row["value"]) / 1e3
            found.append((point.tokens, seconds, first.token_s[0] / 32 / seconds - 1))
    return found


def trust_table() -> str:
    """As docs/plan.md has it."""
    return table(
        ("machine", "method", "points", "fitted", "median error", "worst", "range"),
        (
            (machine, method, str(len(found)), fitted, *(_percent(x) for x in _summary(found)), _range(found))
            for (machine, method, fitted), found in errors().items()
        ),
    )


def _summary(found: Sequence[float]) -> tuple[float, float]:
    sizes = [abs(error) for error in found]
    return median(sizes), max(sizes)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _range(found: Sequence[float]) -> str:
    return f"{100 * min(found):+.0f} to {100 * max(found):+.0f} %"


if __name__ == "__main__":
    for line_, method_ in (("A100-80G", "full"), ("RTX-6000-Ada", "full")):
        print(f"{line_} read_gb_s: {bandwidth(known()[line_], published_steps()[line_, method_]):.0f}")
    found_ = layer_s(known()["A100-80G"], published_steps()["A100-80G", "shadowkv"], 0.6)
    print(f"A100-80G shadowkv layer_s: {found_:.6f}")
    print(trust_table())
