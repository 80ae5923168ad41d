"""`python -m harness.bench decode`: time per output token against context length and batch, for every method.

A method's sequences and as many of Full's over the same prompt decode in turn, a few tokens at a time, where memory
holds both; the seal and the first two tokens of each turn are not counted in TPOT. `--batch 1 2 4 max` decodes so many
sequences together; max is the largest batch that fits, by the forecast that refuses a run as well. TTFT and TT2T are
those of a real prompt, means over the sequences; a sequence's clock stands still while the prompts of others are
computed. Of TTFT, TT2T and seal, "compiling" says how many seconds Triton took to make kernels ready. With random
weights, or `--synthetic`, nobody computes the prompt: its keys and values are random. Steps are captured as in a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.bench.common import arguments, limits, methods, output
from harness.bench.common.measure import (
    LoadWatch,
    MarkedSeconds,
    estimate,
    marks,
    ratios,
    rounds_of,
)
from harness.bench.common.output import Cell
from harness.bench.common.synthetic import LayerShape
from harness.config.settings import Settings
from harness.engine.attach import Attachment
from harness.engine.attach_options import AttachOptions
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import Generation
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.graph import usual_graphs
from harness.engine.hf import routed
from harness.jobs.examples import blank
from harness.jobs.machine import free_here
from harness.jobs.memory import CacheSpec, MemoryForecast, lacking, largest_batch, needed_by
from harness.models.base import LoadedModel, ModelInfo, ModelSource, load
from harness.models.devices import usual_chunk
from harness.prompts.prompt import calibration_text
from methods.base import BudgetError, Method
from methods.full import Full
from methods.tiers.tier import DEVICE, TIERS

CALIBRATION = 4096  # tokens of ordinary text for methods that calibrate themselves
Attach = Callable[[Method], Attachment]
WARM_UP = 256  # tokens of a prompt before the one that is timed


class Decoding:
    """Runs `batch` sequences with the same `prompt` [1 S] under one method. They decode together,
    turn after turn of `options.new` tokens. Use it inside `routed(model)` (harness/engine/hf.py),
    which makes the model's attention run through the method's caches."""

    def __init__(
        self, kv: Attachment, prompt: Tensor, options: argparse.Namespace, batch: int = 1
    ) -> None:
        self.engine = Engine(kv, graphs=usual_graphs(kv.model.device))
        self.new = options.new
        self.question = prompt[:, :0]
        self.capacity = options.new * (options.rounds + 1)
        self.caches: list[KVCache] = []
        self.logits: list[Tensor] = []
        self._warm_up(prompt, options)
        self.first = self._first(prompt, options.synthetic, batch)  # with the seals
        for cache in self.caches:
            # every turn of this cache would be checked as the first one of a run is
            cache.state.checks.on = False
        self.moved: list[float] = []  # bytes per step of a turn, of all sequences

    def _warm_up(self, prompt: Tensor, options: argparse.Namespace) -> None:
        """Answer the beginning of the prompt, so that kernels are built and weights read once. On a
        GPU it is long enough for a method that keeps several times its budget to have work. What is
        compiled for the length of the prompt itself remains."""
        on_gpu = self.engine.attachment.model.device.type == "cuda"
        tokens = WARM_UP
        if on_gpu and isinstance(options.budget, int):
            tokens = max(WARM_UP, 4 * options.budget)
        with suppress(BudgetError):  # of a share that is too small for so short a prompt
            if not options.synthetic:
                self.engine.generate(prompt[:, :tokens], max_new_tokens=3)
            elif on_gpu:
                self._first(prompt[:, :tokens], True, 1)
        self.caches.clear()
        self.logits.clear()

    @torch.inference_mode()
    def _first(self, prompt: Tensor, synthetic: bool, batch: int) -> list[Generation]:
        """Prefill the prompt for one sequence after the other, let the method digest it (the seal),
        then decode the first turn of all together and return the answers. `synthetic`: fill the
        caches with random keys and values in place of a prefill."""

        def prefilled() -> tuple[KVCache, Tensor, float]:
            began = perf_counter()
            cache = self.engine.cache(prompt, self.capacity)
            logits = (
                self._filled(cache, prompt)
                if synthetic
                else self.engine.prefill(cache, prompt, whole=True)
            )
            self.caches.append(cache)
            self.logits.append(logits)
            return cache, logits, began

        return self._decode(prefilled() for _ in range(batch))

    def _filled(self, cache: KVCache, prompt: Tensor) -> Tensor:
        """Fill a cache with random keys and values in place of a prefill; return logits of
        zeros."""
        kv = self.engine.attachment
        spec, model = kv.specs[0], kv.model
        shape = LayerShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, model.dtype, model.device
        )
        for index, layer in enumerate(cache.layers):
            shape.fill([layer], prompt.shape[1], attending=not kv.method.dense_prefill)
            if cache.closes_early:
                cache.close(index)
        cache.num_tokens = prompt.shape[1]
        return torch.zeros(1, model.config.vocab_size, device=model.device)

    def turn(self) -> list[Generation]:
        """Decode `new` tokens of each sequence. The first of them is not computed: it comes from
        the logits of the prompt."""
        pairs = zip(self.caches, self.logits, strict=True)
        return self._decode((cache, logits, perf_counter()) for cache, logits in pairs)

    def _decode(self, begun: Iterable[tuple[KVCache, Tensor, float]]) -> list[Generation]:
        """Decode a turn of all sequences together: of each, cache, logits, and when its clock began."""
        running = RunningBatch(self.engine)
        slots = [
            running.join(cache, logits, self.question, began=began, max_new_tokens=self.new)
            for cache, logits, began in begun
        ]
        while running.sequences:
            running.run()
        return [slot.out for slot in slots]

    def timed_turn(self) -> MarkedSeconds:
        """Decode a turn and return the seconds per token after the second."""
        before = sum(cache.traffic.total_bytes for cache in self.caches)
        watch = LoadWatch()
        self.last = self.turn()
        disturbed = watch.disturbed()
        moved = sum(cache.traffic.total_bytes for cache in self.caches) - before
        self.moved.append(moved / (self.new - 1))
        times = self.last[-1].token_s  # the last one's clock has all of each step
        return MarkedSeconds((times[-1] - times[1]) / (len(times) - 2), disturbed)


def measure(
    method: Method,
    attach: Attach,
    ids: Tensor,
    options: argparse.Namespace,
    known: limits.Limits,
    batch: int,
    beside: bool,
) -> dict[str, Any]:
    """Return the figures of one row. ids [1 S]: the prompt. `beside`: sequences of Full decode in
    turn with the method's, for the speedup. `known`: the limits of this machine."""
    full = Full()
    with ExitStack() as attachments:
        own_kv = attachments.enter_context(closing(attach(method)))
        attachments.enter_context(routed(own_kv.model))
        own = Decoding(own_kv, ids, options, batch)
        ways = {"own": own}
        if beside:
            full_kv = attachments.enter_context(closing(attach(full)))
            ways["full"] = Decoding(full_kv, ids, options, batch)
        times = rounds_of({name: side.timed_turn for name, side in ways.items()}, options.rounds)
    tpot_s = estimate(times["own"])
    generation = own.last[0]
    floor = floor_s(own, known["read_gb_s"])
    return {
        "batch": batch,
        "tpot_s": tpot_s,
        "rate": batch / tpot_s.median,
        "full_s": estimate(times["full"]) if beside else None,
        "speedup": ratios(times["full"], times["own"]) if beside and method != full else None,
        "floor_s": floor,
        "of_limit": floor / tpot_s.median,
        "ttft_s": None if options.synthetic else _mean(own.first, 0),
        "tt2t_s": None if options.synthetic else _mean(own.first, 1),
        "seal_s": fmean(run.seal_s or 0.0 for run in own.first),
        "compile_s": own.first[0].compile_s,
        "capture_s": generation.capture_s,
        "plain_steps": own.engine.plain_steps,
        "one_by_one": own.engine.one_by_one,
        "attended_prompt": generation.measured.get("attended_prompt"),
        **{f"{tier}_bytes": sum(run.kv[tier] for run in own.last) for tier in generation.kv},
        "moved_bytes_per_step": fmean(own.moved),
        "fallback": generation.fallback,
        **marks(*times.values()),
    }


def _mean(runs: Sequence[Generation], token: int) -> float:
    return fmean(run.token_s[token] for run in runs)


def attachment(
    method: Method, loaded: LoadedModel, text: list[int], options: argparse.Namespace
) -> Attachment:
    """Return the pair of a model and a method, from which an engine makes the caches that the
    model's attention then runs through. Budget, placement and the like are those of the benchmark's
    options; `text`: token ids by which a method may calibrate itself."""
    budget, codec = methods.given_to(method, options)
    attaching = AttachOptions(
        budget=budget,
        codec=codec,
        placement=options.placement if method.offloads else DEVICE,
        calibration=torch.tensor([text]),
        overlap=options.overlap == "on",
    )
    return Attachment(loaded.model, method, attaching)


def cache_spec(method: Method, options: argparse.Namespace) -> CacheSpec:
    """Return what the memory forecast (harness/jobs/memory.py) needs to know of these options."""
    settings = Settings(
        budget=options.budget,
        codec=options.codec,
        placement=options.placement if method.offloads else DEVICE,
        dtype=options.dtype,
        device=options.device,
        prefill_chunk=usual_chunk(options.device, method.dense_prefill),
        overlap=options.overlap,
        graphs="off" if options.device == "cpu" else "on",
    )
    return CacheSpec(settings, method, methods.given_to(method, options)[0])


def fitting(
    info: ModelInfo, tokens: int, options: argparse.Namespace, method: Method, batch: int | str
) -> tuple[int, bool]:
    """Return the batch of prompts of `tokens` tokens to run, which is `batch`, or the largest that fits into free
    memory for "max"; and True if as many sequences of Full, the baseline, fit beside it. Raise `ValueError` if the
    batch does not fit."""
    item = blank(tokens, options.new * (options.rounds + 1))
    free, spec = free_here(options.device), cache_spec(method, options)

    def forecast(spec: CacheSpec, count: int) -> MemoryForecast:
        return needed_by(info, spec, item, count, loaded=True)

    if not isinstance(batch, int) or lacking(forecast(spec, batch), *free) is not None:
        most, tier = largest_batch(info, spec, item, *free, loaded=True)
        if isinstance(batch, int) or not most:
            raise ValueError(f"by the forecast the memory of the {tier} holds {most} sequences")
        batch = most
    own, full = forecast(spec, batch), forecast(cache_spec(Full(), options), batch)
    both = MemoryForecast(0, own.total + full.total, 0, host=own.host + full.host)
    return batch, lacking(both, *free) is None


def floor_s(decoding: Decoding, read_gb_s: float) -> float:
    """Return the least seconds of a step: the time to read, at `read_gb_s`, the weights once and
    the keys and values that the sequences attend to. In a mixture of experts, only the experts that
    one token passes through are read."""
    model, specs = decoding.engine.model, decoding.engine.attachment.specs
    attended = sum(run.measured.get("attended_total") or 0.0 for run in decoding.last)
    rows = (
        sum(spec.num_kv_heads * spec.row_channels * attended for spec in specs)
        * model.dtype.itemsize
    )
    weights = sum(x.nbytes for x in model.parameters())
    table, head = (
        next(m.parameters()) for m in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    weights -= 0 if table is head else table.nbytes  # a step reads a row of the embedding
    chosen = int(getattr(model.config, "num_experts_per_tok", None) or 0)
    for module in model.modules() if chosen else ():
        own = list(module.parameters(recurse=False))
        if any(x.dim() == 3 for x in own):  # the weights of all experts of a layer
            weights -= sum(x.nbytes // len(x) * (len(x) - chosen) for x in own)
    return (weights + rows) / read_gb_s / 1e9


def _told(row: dict[str, Any]) -> str:
    beside = f", {row['speedup'].median:.2f} x Full" if row["speedup"] else ""
    return f"{row['batch']} together, {row['tpot_s'].median * 1e3:.2f} ms{beside}"


def prepared(
    source: ModelSource, options: argparse.Namespace
) -> tuple[LoadedModel, list[int], Attach]:
    """Load the model of a benchmark. Return it, the token ids of ordinary text, and a function that attaches a method
    to it."""
    loaded = load(source, options.dtype, options.device)
    length = CALIBRATION if options.synthetic else max(CALIBRATION, *options.tokens)
    text = calibration_text(source.tokenizer(), length)
    attach = partial(attachment, loaded=loaded, text=text[-CALIBRATION:], options=options)
    return loaded, text, attach


def prompt_ids(
    text: list[int], tokens: int, loaded: LoadedModel, options: argparse.Namespace
) -> Tensor:
    """Return the last `tokens` of the token ids in `text` [1 tokens]. With --synthetic they are repeated if
    there are too few, because nobody reads them; otherwise `ValueError` is raised.

    A synthetic prompt that would fill the model's window leaves room there for its answers, as a
    run must: captured steps then take their angles from the table of that window."""
    answers = options.new * (options.rounds + 1)
    needed = tokens + answers
    if options.synthetic:
        if tokens <= loaded.window < needed:
            tokens = loaded.window - answers
        text = text * (tokens // len(text) + 1)
    elif needed > loaded.window or tokens > len(text):
        raise ValueError(
            f"--tokens {tokens} with its new tokens makes {needed}, and {loaded.name} has a window of {loaded.window}: "
            "use fewer, or --synthetic."
        )
    return torch.tensor([text[-tokens:]], device=loaded.model.device)


TABLE = output.table(
    Cell("tokens", "tokens"),
    Cell("batch", "batch"),
    Cell("method", "method", left=True),
    Cell("TPOT", "tpot_s", "ms", 1e3),
    Cell("decode", "rate", "tok/s"),
    Cell("Full / it", "speedup"),
    Cell("of limit", "of_limit", "%", 100),
    Cell("TTFT", "ttft_s", "s"),
    Cell("TT2T", "tt2t_s", "s"),
    Cell("attended", "attended_prompt"),
    Cell("seal", "seal_s", "s"),
    Cell("compiling", "compile_s", "s"),
    *(Cell(tier.head, output.some(f"{name}_bytes"), "MiB", 2**-20) for name, tier in TIERS.items()),
    Cell("moved", output.some("moved_bytes_per_step"), "MiB/step", 2**-20),
    Cell("graph", "capture_s", "s"),
    Cell("no graph because", "plain_steps", left=True),
    Cell("one by one because", "one_by_one", left=True),
    Cell("fell back", "fallback", left=True),
)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of this benchmark."""
    model = {"shape": None, "layers": None, "synthetic": False, "overlap": "auto", "batch": [1]}
    shared = model | arguments.METHODS | arguments.FAST
    return arguments.parser(
        "decode", __doc__, tokens=[2048, 4096, 7936], new=16, budget=0.2, **shared
    )


def main(options: argparse.Namespace) -> None:
    """Measure, print, and write a table, its figures and a picture."""
    if options.new < 3:
        raise ValueError(
            f"--new {options.new} leaves no step to time after the second token: use at least 3."
        )
    options.synthetic |= options.shape is not None
    methods.chosen(options)  # a wrong name is found now
    source = arguments.source(options.shape, options.layers)
    known = limits.told(options.device)
    loaded, text, attach = prepared(source, options)
    info = source.describe()
    filled = "prompt KV synthetic" if options.synthetic else "real prefill"
    title = (
        f"Decoding with {loaded.name}, {options.dtype}, {options.device}, {methods.title(options)}, "
        f"placement {options.placement}; {filled}"
    )
    facts = {"limits": known, "synthetic": options.synthetic, "model": loaded.name}
    report = output.Report("decode", title, options, TABLE, **facts)

    def after(tokens: int, batch: int | str) -> methods.MeasureMethod:
        ids = prompt_ids(text, tokens, loaded, options)

        def measured(method: Method) -> dict[str, Any]:
            count, beside = fitting(info, tokens, options, method, batch)
            return measure(method, attach, ids, options, known, count, beside)

        return measured

    methods.measured(options, report, after, _told)
    report.finish(_draw)


def _draw(path: Path, rows: Sequence[output.BenchRow], title: str) -> None:
    """Draw the time per token by prompt length; if there are several batch sizes, tokens per second
    by batch size."""
    x, y, series = "tokens", "tpot_s", "method"
    labels = ("prompt tokens", "seconds per output token")
    if len({row["batch"] for row in rows}) > 1:
        x, y, series = "batch", "rates", "what"
        labels = ("sequences", "tokens per second, all together")
        rows = [
            {**row, y: [row["rate"]] * 3, series: f"{row['method']}, {row['tokens']} tokens"}
            for row in rows
        ]
    output.lines(path, rows, x=x, y=y, series=series, labels=labels, title=title)
