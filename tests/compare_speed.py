"""Compares the CPU time of two checkouts: `python -m tests.compare_speed OTHER` from this one's
root.

Alternating processes run this checkout and OTHER through README's Python API on the embedded model:
decode steps after 2048 tokens, and prefills of 4096. A ratio above 1 says that this checkout is
slower."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median, stdev

METHODS = {
    "full": "methods.full.Full",
    "snapkv": "methods.snapkv.SnapKV",
    "pqcache": "methods.pqcache.PQCache",
    "quest": "methods.quest.Quest",
    "shadowkv": "methods.shadowkv.ShadowKV",
}
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}  # 97.5 %, by number of rounds

CHILD = """
import importlib, json, sys, time
time.perf_counter = time.process_time  # before it is imported by name: the engine's clock counts CPU time
from harness import Engine, attached
from harness.models.embedded import SmolLM2

methods, steps, prefills = json.loads(sys.argv[1])
loaded = SmolLM2().load("fp32", "cpu")
ids = loaded.tokenizer("A fact stands in a long text. " * 600, return_tensors="pt").input_ids
seconds = {}
for name, path in methods.items():
    module, kind = path.rsplit(".", 1)
    with attached(loaded.model, getattr(importlib.import_module(module), kind)(), budget=0.2) as kv:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=5, choices=STUDENT_T)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prefills", type=int, default=2, help="in each round")
    options = parser.parse_args()
    ratios: list[dict[str, float]] = []
    for number in range(options.rounds):
        checkouts = [Path.cwd(), options.other.resolve()]
        in_turn = checkouts if number % 2 else checkouts[::-1]
        seconds = {checkout: measure(checkout, options.steps, options.prefills) for checkout in in_turn}
        here, there = (seconds[checkout] for checkout in checkouts)
        ratios.append({case: here[case] / there[case] for case in here})
        print(f"round {number + 1}:", *(f"{case} {ratio:.3f}" for case, ratio in ratios[-1].items()), flush=True)
    print("median: ", *(f"{case} {median(each[case] for each in ratios):.3f}" for case in ratios[0]))
    logs = [fmean(math.log(ratio) for ratio in each.values()) for each in ratios]
    half = STUDENT_T[len(logs)] * stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.exp(fmean(logs) + shift) for shift in (-half, 0, half))
    print(f"geometric mean: {middle:.3f}, 95 % interval [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
