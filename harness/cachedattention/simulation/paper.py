"""The figures of the CachedAttention paper, made again by the simulator: which runs each needs, and
what the paper says about them (paper.yaml)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cachedattention.simulation.outcome import SimulatedRow
from harness.cachedattention.simulation.scenario import Scenario, scenarios
from harness.config.settings import SettingsError
from harness.results.files import read_yaml
from harness.terminal.tables import Column, digits, percent, text_table

FILE = Path(__file__).with_name("paper.yaml")
FAR = 0.10  # points of a share; a quarter of any other number
FAR_TEXT = "more than 10 points from the paper, or a quarter of another number"
SHARES = ("hit_rate", "hit_rate_host", "storage_share")
SIGNS = {"value": "", "saving": "saved", "speedup": "x", "points": "points"}


@dataclass(frozen=True, kw_only=True)
class PaperClaim:
    """Hold a number that the CachedAttention paper gives. `of`: the figure of a simulated run that
    it is about, such as `hit_rate`; `at`: settings of that run; `paper`: the number. If it compares
    two runs, `over` has the settings of the other one, and `kind` says how they are compared."""

    of: str
    at: Mapping[str, Any]
    paper: float
    kind: str = "value"
    over: Mapping[str, Any] | None = None

    def ours(self, rows: Sequence[SimulatedRow]) -> float:
        here = _find(rows, self.at)[self.of]
        if self.over is None:
            return float(here)
        there = _find(rows, {**self.at, **self.over})[self.of]
        return float(
            {"saving": 1 - here / there, "speedup": there / here, "points": here - there}[self.kind]
        )

    @property
    def is_share(self) -> bool:
        return self.kind in ("saving", "points") or (self.kind == "value" and self.of in SHARES)

    def is_missed(self, value: float) -> bool:
        return abs(value - self.paper) > (FAR if self.is_share else 0.25 * abs(self.paper))

    @property
    def name(self) -> str:
        where = ", ".join(str(value) for value in self.at.values())
        return f"{where}: {self.of}{' ' * bool(SIGNS[self.kind])}{SIGNS[self.kind]}"

    def shown(self, value: float) -> str:
        if self.kind == "points":
            return percent(value, sign=True)
        return f"{percent(value)} %" if self.is_share else digits(value)


@dataclass(frozen=True)
class Figure:
    """Describe a figure of the CachedAttention paper. `runs`: the words of the simulated runs that
    it needs, such as `policy=lru,fifo`; `skip`: settings of runs to leave out; `claims`: the
    numbers that the paper gives."""

    number: str
    title: str
    runs: Sequence[str]
    skip: Mapping[str, Any]
    claims: Sequence[PaperClaim]

    def scenarios(self, words: Sequence[str]) -> Iterator[Scenario]:
        """Yield the settings of each simulated run of the figure. `words`: further settings as
        `key=value`, of keys that the figure leaves alone and with one value each."""
        made = {run.partition("=")[0]: run for run in self.runs}
        for word in words:
            key = word.partition("=")[0]
            if key in made or "," in word:
                kept = made.get(key, f"one value of {key}")
                raise SettingsError(
                    f"--figure {self.number} makes its runs with {kept}: leave out {word}."
                )
        for scenario in scenarios([*self.runs, *words]):
            if not self.skip or any(
                getattr(scenario, key) != value for key, value in self.skip.items()
            ):
                yield scenario

    def table(self, rows: Sequence[SimulatedRow]) -> str:
        """Return a table of the paper's numbers and those of the simulated `rows`, with a mark at
        numbers that are far from the paper's."""
        pairs = [(claim, claim.ours(rows)) for claim in self.claims]
        marks = ["!" * claim.is_missed(value) for claim, value in pairs]
        shown = text_table(
            [
                Column(f"figure {self.number}", "", [claim.name for claim, _ in pairs], left=True),
                Column("paper", "", [claim.shown(claim.paper) for claim, _ in pairs]),
                Column("ours", "", [claim.shown(value) for claim, value in pairs]),
                Column("", "", marks, left=True),
            ]
        )
        return shown + f"\n! not reproduced: {FAR_TEXT}" * any(marks)


def figure(number: str) -> Figure:
    """Return the runs and numbers of a figure of the paper, by its number. Raise `SettingsError`
    where it is not simulated."""
    known = read_yaml(FILE)
    if number not in known:
        raise SettingsError(
            f"--figure {number} is not simulated: choose one of {', '.join(known)}."
        )
    plain = known[number]
    claims = [PaperClaim(**claim) for claim in plain["claims"]]
    return Figure(number, plain["title"], plain["runs"], plain.get("skip", {}), claims)


def _find(rows: Sequence[SimulatedRow], at: Mapping[str, Any]) -> SimulatedRow:
    found = [
        row["figures"]
        for row in rows
        if all(row["settings"][key] == value for key, value in at.items())
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} runs have {dict(at)}")
    return dict(found[0])
