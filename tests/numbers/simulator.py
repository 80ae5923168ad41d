"""Numbers of docs/history.md about the simulator, and of the table that changes one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.history.simulation.scenario import Scenario
from tests.numbers.files import figures, line, run

Run = Mapping[str, float]
MODELS = {"LLaMA-13B": "llama-13b", "LLaMA-65B": "llama-65b", "LLaMA-70B": "llama-70b", "Falcon-40B": "falcon-40b"}
PAPER = {  # hits, TTFT saved, speedups of prefill and GPU time, cost saved, points of figure 22
    "LLaMA-13B": "86 | | 85 | 6.8 | 4.0 | 70 | 17.6",
    "LLaMA-65B": "71 | | 61 | 2.6 | 1.9 | 43 | 41.5",
    "LLaMA-70B": "89 | | 87 | 7.8 | 3.3 | 66 | 18.1",
    "Falcon-40B": "90 | | 86 | 7.2 | 3.4 | 68 | 18.4",
}
PAPER_HITS = {  # figure 21
    "scheduler_aware": ("40", "86 (85.7)"),
    "lru": ("12.9 (0.5)", "58 (0.6)"),
    "fifo": ("9.5 (0.5)", "48 (0.5)"),
}
FITTED = "\\*"


def held() -> list[str]:
    return [*_defaults(), *_hits(), *_savings(), *_changes(), *_sentences()]


def _defaults() -> Iterator[str]:
    """The first cells of a row of settings, whose defaults are those of a scenario."""
    usual = Scenario()
    alone = ("write_buffer", "reserve", "block_tokens", "truncation_ratio", "think_s", "warmup", "seed")
    together = [("device", "host", "disk"), ("sessions", "rate"), ("question_share", "correlation")]
    for keys in [*together, *((key,) for key in alone)]:
        values = [str(getattr(usual, key)) for key in keys]
        shown = ", ".join(value.removesuffix(".0") if keys == ("think_s",) else value for value in values)
        yield f"| {', '.join(f'`{key}`' for key in keys)} | {shown} |"


def pair(name: str, **settings: object) -> tuple[Run, Run]:
    """What a file holds of `scheduler_aware` and of `recompute`."""
    at: dict[str, Any] = {"positions": "decoupled", **settings}
    return figures(name, policy="scheduler_aware", **at), figures(name, policy="recompute", **at)


def saved(of: str, runs: tuple[Run, Run]) -> float:
    """In percent of what recomputation takes."""
    return 100 * (1 - runs[0][of] / runs[1][of])


def twice(text: str, of: str, runs: tuple[Run, Run]) -> str:
    """The saving of a cost, or the speedup of a time, with halts counted once and twice."""
    both = (of, f"{of}_with_halts")
    if text == "saved":
        return ", ".join(f"{saved(key, runs):.0f}" for key in both)
    return ", ".join(f"{runs[1][key] / runs[0][key]:.1f}" for key in both)


def lost(name: str, **settings: object) -> str:
    """Points of the hit rate that coupled positions lose."""
    at: dict[str, Any] = {"policy": "scheduler_aware", **settings}
    apart, together = (figures(name, positions=kind, **at)["hit_rate"] for kind in ("decoupled", "coupled"))
    return f"{100 * (apart - together):.1f}"


def _hits() -> Iterator[str]:
    def cell(name: str, policy: str, disk: str) -> str:
        one = figures(name, policy=policy, disk=disk)
        return f"{100 * one['hit_rate']:.1f} ({100 * one['hit_rate_host']:.1f})"

    for policy, printed in PAPER_HITS.items():
        pairs = zip(printed, ("2TB", "10TB"), strict=True)
        cells = [
            text
            for paper, disk in pairs
            for text in (paper, *(cell(n, policy, disk) for n in ("figure_21", "anytime")))
        ]
        yield line(f"`{policy}`", *cells)
    lru, fifo = (100 * figures("figure_21", policy=policy, disk="10TB")["hit_rate"] for policy in ("lru", "fifo"))
    yield f"our LRU and FIFO both hit {lru:.0f} % ({lru:.1f} and {fifo:.1f}), where the paper has 58 and 48"


def _savings() -> Iterator[str]:
    for shown, model in MODELS.items():
        star = FITTED if model == "llama-13b" else ""
        points = lost("figure_22", model=model) + (star or (FITTED if model == "falcon-40b" else ""))
        yield line(f"{shown}, paper", PAPER[shown])
        yield line("ours", *_saving(pair("figure_14", model=model), star), points)
        if model in ("llama-13b", "llama-65b"):
            yield line("ours, `disk_duplex: true`", *_saving(pair("duplex", model=model), star), "")


def _saving(runs: tuple[Run, Run], star: str) -> list[str]:
    hits, returning = (f"{100 * runs[0][of]:.1f}" for of in ("hit_rate", "returning"))
    faster = f"{runs[0]['prefill_tok_s'] / runs[1]['prefill_tok_s']:.1f}"
    cells = [
        f"{saved('ttft_s', runs):.1f}",
        faster,
        twice("speedup", "gpu_hours", runs),
        twice("saved", "cost_usd", runs),
    ]
    return [hits, returning, *(cell + star for cell in cells)]


def _changes() -> Iterator[str]:
    printed = pair("prefill_as_printed")
    defaults, own = pair("figure_14", model="llama-13b"), pair("store_defaults")
    told = (
        f"the store's defaults, `copies=false write_buffer=256MB`: {own[0]['disk_written_bytes'] / 1e12:.0f} TB are "
        "written "
        f"in place of {defaults[0]['disk_written_bytes'] / 1e12:.0f}, cost is ${own[0]['cost_usd']:.0f} against "
        f"${own[1]['cost_usd']:.0f}"
    )
    slower = (
        f"prefill as printed (`prefill_s_per_token: 0.0001`): TTFT of `recompute` {printed[1]['ttft_s']:.3f} s, GPU "
        "time "
        f"{printed[1]['gpu_hours']:.1f} h, cost ${printed[0]['cost_usd']:.0f} against ${printed[1]['cost_usd']:.0f}"
    )
    yield _change("defaults", defaults, lost("figure_22", model="llama-13b"))
    yield _change(told, own, "")
    yield _change(slower, printed, lost("prefill_as_printed"))
    shorter = "`correlation=0`: long conversations have no more turns than short ones"
    yield _change(shorter, pair("correlation_0"), lost("correlation_0"))
    yield _change("`write_buffer=null`: writing never waits", pair("write_buffer_null"), "")
    yield _change("`question_share=0.2` and `disk_duplex: true`", pair("fitted"), lost("fitted"))


def _change(shown: str, runs: tuple[Run, Run], points: str) -> str:
    hours = ", ".join(f"{runs[0][key]:.1f}" for key in ("gpu_hours", "gpu_hours_with_halts"))
    times = [f"{runs[0]['ttft_s']:.3f}", f"{saved('ttft_s', runs):.1f}", hours]
    return line(shown, *times, twice("speedup", "gpu_hours", runs), twice("saved", "cost_usd", runs), points)


def _sentences() -> Iterator[str]:
    trace, cuts = (run("figure_14", model="llama-13b", policy="recompute")[key] for key in ("trace", "cuts"))
    short = run("figure_14", model="llama-65b", policy="recompute")["cuts"]
    yield f"a run of {trace['sessions']} sessions with {round(trace['turns'], -3):,} turns"
    parts = [f"{100 * part['cut_turns']:.1f}" for part in (cuts, short)]
    lost_parts = [[f"{100 * part[f'lost_{of}_tokens']:.0f}" for of in ("question", "answer")] for part in (cuts, short)]
    yield (
        f"With a window of {cuts['window']} tokens, {parts[0]} % of the turns are cut, and {lost_parts[0][0]} % of "
        "all question "
        f"tokens and {lost_parts[0][1]} % of all answer tokens are lost; with {short['window']} it is {parts[1]} %, "
        f"{lost_parts[1][0]} % and {lost_parts[1][1]} %"
    )
    own = pair("store_defaults")
    once, doubled = (saved(cost, own) for cost in ("cost_usd", "cost_usd_with_halts"))
    yield f"LLaMA-13B costs {-once:.0f} % more than recomputation, or {doubled:.0f} % less if halts count twice"
    large = figures("figure_14", model="llama-65b", policy="scheduler_aware")
    apart = figures("correlation_0_65b")
    yield (
        f"Storage limits 65B alone, and its {100 * large['hit_rate']:.1f} % depend on `correlation`: at 0 it is "
        f"{100 * apart['hit_rate']:.1f} %"
    )
    yield f"saves {saved('ttft_s', pair('store_defaults_70b')):.0f} % of TTFT even with the store's defaults"
    yield f"but gives LLaMA-65B {100 * figures('anytime_65b')['hit_rate']:.1f} %"
    hits = [100 * figures("figure_24", model=model, host="128GB", disk=0)["hit_rate"] for model in MODELS.values()]
    *first, last = (f"{share:.1f}" for share in hits)
    yield f"{', '.join(first)} and {last} % hit (figure 24)"
    slow, fast = (100 * figures("figure_25", rate=rate)["hit_rate"] for rate in (0.5, 2.0))
    yield f"ours rises from {slow:.1f} to {fast:.1f} %"
