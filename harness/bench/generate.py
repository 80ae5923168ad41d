"""`python -m harness.bench.generate`: is Full a straw man? Our engine against `model.generate`, interleaved.

Both run the same prompt for the same forced number of new tokens; TTFT, TPOT and their ratio are taken pair by pair,
so that a machine that slows down slows down both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from harness.attach import attached
from harness.engine import Engine
from harness.models.base import LoadedModel
from harness.models.embedded import SmolLM2
from harness.models.random import Random
from harness.preparation import calibration_text
from methods.full import Full


class Timed(NamedTuple):
    tokens: list[int]
    ttft_s: float
    tpot_s: float  # (t_n - t_2) / (n - 2)


class _Clock(BaseStreamer):
    """Notes when each token reaches the host."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.token_s: list[float] = []
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        value.tolist()
        if self.prompt_seen:
            self.token_s.append(perf_counter() - self.began)
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing to flush."""


def timed(tokens: list[int], token_s: Sequence[float]) -> Timed:
    return Timed(tokens, token_s[0], (token_s[-1] - token_s[1]) / (len(token_s) - 2))


@torch.inference_mode()
def theirs(loaded: LoadedModel, prompt: Tensor, new: int) -> Timed:
    """transformers' own loop, as a user calls it."""
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
    return timed(out[0, prompt.shape[1] :].tolist(), clock.token_s)


def ours(loaded: LoadedModel, prompt: Tensor, new: int) -> Timed:
    with attached(loaded.model, Full()) as kv:
        made = Engine(kv).generate(prompt, max_new_tokens=new)
    return timed(made.tokens[0], made.token_s)


def compare(loaded: LoadedModel, prompt: Tensor, new: int, rounds: int) -> dict[str, Any]:
    """One warm-up each, then `rounds` pairs, the order changing from pair to pair."""
    for run in (theirs, ours):
        run(loaded, prompt[:, :256], 8)
    pairs = []
    for place in range(rounds):
        order = (theirs, ours) if place % 2 else (ours, theirs)
        done = {run.__name__: run(loaded, prompt, new) for run in order}
        pairs.append((done["ours"], done["theirs"]))
    eos = set(loaded.eos_ids)
    agree = all(_until(a.tokens, eos) == _until(b.tokens, eos) for a, b in pairs)
    return {
        "prompt_tokens": prompt.shape[1],
        "new_tokens": new,
        "rounds": rounds,
        "same_tokens": agree,
        **{key: _row([(getattr(a, key), getattr(b, key)) for a, b in pairs]) for key in ("ttft_s", "tpot_s")},
    }


def _until(tokens: list[int], eos: set[int]) -> list[int]:
    """Up to the first EOS: `generate` forbids it while our engine runs over it."""
    return tokens[: next((i for i, token in enumerate(tokens) if token in eos), len(tokens))]


def _row(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    ratios = [a / b for a, b in pairs]
    return {
        "ours": median(a for a, _ in pairs),
        "generate": median(b for _, b in pairs),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.bench.generate", description=__doc__)
    parser.add_argument("--prompt", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="new tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", help="random weights of this shape instead of the embedded model")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args(arguments)
    source = Random(options.shape, None, 0, "auto") if options.shape else SmolLM2()
    loaded = source.load(options.dtype, options.device)
    ids = calibration_text(source, options.prompt)
    result = compare(loaded, torch.tensor([ids], device=loaded.model.device), options.new, options.rounds)
    result |= {"model": loaded.name, "dtype": options.dtype, "threads": torch.get_num_threads()}
    result |= {"load_average": os.getloadavg()[0], "device": options.device}
    print(f"{loaded.name}, {options.dtype}, {result['prompt_tokens']} + {options.new} tokens, {options.rounds} pairs")
    for key in ("ttft_s", "tpot_s"):
        row = result[key]
        print(
            f"{key:<7} ours {row['ours'] * 1e3:8.1f} ms   generate {row['generate'] * 1e3:8.1f} ms   "
            f"ratio {row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})"
        )
    print(f"same greedy tokens: {result['same_tokens']}; load average {result['load_average']:.2f}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
