"""Compares the CPU time of two checkouts: `python -m tests.compare_speed OTHER` from this one's
root.

Alternating processes run this checkout and OTHER through README's Python API on the embedded model:
decode steps after 2048 tokens, and prefills of 4096. A ratio above 1 says that this checkout is
slower. Rounds go on until the 95 % interval of every case is narrow."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from scipy.stats import sem, t

METHODS = {
    "full": ("methods.full.Full", {}),
    "snapkv": ("methods.snapkv.SnapKV", {}),
    "tova": ("methods.tova.TOVA", {}),
    "kvzip": ("methods.kvzip.KVzip", {}),
    "kivi": ("methods.kivi.Kivi", {}),
    "quest": ("methods.quest.Quest", {}),
    "quest_mass": ("methods.quest.Quest", {"mass": 0.9}),
    "pqcache": ("methods.pqcache.PQCache", {}),
    "shadowkv": ("methods.shadowkv.ShadowKV", {}),
}

CHILD = """
import importlib, json, sys, time
time.perf_counter = time.process_time  # before it is imported by name: the engine's clock counts CPU time
from harness import Engine, attached
from harness.models.embedded import SmolLM2
from methods.budget import Budget

methods, steps, prefills = json.loads(sys.argv[1])
loaded = SmolLM2().load("fp32", "cpu")
ids = loaded.tokenizer("A fact stands in a long text. " * 600, return_tensors="pt").input_ids
seconds = {}
for name, (path, options) in methods.items():
    module, kind = path.rsplit(".", 1)
    method = getattr(importlib.import_module(module), kind)()
    with attached(loaded.model, method, budget=Budget(0.2, **options)) as kv:
        engine = Engine(kv)
        engine.generate(ids[:, :512], max_new_tokens=4, stops=[])  # compiles, and fills caches
        times = engine.generate(ids[:, :2048], max_new_tokens=steps + 2, stops=[]).token_s
        seconds[name] = times[-1] - times[1]  # the second token waits for the seal
        if name == "full":
            prompts = [engine.generate(ids[:, :4096], max_new_tokens=1, stops=[]) for _ in range(prefills)]
            seconds["prefill"] = sum(prompt.token_s[0] for prompt in prompts)
print(json.dumps(seconds))
"""


def measure(checkout: Path, steps: int, prefills: int) -> dict[str, float]:
    """Return the CPU seconds of each case, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", CHILD, json.dumps([METHODS, steps, prefills])]
    out = subprocess.run(command, cwd=checkout, env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of some ratios and the ends of its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    half = t.ppf(0.975, len(logs) - 1) * sem(logs)
    return math.exp(fmean(logs)), math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--width", type=float, default=0.03, help="of the intervals at which the rounds end")
    parser.add_argument("--rounds", type=int, default=30, help="at most; at least 4")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prefills", type=int, default=2, help="in each round")
    options = parser.parse_args()
    checkouts = [Path.cwd(), options.other.resolve()]
    ratios: dict[str, list[float]] = {}
    for number in range(max(4, options.rounds)):
        in_turn = checkouts if number % 2 else checkouts[::-1]
        seconds = {checkout: measure(checkout, options.steps, options.prefills) for checkout in in_turn}
        here, there = (seconds[checkout] for checkout in checkouts)
        for case in here:
            ratios.setdefault(case, []).append(here[case] / there[case])
        print(f"round {number + 1}:", *(f"{case} {each[-1]:.3f}" for case, each in ratios.items()), flush=True)
        if number >= 3:
            intervals = {case: interval(each) for case, each in ratios.items()}
            if all(high - low <= options.width for _, low, high in intervals.values()):
                break
    for case, (middle, low, high) in intervals.items():
        print(f"{case:>12} {middle:.3f}, 95 % interval [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
