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
    return [
        *_generate(),
        *_layer(),
        *_decode(),
        *_operations(),
        *_replay(),
        *(text for text in presses if text.startswith("|")),
    ]


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
    own = [row(LAYER, method="full", tokens=tokens)["speedup"][0] for tokens in (65536, 131072)]
    yield "Full beside itself comes to {:.2f} and {:.2f}".format(*own)
    assert max(abs(1 - ratio) for ratio in own) < 0.1, "a difference of less than a tenth says nothing"
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
    """What the sentences beside the table say of its ratios, which are of 8B and 1B."""
    shapes = (rows(DECODE_8B), rows(DECODE_1B))
    samples = [measured["disturbed"] for of in shapes for measured in of if measured["disturbed"]]
    disturbed = [sum(measured["disturbed"] > 0 for measured in of) for of in shapes]
    yield (
        f"In {disturbed[0]} and {disturbed[1]} of {len(shapes[0])} rows other processes disturbed {min(samples)} to "
        f"{max(samples)} of {shapes[0][0]['samples']} samples"
    )
    drifts = []
    for shape in (DECODE_8B, DECODE_1B):
        for tokens in (32768, 131072):
            beside = [one["full_s"][0] for one in rows(shape, tokens=tokens) if one["method"] != "full"]
            drifts.append(max(beside) / min(beside))
    yield f"Full's own median varied by a factor of up to {max(drifts):.1f}"
    evicting = ("streaming", "h2o", "snapkv", "pyramidkv", "adakv")
    few, many = 32768, 131072
    yield f"At {few} tokens weights take {_weights(few)[0]:.0f} and {_weights(few)[1]:.0f} % of Full's step"
    yield f"evict are {_range(few, *evicting)} times as fast as Full, PQCache {_both('pqcache', few)}"
    yield f"RocketKV, SparQ and Quest {_range(few, 'rocketkv', 'sparq', 'quest')}"
    yield f"ShadowKV and InfiniGen {_range(few, 'shadowkv', 'infinigen')}"
    shares = _weights(many)
    yield f"At {many} tokens they take {shares[0]:.0f} and {shares[1]:.0f} %"
    yield f"would be {100 / shares[0]:.1f} and {100 / shares[1]:.1f} times as fast"
    large, small = (sorted(_speedups(method, many)[shape] for method in evicting) for shape in (0, 1))
    yield f"come to {large[0]:.2f} to {large[-1]:.2f} with 8B and {small[0]:.2f} to {small[-1]:.2f} with 1B"
    names = {"RocketKV": "rocketkv", "PQCache": "pqcache", "SparQ": "sparq", "Quest": "quest", "ShadowKV": "shadowkv"}
    yield ", ".join(f"{name} {_both(method, many)}" for name, method in names.items())
    yield f"InfiniGen {_both('infinigen', many)}"
    kivi, oracle = (sorted(_speedups(name, few) + _speedups(name, many)) for name in ("kivi", "oracle"))
    yield f"KIVI, which reads every token in 4 bits, comes to {kivi[0]:.2f} to {kivi[-1]:.2f}"
    yield f"Oracle, which scores with all keys first, to {oracle[0]:.2f} to {oracle[-1]:.2f}"


def _weights(tokens: int) -> list[float]:
    return [100 * row(of, method="full", tokens=tokens)["weights_share"] for of in (DECODE_8B, DECODE_1B)]


def _both(method: str, tokens: int) -> str:
    """Its ratio with 8B and with 1B."""
    return "{:.2f} and {:.2f}".format(*_speedups(method, tokens))


def _range(tokens: int, *methods: str) -> str:
    ordered = sorted(ratio for method in methods for ratio in _speedups(method, tokens))
    return f"{ordered[0]:.2f} to {ordered[-1]:.2f}"


def _speedups(method: str, tokens: int) -> list[float]:
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


def _replay() -> Iterator[str]:
    cells = rows("bench/replay/result")
    assert {cell["transfer_ms"] for cell in cells} == {20.0}
    ratios = sorted(cell["ratio"][0] for cell in cells if cell["counts"])
    assert len(ratios) == len(cells)
    assert 0.85 <= ratios[0] <= ratios[-1] <= 1.2
    yield f"On a {machine('bench/replay/result')['cores']}-core Intel Xeon without bf16 instructions"
    yield f"at 20 ms all {len(cells)} cells count"
    scatter = max(abs(end / cell["ratio"][0] - 1) for cell in cells for end in cell["ratio"][1:])
    assert 0.3 < scatter < 0.34, "up to a third"
    yield f"with overlap and without: {ratios[0]:.2f} to {ratios[-1]:.2f}"
