"""Compares the CPU time of two checkouts: `python -m tests.compare_speed OTHER` from this one's
root.

Alternating processes run this checkout and OTHER through README's Python API on the embedded model:
decode steps after 2048 tokens, some with a codec or a mass, and prompts of 2048 and 4096 tokens in
fp32 and bf16. A ratio above 1 says that this checkout is slower. Rounds go on until the 95 %
interval of every case is narrow. With `--all` every method of conf/method but presses decodes; a
case that OTHER lacks is left out."""

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

from harness.bench.common.methods import names

METHODS: dict[str, dict[str, object]] = {
    **{name: {} for name in ("full", "snapkv", "tova", "kvzip", "kivi", "quest", "pqcache", "shadowkv")},
    "quest budget_mass=0.9": {"mass": 0.9},
    **{f"coded codec={codec}": {"codec": codec} for codec in ("int4", "tq4")},
}
PROMPTS = 2048, 4096

CHILD = """
import json, sys, time
time.perf_counter = time.process_time  # before it is imported by name: the engine's clock counts CPU time
from harness import Engine, attached
from harness.bench.common.methods import load
from harness.models.embedded import SmolLM2
from methods.budget import Budget
from methods.full import Full
from methods.tiers.codecs import codec_of

methods, prompts, steps, prefills = json.loads(sys.argv[1])
text, seconds = "A fact stands in a long text. " * 600, {}
for dtype in ("fp32", "bf16"):
    loaded = SmolLM2().load(dtype, "cpu")
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    with attached(loaded.model, Full()) as kv:
        engine = Engine(kv)
        engine.generate(ids[:, :512], max_new_tokens=4, stops=[])  # compiles, and fills caches
        for length in prompts:
            runs = [engine.generate(ids[:, :length], max_new_tokens=1, stops=[]) for _ in range(prefills)]
            seconds[f"prompt of {length} {dtype}"] = sum(run.token_s[0] for run in runs)
    for name, options in methods.items() if dtype == "fp32" else ():
        try:
            method, codec = load(name.split()[0]), options.get("codec")
            budget = Budget(0.2, mass=options.get("mass")) if method.uses_budget else None
            more = {"codec": codec and codec_of(codec), "calibration": ids[:, :2048]}
        except (TypeError, ValueError):  # an older checkout
            continue
        with attached(loaded.model, method, budget=budget, **more) as kv:
            engine = Engine(kv)
            engine.generate(ids[:, :512], max_new_tokens=4, stops=[])
            times = engine.generate(ids[:, :2048], max_new_tokens=steps + 2, stops=[]).token_s
            seconds[name] = times[-1] - times[1]  # the second token waits for the seal
print(json.dumps(seconds))
"""


def measure(checkout: Path, *cases: object) -> dict[str, float]:
    """Return the CPU seconds of each case, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", CHILD, json.dumps(cases)]
    out = subprocess.run(command, cwd=checkout, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Return the geometric mean of some ratios and the ends of its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    half = t.ppf(0.975, len(logs) - 1) * sem(logs)
    return math.exp(fmean(logs)), math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--all", action="store_true", help="every method of conf/method but presses")
    parser.add_argument("--width", type=float, default=0.03, help="of the intervals at which the rounds end")
    parser.add_argument("--rounds", type=int, default=30, help="at most; at least 4")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prefills", type=int, default=2, help="in each round")
    options = parser.parse_args()
    checkouts = [Path.cwd(), options.other.resolve()]
    methods = METHODS | {name: {} for name in names() if options.all}
    ratios: dict[str, list[float]] = {}
    for number in range(max(4, options.rounds)):
        in_turn = checkouts if number % 2 else checkouts[::-1]
        cases = methods, PROMPTS, options.steps, options.prefills
        seconds = {checkout: measure(checkout, *cases) for checkout in in_turn}
        here, there = (seconds[checkout] for checkout in checkouts)
        for case in here.keys() & there:
            ratios.setdefault(case, []).append(here[case] / there[case])
        print(f"round {number + 1}:", *(f"{case} {each[-1]:.3f}" for case, each in ratios.items()), flush=True)
        if number >= 3:
            intervals = {case: interval(each) for case, each in ratios.items()}
            if all(high - low <= options.width for _, low, high in intervals.values()):
                break
    for case, (middle, low, high) in intervals.items():
        print(f"{case:>22} {middle:.3f}, 95 % interval [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
