"""`python -m harness.bench overflow`: what a history that has outgrown the window is worth, by what was done about it.

Every text fills the window and goes on in turns; whenever a turn does not fit, a share of the history stays. Perplexity
is that of the turns' tokens, prefilled turn by turn; differences are text by text, from the shorter text computed again
(TT). `truncate_cache` is CachedAttention (ATC 2024, section 4.3.5), `truncate_rotated` its NKVT: keys stay rotated to
where they stood, and what follows goes on behind the shorter history. Two rows are ablations: positions that go on, as
if nothing had left, and a window that does not overflow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import exp
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from evals import stats
from evals.base import Task
from harness.bench.common import arguments, output
from harness.bench.common.measure import estimate
from harness.bench.common.output import Cell
from harness.config.compose import built, composed
from harness.config.settings import Settings
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.history.positions import Rotation
from harness.history.truncation import truncated
from harness.jobs.planning.items import prepare
from harness.models.base import ModelSource
from methods.full import Full

MOST = 32.0  # nats per token that no model costs: evals/stats.py knows values up to 1
TT = "truncate_tokens"


class Way(NamedTuple):
    """What is done where a turn does not fit. By default the cache is truncated and its keys are rotated again."""

    recompute: bool = False
    sinks: int = 0
    naive: bool = False
    growing: bool = False  # positions go on as if nothing had left
    never: bool = False


class Reading(NamedTuple):
    nll: float  # nats per token
    seconds: float  # until the shorter history was there


def ways(sinks: int) -> dict[str, Way]:
    return {
        TT: Way(recompute=True),
        "truncate_cache": Way(),
        f"truncate_cache, {sinks} sinks": Way(sinks=sinks),
        "truncate_rotated": Way(naive=True),
        "rotated, positions go on": Way(naive=True, growing=True),
        "no overflow": Way(never=True),
    }


class OverflowReader:
    """Reads texts under an attached Full, by its model's own forward."""

    def __init__(self, kv: Attachment, window: int, ratio: float, turn: int) -> None:
        self.kv, self.window, self.ratio, self.turn = kv, window, ratio, turn
        self.rotations = [Rotation(spec.rope, kv.model.dtype) for spec in kv.model_specs]

    @torch.inference_mode()
    def read(self, text: Tensor, chosen: Mapping[str, Way]) -> dict[str, Reading]:
        """text [1 S] with the window's tokens first, which are read once."""
        full = self._fresh(text.shape[1])
        self._logits(full, text[:, : self.window])
        return {name: self._read(full, text, way) for name, way in chosen.items()}

    def _read(self, cache: KVCache, text: Tensor, way: Way) -> Reading:
        held, costs, seconds = self.window, list[Tensor](), 0.0
        if way.never:  # the others need the window as it is
            window, cache = cache, self._fresh(text.shape[1])
            cache.refill(window.contents())
        for start in range(self.window, text.shape[1], self.turn):
            new = text[:, start : start + self.turn]
            if held + new.shape[1] > self.window and not way.never:
                began, keep = perf_counter(), int(held * self.ratio)
                cache, held = self._shorter(cache, text[:, :start], keep, way), keep
                seconds += perf_counter() - began
            logits = self._logits(cache, new)
            costs.append(cross_entropy(logits[0, :-1].float(), new[0, 1:], reduction="none"))
            held += new.shape[1]
        return Reading(float(torch.cat(costs).mean()), seconds)

    def _shorter(self, cache: KVCache, text: Tensor, keep: int, way: Way) -> KVCache:
        last = text.shape[1] + self.window - keep  # position up to which nothing more leaves
        fresh = self._fresh(last if way.growing else self.window)
        if way.recompute:
            self._logits(fresh, text[:, -keep:])
            return fresh
        how: dict[str, Any] = {"sinks": way.sinks, "naive": way.naive}
        fresh.refill(truncated(cache.whole_contents(), fresh.layers, self.rotations, keep, **how))
        if way.growing:
            fresh.num_tokens = cache.num_tokens
        return fresh

    def _fresh(self, capacity: int) -> KVCache:
        return self.kv.start(KVCache, capacity=capacity)

    def _logits(self, cache: KVCache, ids: Tensor) -> Tensor:
        cache.open_turn()
        model: Any = self.kv.model
        logits: Tensor = model(ids.to(model.device), past_key_values=cache).logits
        return logits


def row(name: str, read: Sequence[Reading], recomputed: Sequence[Reading]) -> dict[str, Any]:
    """Of all texts so far, with 95 % intervals."""
    nll, base = ([one.nll / MOST for one in some] for some in (read, recomputed))
    own, same = stats.interval(nll, [""] * len(nll)), stats.paired(nll, base, [""] * len(nll))
    assert own is not None
    mean = sum(nll) / len(nll)
    return {
        "way": name,
        "texts": len(nll),
        "ln_perplexity": [MOST * value for value in (mean, own.low, own.high)],
        "difference": None if name == TT else [MOST * value for value in (same.diff, same.ci.low, same.ci.high)],
        "seconds": None if not any(one.seconds for one in read) else list(estimate([one.seconds for one in read])),
        "nll": [one.nll for one in read],
    }


def _told(key: str, places: int, change: Callable[[float], float] = float) -> Callable[[output.BenchRow], str | None]:
    """A mean and its interval; None where there is none."""

    def told(row: output.BenchRow) -> str | None:
        if row[key] is None:
            return None
        mean, low, high = (f"{change(value):.{places}f}" for value in row[key])
        return f"{mean} ({low} to {high})"

    return told


TABLE = output.table(
    Cell("at an overflow", "way", left=True),
    Cell("perplexity", lambda row: f"{exp(row['ln_perplexity'][0]):.2f}"),
    Cell("ln perplexity", _told("ln_perplexity", 4), "95 % CI"),
    Cell("minus TT's", _told("difference", 4), "95 % CI"),
    Cell("perplexity / TT's", _told("difference", 3, exp)),
    Cell("overflow", "seconds", "s per text"),
    Cell("texts", "texts"),
)


def texts(task: Task, source: ModelSource, settings: Settings, tokens: int) -> Iterator[Tensor]:
    """Windows of WikiText-2 [1 S], the first `tokens` of each."""
    task.require(settings.data.folder())
    for item in prepare(task, source, settings):
        yield torch.tensor([[*item.prompt.ids, *item.forced][:tokens]])


def main(options: argparse.Namespace) -> None:
    if options.turn > options.window:
        raise ValueError(f"--turn {options.turn} does not fit into --window {options.window}: choose a shorter one.")
    if not 0 < options.ratio < 1 or int(options.window * options.ratio) + options.turn > options.window:
        raise ValueError(f"--ratio {options.ratio} leaves no room for a turn of {options.turn}: choose a smaller one.")
    if not 0 <= options.sinks < (stays := int(options.window * options.ratio)):
        raise ValueError(f"--sinks {options.sinks} should be 0 or more, and fewer than the {stays} tokens that stay.")
    tokens = options.window + options.new
    sizes = {"window": tokens, "scored": options.new, "stride": options.new, "samples": options.texts}
    task = [f"task.{name}={value}" for name, value in sizes.items()]
    place = [f"data.root={options.data_root}"] if options.data_root else []
    _, wikitext, source, settings = built(composed([*options.model, "task=wikitext2", *task, *place]))
    loaded = source.load(options.dtype, options.device)
    title = (
        f"Perplexity behind an overflow: {loaded.name}, {options.dtype}, WikiText-2, window {options.window}, "
        f"ratio {options.ratio:g}, {options.new} tokens in turns of {options.turn}"
    )
    report = output.Report("overflow", title, options, TABLE, model=loaded.name)
    found: dict[str, list[Reading]] = {name: [] for name in ways(options.sinks)}
    with attached(loaded.model, Full()) as kv:
        reader = OverflowReader(kv, options.window, options.ratio, options.turn)
        for number, text in enumerate(texts(wikitext, source, settings, tokens), start=1):
            if report.out_of_time(f"text {number}"):
                continue
            for name, read in reader.read(text, ways(options.sinks)).items():
                found[name].append(read)
            rows = [row(name, read, found[TT]) for name, read in found.items()]
            line = ", ".join(f"{one['way']} {exp(one['ln_perplexity'][0]):.2f}" for one in rows)
            report.show(rows, f"text {number}: perplexity {line}")
    report.finish(partial(output.bars, label="way", y="ln_perplexity", unit="ln perplexity"))


def parser() -> argparse.ArgumentParser:
    texts = {"texts": 24, "window": 2048, "ratio": 0.5, "new": 1024, "turn": 512, "sinks": 4, "data_root": None}
    shared = texts | {"dtype": "fp32", "device": "cpu"} | arguments.OUT
    return arguments.parser("overflow", __doc__, model=["model=smollm2"], **shared)
