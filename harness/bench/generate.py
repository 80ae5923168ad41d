"""`python -m harness.bench generate`: is Full a straw man? Our engine, as a run has it, against `model.generate`,
interleaved.

All dtypes of both run the same prompt for the same forced number of new tokens, in turn. TTFT and TPOT are compared
round by round, dtype with dtype, then the best of ours with the best of theirs. How well a dtype's decode steps follow
the fp32 model is the share of tokens of a given text on which both would pick the same next one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from harness.bench.common import arguments, output
from harness.bench.common.measure import Call, LoadWatch, MarkedSeconds, estimate, marks, ratios, rounds_of, why
from harness.bench.common.output import Cell
from harness.engine.attach import attached
from harness.engine.engine import Engine
from harness.engine.graph import usual_graphs
from harness.models.base import LoadedModel
from harness.prompts.calibration import calibration_text
from harness.prompts.teacher import Forced
from harness.terminal.notices import say
from methods.full import Full

TEXT, FOLLOWED = 1024, 256  # tokens before and of the text on which dtypes are compared
RunsBySide = Mapping[tuple[str, str], Sequence["TimedRun"]]  # by whose run and dtype, a value per round


class TimedRun(NamedTuple):
    tokens: list[int]
    ttft_s: float
    tpot_s: float  # (t_n - t_2) / (n - 2)


class _Clock(BaseStreamer):
    """Notes when each token reaches the host."""

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
    """Run transformers' own loop, as a user calls it."""
    clock = _Clock()
    model: Any = loaded.model
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
    """Run our engine as a run does, which captures its steps on a GPU."""
    with attached(loaded.model, Full()) as kv:
        engine, watch = Engine(kv, graphs=usual_graphs(kv.model.device)), LoadWatch()
        made = engine.generate(prompt, max_new_tokens=new)
    return timed(made.tokens[0], made.token_s, watch.disturbed())


def calls_of(loaded_as: Mapping[str, LoadedModel], prompt: Tensor, new: int) -> dict[tuple[str, str], Call]:
    """Return a run of each side in each dtype."""
    return {
        (whose, dtype): partial(run, loaded, prompt, new)
        for dtype, loaded in loaded_as.items()
        for whose, run in (("ours", ours), ("generate", theirs))
    }


def compare(
    runs: RunsBySide, prompt_tokens: int, eos: set[int], agree: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """Return a row per dtype in which both sides ran, with its agreement, and one of the best dtype of each side."""
    dtypes = [dtype for dtype in agree if all((side, dtype) in runs for side in ("ours", "generate"))]
    rows = [_row(runs, prompt_tokens, dtype, {key: (dtype, dtype) for key in TimedRun._fields[1:]}) for dtype in dtypes]
    for row, dtype in zip(rows, dtypes, strict=True):
        pairs = zip(runs["ours", dtype], runs["generate", dtype], strict=True)
        row["agreement"] = agree[dtype]
        row["same_tokens"] = all(_until(a.tokens, eos) == _until(b.tokens, eos) for a, b in pairs)
    if len(dtypes) > 1:
        sides = ("ours", "generate")
        best = {key: tuple(_best(runs, side, dtypes, key) for side in sides) for key in TimedRun._fields[1:]}
        rows.append(_row(runs, prompt_tokens, "best of each", best))
    return rows


def _row(runs: RunsBySide, prompt_tokens: int, name: str, chosen: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt_tokens": prompt_tokens, "dtype": name}
    for key, (own, other) in chosen.items():
        a, b = _times(runs, "ours", own, key), _times(runs, "generate", other, key)
        row[key] = {"ours": estimate(a), "generate": estimate(b), "ratio": ratios(a, b), "dtypes": [own, other]}
        row |= marks(a, b)  # of the last key: a sample's times share its mark
    return row


def _times(runs: RunsBySide, whose: str, dtype: str, key: str) -> list[float]:
    return [getattr(run, key) for run in runs[whose, dtype]]


def _best(runs: RunsBySide, whose: str, dtypes: Sequence[str], key: str) -> str:
    return min(dtypes, key=lambda dtype: estimate(_times(runs, whose, dtype, key)).median)


def _until(tokens: list[int], eos: set[int]) -> list[int]:
    """Return the tokens up to the first EOS: `generate` forbids it while our engine runs over it."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in eos), len(tokens))]


class _Argmax(Forced):
    """Gives the next token of a text, whatever the model would pick, and notes that."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__(tokens)
        self.would_pick: list[int] = []

    def pick(self, logits: Tensor) -> Tensor:
        self.would_pick.append(int(logits[0].argmax()))
        return super().pick(logits)


@torch.inference_mode()
def agreement(exact: LoadedModel, loaded: LoadedModel, text: Tensor) -> float:
    """Return the share of the last FOLLOWED tokens of `text` [1 S] on which our decode steps and `exact`'s forward
    agree."""
    model: Any = exact.model
    start = text.shape[1] - FOLLOWED
    wanted = model(text[:, :-1]).logits[0, start - 1 :].argmax(-1).tolist()
    sampler = _Argmax(text[:, start:])
    with attached(loaded.model, Full()) as kv:
        Engine(kv).generate(text[:, :start], max_new_tokens=FOLLOWED, sampler=sampler)
    return sum(a == b for a, b in zip(sampler.would_pick, wanted, strict=True)) / FOLLOWED


SAID = {True: "yes", False: "no", None: None}
TABLE = output.table(
    Cell("prompt", "prompt_tokens", "tokens"),
    Cell("dtype", "dtype", left=True),
    *(
        Cell(f"{name} {side}", f"{key}.{side}", unit, factor)
        for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
        for side, unit, factor in (("ours", "ms", 1e3), ("generate", "ms", 1e3), ("ratio", "", 1))
    ),
    Cell("same tokens", lambda row: SAID[row.get("same_tokens")], left=True),
    Cell("argmax as fp32", "agreement", "%", 100),
)


def parser() -> argparse.ArgumentParser:
    model = {"dtypes": ["fp32", "bf16"], "shape": None, "device": "cpu", "rounds": 5}
    return arguments.parser("generate", __doc__, tokens=[4096], new=64, **model, **arguments.OUT)


def main(options: argparse.Namespace) -> None:
    source = arguments.source(options.shape)
    loaded_as = {dtype: source.load(dtype, options.device) for dtype in options.dtypes}
    some = next(iter(loaded_as.values()))
    arguments.check_window(some, max(options.tokens), options.new)
    text = torch.tensor([calibration_text(source.tokenizer(), max(options.tokens) + TEXT)], device=some.model.device)
    agree: dict[str, float | None] = dict.fromkeys(loaded_as)
    try:
        exact = loaded_as.get("fp32") or source.load("fp32", options.device)
        agree |= {dtype: agreement(exact, loaded, text[:, -TEXT:]) for dtype, loaded in loaded_as.items()}
    except torch.OutOfMemoryError as error:
        say(f"Nothing is held against fp32, whose weights do not fit beside the others: {why(error)}")
    title = f"Full against model.generate: {some.name}, {options.device}, {options.new} new tokens"
    report = output.Report("generate", title, options, TABLE, model=some.name)
    for tokens in options.tokens:
        if report.out_of_time(f"{tokens} tokens"):
            continue
        *_, _ = rounds_of(calls_of(loaded_as, text[:, : min(256, tokens)], 8), 1, {})  # warm up on a short prompt
        calls = calls_of(loaded_as, text[:, :tokens], options.new)
        compared = partial(compare, prompt_tokens=tokens, eos=set(some.eos_ids), agree=agree)
        report.measure(f"{tokens} tokens", calls, options.rounds, compared, _told)
    report.finish(_draw)


def _told(row: output.BenchRow) -> str:
    times = (f"{name} {row[key]['ratio'].median:.3f}" for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")))
    return f"ours / generate, {row['dtype']}: {', '.join(times)}"


def _draw(path: Path, rows: Sequence[output.BenchRow], title: str) -> None:
    shown = [
        {"label": f"{key[:4].upper()}, {row['prompt_tokens']} tokens, {row['dtype']}", "ratio": row[key]["ratio"]}
        for row in rows
        for key in ("ttft_s", "tpot_s")
    ]
    output.bars(path, shown, label="label", y="ratio", unit="ours / generate", title=title)
