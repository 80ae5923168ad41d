"""Numbers of docs/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil
from typing import Any

from harness.terminal.tables import digits
from tests.numbers.files import PUBLISHED, line, machine, ranged, row, rows

GENERATE, LAYER, OPS = (f"bench/{name}/result" for name in ("generate", "layer", "ops"))


def held() -> list[str]:
    presses = (PUBLISHED / "bench" / "kvpress" / "table.md").read_text("utf-8").splitlines()
    return [*_generate(), *_layer(), *_operations(), *(text for text in presses if text.startswith("|"))]


def _generate() -> Iterator[str]:
    cpu = {(of["cores"], of["cpu"].rpartition("@ ")[2]) for of in map(machine, (GENERATE, LAYER, OPS))}
    [(cores, clock)] = cpu
    yield f"{cores}-core Intel Xeon at {float(clock.removesuffix('GHz')):g} GHz"
    for one in rows(GENERATE):
        first, step = one["ttft_s"], one["tpot_s"]
        waits = [f"{1e3 * first[side][0]:.0f}" for side in ("ours", "generate")]
        steps = [digits(1e3 * step[side][0]) for side in ("ours", "generate")]
        ratios = [ranged(times["ratio"], 2) for times in (first, step)]
        yield line(one["prompt_tokens"], one["dtype"], *waits, ratios[0], *steps, ratios[1])
    assert all(one["same_tokens"] for one in rows(GENERATE, dtype="fp32")), "in fp32 our tokens are generate's"
    agreement = {f"{100 * one['agreement']:.1f}" for one in rows(GENERATE, dtype="bf16")}
    yield f"the next token is that of fp32 in {' and '.join(agreement)} % of the places"


def _layer() -> Iterator[str]:
    bandwidth = json.loads((PUBLISHED / f"{LAYER}.json").read_text("utf-8"))["limits"]["read_gb_s"]
    yield f"{bandwidth:.0f} GB/s read"
    for one in rows(LAYER):
        seal_s, won = one["seal_s"], ""
        if one["method"] != "full":
            won = str(ceil(seal_s / (one["full_s"][0] - one["step_s"][0])))
        yield line(
            one["method"],
            one["tokens"],
            digits(1e3 * one["step_s"][0]),
            ranged(one["speedup"], 2),
            digits(one["read_bytes"] / 1e6),
            digits(one["gb_s"]),
            f"{100 * one['gb_s'] / bandwidth:.0f}",
            digits(seal_s) if won else 0,
            won,
        )
        if (one["method"], one["tokens"]) == ("shadowkv", 131072):
            yield f"needs an answer of {won} tokens"
    shares = [f"{100 * one['gb_s'] / bandwidth:.0f}" for one in rows(LAYER, method="full")]
    yield f"Full's attention reads at {' to '.join(shares)} % of the bandwidth"
    rebuilding = [f"{1e3 * one['parts_s']['fetch']:.1f}" for one in rows(LAYER, method="shadowkv")]
    yield f"spends {' and '.join(rebuilding)} ms on rebuilding its keys"


def _operations() -> Iterator[str]:
    attention = _compiled("segment_attention", what="Full, 32768")
    yield (
        f"Decode attention is {attention['beside_rival'][0]:.1f} times as fast as transformers' `sdpa`; with cold "
        "caches "
        f"it reads at {100 * attention['of_limit'][0]:.0f} % of the bandwidth"
    )
    prefill, sums = (_compiled(f"prefill_attention{more}") for more in ("", "_with_column_sums"))
    yield (
        f"Prefill attention at 2048 tokens is {prefill['beside_rival'][0]:.1f} times as fast as `sdpa`. With column "
        "sums "
        f"it takes {sums['time_s'][0] / prefill['time_s'][0]:.2f} times as long as the attention alone"
    )
    windowed = _compiled("windowed_attention")
    yield f"Within a window of 512 tokens it is {windowed['beside_rival'][0]:.1f} times as fast as torch's with a mask"


def _compiled(op: str, **which: Any) -> dict[str, Any]:
    return row(OPS, op=op, backend="cpu", **which)
