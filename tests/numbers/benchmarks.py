"""Numbers of docs/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil
from typing import Any

from harness.terminal.tables import digits
from tests.numbers.files import PUBLISHED, line, machine, ranged, row, rows

GENERATE, LAYER, OPS = (f"bench/{name}/result" for name in ("generate", "layer", "ops"))
DECODE_8B, DECODE_1B = (f"bench/decode_{size}/result" for size in ("8b", "1b"))


def held() -> list[str]:
    presses = (PUBLISHED / "bench" / "kvpress" / "table.md").read_text("utf-8").splitlines()
    return [*_generate(), *_layer(), *_decode(), *_operations(), *(text for text in presses if text.startswith("|"))]


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
    beside = {}
    for tokens in (65536, 131072):
        full_ms = sorted(1e3 * one["full_s"][0] for one in rows(LAYER, tokens=tokens) if one["method"] != "full")
        beside[tokens] = f"{full_ms[0]:.1f} to {full_ms[-1]:.1f}"
    yield f"({beside[65536]} ms at 65536 tokens, {beside[131072]} at 131072)"
    shares = [f"{100 * one['gb_s'] / bandwidth:.0f}" for one in rows(LAYER, method="full")]
    yield f"Full's attention reads at {' to '.join(shares)} % of the bandwidth"
    rebuilding = [f"{1e3 * one['parts_s']['fetch']:.1f}" for one in rows(LAYER, method="shadowkv")]
    yield f"spends {' and '.join(rebuilding)} ms on rebuilding its keys"


def _decode() -> Iterator[str]:
    for method in dict.fromkeys(measured["method"] for measured in rows(DECODE_8B)):
        cells: list[str] = []
        for shape in (DECODE_8B, DECODE_1B):
            for tokens in (32768, 131072):
                measured = row(shape, method=method, tokens=tokens)
                whole = measured["all_layers"]
                full_ms = f"{digits(1e3 * whole['tpot_s'][0])} ms"
                cells.append(ranged(whole["speedup"], 2) if whole["speedup"] else full_ms)
                cells.append(f"{100 * measured['weights_share']:.0f}")
        yield line(method, *cells)
    yield from _whole_tokens()


def _whole_tokens() -> Iterator[str]:
    """What the sentences below the table say of its ratios, which are of 8B and 1B."""
    disturbed = [sum(measured["disturbed"] > 0 for measured in rows(shape)) for shape in (DECODE_8B, DECODE_1B)]
    yield f"In {disturbed[0]} and {disturbed[1]} of {len(rows(DECODE_8B))} rows"
    shares = [
        f"{100 * row(shape, method='full', tokens=tokens)['weights_share']:.0f}"
        for shape, tokens in ((DECODE_8B, 32768), (DECODE_8B, 131072), (DECODE_1B, 131072))
    ]
    few = ("streaming", "h2o", "snapkv", "pyramidkv", "adakv")
    gains = sorted(100 * _speedups(method, 32768)[0] - 100 for method in few)
    yield f"weights take {shares[0]} % of Full's step of the 8B shape"
    yield f"gain {gains[0]:.0f} to {gains[-1]:.0f} % alone"
    yield f"At 131072 tokens weights take {shares[1]} and {shares[2]} % of Full's step"
    fast, chosen = (sorted(x for m in of for x in _speedups(m)) for of in (few, ("pqcache", "rocketkv")))
    yield f"are {fast[0]:.2f} to {fast[-1]:.2f} times as fast as Full"
    quest, sparq, shadowkv = (sorted(_speedups(method)) for method in ("quest", "sparq", "shadowkv"))
    yield (
        f"PQCache and RocketKV {chosen[0]:.2f} to {chosen[-1]:.2f}, Quest {quest[0]:.2f} and {quest[1]:.2f}, "
        f"SparQ {sparq[0]:.2f} and {sparq[1]:.2f}, ShadowKV {shadowkv[0]:.2f} and {shadowkv[1]:.2f}"
    )
    few_tokens, many_tokens = (_speedups("infinigen", tokens) for tokens in (32768, 131072))
    yield f"InfiniGen is {many_tokens[0]:.2f} times as fast with 8B at 131072 tokens"
    yield f"and slower than Full elsewhere ({few_tokens[0]:.2f}, {few_tokens[1]:.2f} and {many_tokens[1]:.2f})"
    assert max(_speedups("oracle")) < 1
    yield f"gains {100 * max(_speedups('kivi')) - 100:.0f} % at most"


def _speedups(method: str, tokens: int = 131072) -> list[float]:
    return [row(of, method=method, tokens=tokens)["all_layers"]["speedup"][0] for of in (DECODE_8B, DECODE_1B)]


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
