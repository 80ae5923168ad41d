"""Numbers of docs/history.md about the store: what waits for what, and what an overflow costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import exp

from tests.numbers.files import PUBLISHED, line, machine, ms, ranged, row, rows, table

OVERLAP = "cachedattention/overlap"
SAVING = "cachedattention/saving"
OVERFLOW = "cachedattention/overflow"
AFTER = {  # of docs/history.md: the names of the ways behind an overflow
    "`truncate_tokens` (TT)": "truncate_tokens",
    "`truncate_cache` (CA)": "truncate_cache",
    "`truncate_cache`, 4 sinks": "truncate_cache, 4 sinks",
    "`truncate_rotated` (NKVT)": "truncate_rotated",
    "rotated, positions go on": "rotated, positions go on",
    "no overflow": "no overflow",
}
LOADING = {
    "from disk, `off`: loaded, then computed": ("load from disk", "off"),
    "layer by layer, no buffer": ("load from disk", "buffer 0"),
    "buffer of 5 layers (of 30)": ("load from disk", "buffer 5"),
    "15 layers": ("load from disk", "buffer 15"),
    "30 layers": ("load from disk", "buffer 30"),
    "the formula's: 5 layers": ("load from disk", "formula"),
    "save to disk, `off`": ("save to disk", "off"),
    "with a write buffer": ("save to disk", "write buffer"),
}


def held() -> list[str]:
    return [*_first_token(), *_overlap(), *_saving(), *_overflow(), *_answers()]


def _first_token() -> Iterator[str]:
    name = "cachedattention/history"
    for tokens in (512, 1024, 2048, 4096):
        ways = {way: row(name, tokens=tokens, way=way) for way in ("recompute", "host", "disk", "device_prefix")}
        stored = f"{ways['host']['stored_bytes'] / 1e6:.3g}"
        times = [ms(ways["recompute"]["ttft_s"])]
        for way in ("host", "disk"):
            times += [ms(ways[way]["ttft_s"]), ranged(ways[way]["speedup"], 1)]
        yield line(tokens, stored, *times, ms(ways["device_prefix"]["ttft_s"]))
    assert all(one["same_token"] for one in rows(name)), "every first token is the same"
    [full] = [one for one in table("tables/headline_4k_times") if one["method"] == "full"]
    assert full["dtype"] == "bf16"
    tokens, seconds = float(full["prompt_tokens.median"]), float(full["tt2t_s.p50"])
    yield f"a prompt of {tokens:.0f} tokens takes Full {seconds:.1f} s up to its second token"


def _overlap() -> Iterator[str]:
    for shown, (what, way) in LOADING.items():
        one = row(OVERLAP, what=what, way=way)
        waited = "" if one["waited_s"] is None else ms(one["waited_s"])
        ratio, both = "1", "1"
        if way != "off":
            low, high = (f"{value:.3g}" for value in one["speedup"][1:])
            ratio = f"{one['speedup'][0]:.2f} ({float(low):.2f} to {_short(float(high))})"
            both = f"{one['both'][0]:.2f}"
        yield line(shown, ms(one["turn_s"]), waited, ms(one["hidden_s"]), ratio, both)
    off, none = (row(OVERLAP, what="load from host", way=way) for way in ("off", "buffer 0"))
    slower, low, high = none["speedup"]
    yield (
        f"waits for {ms(none['waited_s'])} ms instead of {ms(off['waited_s'])}, but the copies slow down its own "
        f"computing by as much (off / this {slower:.2f}, {low:.2f} to {high:.2f})"
    )
    assert row(OVERLAP, what="load from host", way="formula")["layers"] == 0, "the formula asks for no buffer"


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _saving() -> Iterator[str]:
    for tokens in (1024, 1600):
        for way, first in (("off", tokens), ("asynchronous", "")):
            one = row(SAVING, tokens=tokens, way=way)
            shown = "`off`" if way == "off" else way
            beside = "0" if way == "off" else ranged(one["hidden_s"], 0, 1e3)
            ratio = "1" if way == "off" else ranged(one["both"], 2, word=" to ")
            yield line(first, shown, ranged(one["turn_s"], 0, 1e3), ranged(one["waited_s"], 0, 1e3), beside, ratio)
    stored = json.loads((PUBLISHED / f"{SAVING}.json").read_text("utf-8"))
    loads = sorted(of["load_average"][0] for of in (machine(SAVING), stored["ended"]))
    yield f"a load of {loads[0]:.0f} to {loads[1]:.0f} on two cores"
    disturbed = sum(one["disturbed"] for one in rows(SAVING))
    yield f"disturbed {disturbed} of {sum(one['samples'] for one in rows(SAVING))} turns"
    shares = [one["waited_s"][0] / one["turn_s"][0] for one in rows(SAVING, way="off")]
    assert [f"{100 * share:.0f}" for share in shares] == ["2", "2"], "the save is 2 % of a turn"
    yield "the save is only 2 % of a turn"
    shares = [
        row(SAVING, tokens=tokens, way="asynchronous")["waited_s"][0]
        / row(SAVING, tokens=tokens, way="off")["waited_s"][0]
        for tokens in (1024, 1600)
    ]
    assert abs(shares[0] - 1 / 2) < 0.02, "half of what `off` waits"
    assert abs(shares[1] - 2 / 5) < 0.03, "two fifths"
    yield "half of what `off` waits after 1024 tokens, and two fifths after 1600"


def _overflow() -> Iterator[str]:
    for shown, way in AFTER.items():
        one = row(OVERFLOW, way=way)
        logs, factors = "", ""
        if one["difference"]:
            logs = ranged(one["difference"], 3, word=" to ")
            places = 1 if one["difference"][0] > 2 else 2
            factors = ranged([exp(value) for value in one["difference"]], places, word=" to ")
        seconds = (
            ""
            if one["seconds"] is None
            else f"{one['seconds'][0]:.3g}"
            if way == "truncate_tokens"
            else f"{one['seconds'][0]:.2f}"
        )
        yield line(shown, f"{exp(one['ln_perplexity'][0]):.2f}", logs, factors, seconds)
    cache, sinks = (row(OVERFLOW, way=f"truncate_cache{more}")["difference"][0] for more in ("", ", 4 sinks"))
    yield f"the logarithms differ by {cache:.2f}"
    kept, removed = 4 / 2048, 1 - sinks / cache
    yield f"Keeping 4 tokens, {100 * kept:.1f} % of the window, removes {100 * removed:.0f} % of the difference"
    yield f"finds most facts even at a perplexity of {exp(row(OVERFLOW, way='truncate_cache')['ln_perplexity'][0]):.0f}"


def _answers() -> Iterator[str]:
    lines = {one["label"]: one for one in table("experiments/cachedattention_table2")}

    def found(by: str, sinks: int) -> str:
        one = lines[f"full by={by} sinks={sinks}"]
        return f"{sum(12 * float(one[f'turns.{turn}.score']) for turn in (2, 3, 4)):.0f} of 36"

    for shown in list(AFTER)[:4]:
        by = AFTER[shown]
        if "sinks" not in by:
            yield line(shown, found(by, 0), found(by, 4))
    assert {float(one["turns.1.score"]) for one in lines.values()} == {6 / 12}
    yield "All three answer 6 of 12 first questions"
