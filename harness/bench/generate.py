"""`python -m harness.bench generate`: is Full a straw man? Our engine, as a run has it, against `model.generate`,
interleaved.

All dtypes of both run the same prompt for the same forced number of new tokens, in turn. TTFT and TPOT are compared
round by round, dtype with dtype.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from harness.bench.common import arguments, output
from harness.bench.common.measure import (
    Call,
    LoadWatch,
    MarkedSeconds,
    estimate,
    marks,
    ratios,
    rounds_of,
)
from harness.bench.common.output import Cell
from harness.engine.attach import attached
from harness.engine.engine import Engine
from harness.engine.graph import usual_graphs
from harness.models.base import LoadedModel, load
from harness.prompts.prompt import calibration_text
from kernels import ops
from methods.full import Full

# by whose run and dtype, a value per round
RunsBySide = Mapping[tuple[str, str], Sequence["TimedRun"]]


class TimedRun(NamedTuple):
    tokens: list[int]
    ttft_s: float
    tpot_s: float  # (t_n - t_2) / (n - 2)


class _Clock(BaseStreamer):
    """A streamer for `model.generate` that notes when each token reaches the host."""

    def __init__(self) -> None:
        self.watch, self.began = LoadWatch(), perf_counter()
        self.token_s: list[float] = []
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        value.tolist()
        if self.prompt_seen:
            self.token_s.append(perf_counter() - self.began)
        self.prompt_seen = True

    def end(self) -> None:
        """Do nothing: every token has been noted."""


def timed(tokens: list[int], token_s: Sequence[float], disturbed: bool) -> TimedRun:
    tpot_s = (token_s[-1] - token_s[1]) / (len(token_s) - 2)
    return TimedRun(tokens, MarkedSeconds(token_s[0], disturbed), MarkedSeconds(tpot_s, disturbed))


@torch.inference_mode()
def theirs(loaded: LoadedModel, prompt: Tensor, new: int) -> TimedRun:
    """Run transformers' own `model.generate`, as a user calls it."""
    model: Any = loaded.model
    model.generate(prompt[:, :16], attention_mask=torch.ones_like(prompt[:, :16]), max_new_tokens=2)
    clock = _Clock()
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        streamer=clock,
    )
    return timed(out[0, prompt.shape[1] :].tolist(), clock.token_s, clock.watch.disturbed())


def ours(loaded: LoadedModel, prompt: Tensor, new: int) -> TimedRun:
    """Generate `new` tokens with our engine under Full (dense attention), as a run does; on a GPU
    the decode steps are captured as CUDA graphs. Return the tokens and their times."""
    with attached(loaded.model, Full()) as kv:
        engine = Engine(kv, graphs=usual_graphs(kv.model.device))
        # the first answer of a method is checked, which takes longer than its steps; so both sides
        # answer a short prompt first
        engine.generate(prompt[:, :16], max_new_tokens=2)
        watch = LoadWatch()
        generation = engine.generate(prompt, max_new_tokens=new)
    return timed(generation.tokens[0], generation.token_s, watch.disturbed())


def calls_of(
    loaded_as: Mapping[str, LoadedModel], prompt: Tensor, new: int
) -> dict[tuple[str, str], Call]:
    """Return the calls to measure, by ("ours" or "generate", dtype): each generates `new` tokens
    after `prompt`. `loaded_as`: the model in each dtype."""
    return {
        (whose, dtype): partial(run, loaded, prompt, new)
        for dtype, loaded in loaded_as.items()
        for whose, run in (("ours", ours), ("generate", theirs))
    }


def compare(
    runs: RunsBySide, prompt_tokens: int, dtypes: Sequence[str], eos: set[int]
) -> list[dict[str, Any]]:
    """Return a row per dtype in which both sides (our engine and `model.generate`) ran: their
    times, the ratios, and if their tokens are equal. `eos`: token ids that end a text; tokens after
    one are ignored."""
    rows = []
    for dtype in dtypes:
        if ("ours", dtype) not in runs or ("generate", dtype) not in runs:
            continue
        pairs = list(zip(runs["ours", dtype], runs["generate", dtype], strict=True))
        row: dict[str, Any] = {"prompt_tokens": prompt_tokens, "dtype": dtype}
        for key in ("ttft_s", "tpot_s"):
            own, other = ([getattr(run, key) for run in side] for side in zip(*pairs, strict=True))
            row[key] = {
                "ours": estimate(own),
                "generate": estimate(other),
                "ratio": ratios(own, other),
            }
            row |= marks(own, other)  # of the last key: a sample's times share its mark
        row["code"] = output.timed_code(Full.__module__)
        row["same_tokens"] = all(_until(a.tokens, eos) == _until(b.tokens, eos) for a, b in pairs)
        rows.append(row)
    return rows


def _until(tokens: list[int], eos: set[int]) -> list[int]:
    """Return the tokens before the first EOS: `generate` never picks EOS here, while our engine
    goes on after it, so that tokens after it differ."""
    return list(takewhile(lambda token: token not in eos, tokens))


TABLE = output.table(
    Cell("prompt", "prompt_tokens", "tokens"),
    Cell("dtype", "dtype", left=True),
    *(
        Cell(f"{name} {side}", f"{key}.{side}", unit, factor)
        for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
        for side, unit, factor in (("ours", "ms", 1e3), ("generate", "ms", 1e3), ("ratio", "", 1))
    ),
    Cell("same tokens", lambda row: "yes" if row["same_tokens"] else "no", left=True),
)


def parser() -> argparse.ArgumentParser:
    model = {"dtypes": ["fp32", "bf16"], "shape": None, "device": "cpu", "rounds": 5}
    return arguments.parser("generate", __doc__, tokens=[4096], new=64, **model, **arguments.OUT)


def main(options: argparse.Namespace) -> None:
    source = arguments.source(options.shape)
    loaded_as = {dtype: load(source, dtype, options.device) for dtype in options.dtypes}
    some = next(iter(loaded_as.values()))
    longest = max(options.tokens)
    if (whole := longest + options.new) > some.window:
        raise ValueError(
            f"--tokens and --new make {whole}, and {some.name} has a window of {some.window}: use fewer."
        )
    text = torch.tensor([calibration_text(source.tokenizer(), longest)], device=some.model.device)
    title = f"Full against model.generate: {some.name}, {options.device}, {options.new} new tokens"
    report = output.Report("generate", title, options, TABLE, model=some.name)
    for tokens in options.tokens:
        if report.skips(f"{tokens} tokens"):
            continue
        # warm up on a short prompt
        rounds_of(calls_of(loaded_as, text[:, : min(256, tokens)], 8), 1, {})
        failures: dict[tuple[str, str], str] = {}
        ops.forget_used()
        runs = rounds_of(
            calls_of(loaded_as, text[:, :tokens], options.new), options.rounds, failures
        )
        for row in compare(runs, tokens, options.dtypes, set(some.eos_ids)):
            report.add(row, f"{tokens} tokens, {_told(row)}")
        for (side, dtype), reason in failures.items():
            label = f"{tokens} tokens, {side} {dtype}"
            report.add(output.failed_row(label, reason), f"{label}: {reason}")
    report.finish()


def _told(row: output.BenchRow) -> str:
    times = (
        f"{name} {row[key]['ratio'].median:.3f}"
        for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
    )
    return f"ours / generate, {row['dtype']}: {', '.join(times)}"
