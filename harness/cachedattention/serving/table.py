"""Runs side by side: a table for the terminal, a row for a spreadsheet, a picture of TTFT against the rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cachedattention.serving.runs import FirstTokenLimit
from harness.terminal.tables import Column, number, share, text_table
from methods.tiers.tier import TIERS

MARKS = "osD^vPX"


@dataclass(frozen=True)
class Line:
    """A run as it is shown. `named`: the keys that vary, but for the rate; `figures`: its totals."""

    named: Mapping[str, str]
    rate: float
    figures: Mapping[str, Any]

    @property
    def system(self) -> str:
        return " ".join(self.named.values())

    @property
    def flat(self) -> dict[str, Any]:
        """What varies, then the figures, of which a run of an earlier command may lack some."""
        return {**self.named, "rate": self.rate, **self.figures}


def table(lines: Sequence[Line]) -> str:
    told = [line.figures for line in lines]
    named = [Column(key, "", [line.named[key] for line in lines], left=True) for key in lines[0].named]
    shares = {"hit_rate": "hits", **{f"hit_rate_{tier}": f"{tier}\nhits" for tier in TIERS}, "reused_tokens": "reused"}
    seconds = {"ttft_p50_s": "TTFT\np50", "ttft_p90_s": "TTFT\np90", "ttft_p99_s": "TTFT\np99", "queue_s": "queue",
               "load_s": "load", "save_s": "save"}  # fmt: skip
    figures = [
        number("rate", "1/s", [line.rate for line in lines]),
        *(number(head, "s", [one[key] or None for one in told]) for key, head in seconds.items()),
        *(share(head, [one[key] or None for one in told]) for key, head in shares.items()),
        number("prefill", "tok/s", [one["prefill_tok_s"] for one in told]),
        number("busy", "s", [one["busy_s"] for one in told]),
        Column("cost", "$", [f"{one['cost_usd']:.2g}" for one in told]),
        number("turns", "", [one["turns"] for one in told]),
        Column("lost", "", [str(one.get("lost_turns") or "") for one in told]),
    ]
    return text_table([*named, *figures])


def draw(lines: Sequence[Line], path: Path, title: str, limit: FirstTokenLimit | None) -> tuple[Path, Path]:
    """A line per system; a PNG at `path`, a PDF beside it."""
    from matplotlib.ticker import LogLocator, NullLocator

    from harness.reports.pictures import figures

    picture, [axes] = figures.side_by_side(1)
    key = limit.key if limit else "ttft_p90_s"
    for place, system in enumerate(dict.fromkeys(line.system for line in lines)):
        points = sorted((line.rate, line.figures[key]) for line in lines if line.system == system)
        axes.plot(*zip(*points, strict=True), f"{MARKS[place % len(MARKS)]}-", label=system or None, markersize=4)
    if limit:
        axes.axhline(limit.seconds, color=figures.SOFT, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="new sessions per second", ylabel=f"{key.split('_')[1]} of TTFT (s)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    figures.framed(axes)
    if lines[0].named:
        axes.legend(frameon=False, fontsize=8.5)
    figures.title(picture, title)
    return figures.save(picture, path)
