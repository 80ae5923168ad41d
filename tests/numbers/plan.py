"""Numbers of docs/plan.md: the plan that its last command prints, and how far plans are from what others published."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from harness.commands import plan as command
from harness.machines.machine import known
from harness.machines.plan_table import columns
from harness.terminal.tables import markdown_table
from methods.tiers.transfer.ways import BLOCK_BYTES
from tests import published_points as published
from tests.numbers.files import PUBLISHED, line, machine, row, rows

FIT = "bench/fit/result"
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def held() -> list[str]:
    return [*_planned(), *_machines(), *_fitted(), *_published()]


def _planned() -> Iterator[str]:
    commands = re.findall(r"^python -m harness\.plan ([^#\n]+)", PAGE.read_text("utf-8"), re.MULTILINE)
    printed = next(words for words in commands if "--host" in words)
    plans, _ = command._planned(command._parser().parse_args(printed.split()))
    yield markdown_table(columns(plans))
    defaults = command._parser().parse_args(["--machine", "here"])
    yield f"Without `--budget` it is {defaults.budget[0]}"


def _machines() -> Iterator[str]:
    for name, there in known().items():
        yield f"| `{name}` | {there.read_gb_s} | {there.to_device_gb_s} | {there.basis} |"
        assert there.methods["shadowkv"].hits == 0.6, "the example of --hits, and ShadowKV's default"
    yield f"({BLOCK_BYTES // 2**10} KiB where a file does not say)"


def _fitted() -> Iterator[str]:
    fitted = rows(FIT)
    yield f"On a {machine(FIT)['cores']}-core Xeon (embedded model, bf16, a budget of {_options()['budget']} tokens"
    disturbed = [step for step in fitted if step["disturbed"]]
    yield f"samples of {len(disturbed)} [rows](../results/published/bench/fit/table.md) of {len(fitted)}"
    lengths = sorted({step["tokens"] for step in fitted})
    yield f"| method | {lengths[0]} tokens (ms) | {' | '.join(map(str, lengths[1:]))} |"
    for method in _options()["methods"]:
        steps = [row(FIT, method=method, tokens=tokens) for tokens in lengths]
        missed = [100 * abs(step["error_share"]) for step in steps]
        times = [f"{1e3 * step['step_s']:.1f}" for step in steps]
        yield line(method, *times, f"{median(missed):.0f} %", f"{max(missed):.0f} %")


def _options() -> dict[str, Any]:
    return dict(json.loads((PUBLISHED / f"{FIT}.json").read_text("utf-8"))["options"])


def _published() -> Iterator[str]:
    yield published.trust_table()
    batches = [point.method for point in published.shadowkv_points("batch used")]
    reserve = known()["A100-80G"].reserve_bytes / 1e9
    yield (
        f"Full's {batches.count('full')} batches come out exactly, ShadowKV's {batches.count('shadowkv')} within one, "
        f"with one reserve of {reserve:g} GB"
    )
    alone = published.errors()["A100-80G", "shadowkv", "nothing: bytes alone"]
    yield f"ShadowKV's bytes alone would promise {100 * min(alone):.0f} to {100 * max(alone):.0f} % too much"
    prompts = published.prefill_misses()
    (tokens, first), *others = [(tokens, f"{seconds * 1e3:.1f}") for tokens, seconds, _ in prompts]
    more = [f"{time} for {tokens:,}" for tokens, time in others]
    missed = [f"{-100 * share:.0f}" for *_, share in prompts]
    yield f"a layer takes {first} ms for {tokens:,} tokens, {', '.join(more[:-1])} and {more[-1]}"
    yield f"The plan's are {', '.join(missed[:-1])} and {missed[-1]} % less"
