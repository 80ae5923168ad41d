"""All runs of one command: the points that were given, and under a limit those that a search adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.cachedattention.serving import table
from harness.cachedattention.serving.figures import cost
from harness.cachedattention.serving.plan import ServingPlan
from harness.cachedattention.serving.run import RUN, SCHEMA, ServedRow, found, served
from harness.cachedattention.serving.search import FirstTokenLimit, RateSearch
from harness.cachedattention.serving.traffic import TrafficPoint
from harness.cachedattention.simulation.costs import Prices
from harness.results.files import digest, write_csv, write_json
from harness.terminal.notices import warn
from harness.terminal.tables import digits, percent

TABLES = "tables"


class Runs:
    """`points`: of the command line; planned at once, so that nothing wrong with the last is found after the first."""

    def __init__(
        self,
        points: Sequence[TrafficPoint],
        out: Path,
        prices: Prices,
        limit: FirstTokenLimit | None = None,
        config_dirs: Sequence[Path] = (),
    ) -> None:
        self.out, self.prices, self.limit = out, prices, limit
        self.systems: dict[str, ServingPlan] = {}
        self.plans = [self._plan(point, config_dirs) for point in points]
        self.rows: list[tuple[ServingPlan, ServedRow]] = []
        rates = sorted({plan.rate for plan in self.plans})
        self.searches = {}
        if limit:
            self.searches = {name: RateSearch(rates, _most(plan, limit)) for name, plan in self.systems.items()}

    def _plan(self, point: TrafficPoint, config_dirs: Sequence[Path]) -> ServingPlan:
        if point.system not in self.systems:
            self.systems[point.system] = ServingPlan.of(point, config_dirs)
        known = self.systems[point.system]
        return known.at(point.traffic.rate or known.rate)

    def serve(self) -> None:
        for plan in self.plans:
            self._serve(plan)
        while added := list(self._added()):
            for plan in added:
                self._serve(plan)

    def _added(self) -> Iterator[ServingPlan]:
        """The next step of every search, so that the systems take turns."""
        for system, search in self.searches.items():
            if (rate := search.next()) is not None:
                yield self.systems[system].at(rate)

    def _serve(self, plan: ServingPlan) -> None:
        plan.job.remove_leftovers()
        known = found(plan, self.out)
        if known is None:
            warn(_coming(plan))
        made = known or served(plan, self.out)
        figures = made["figures"]
        row = {**made, "figures": figures | cost(figures["busy_s"], self.prices, made["reserved"])}
        self.rows.append((plan, row))
        if self.limit:
            self.searches[plan.point.system].learn(plan.rate, figures[self.limit.key] <= self.limit.seconds)
        warn(_said(plan, row, known is not None))

    @property
    def lines(self) -> list[table.Line]:
        """By rate, so that the systems stand below each other."""
        order = list(self.systems)
        rows = sorted(self.rows, key=lambda one: (one[0].rate, order.index(one[0].point.system)))
        return [table.Line(plan.point.others, plan.rate, row["figures"]) for plan, row in rows]

    def text(self) -> str:
        return "\n\n".join([table.table(self.lines), *self._findings()])

    def _findings(self) -> Iterator[str]:
        if self.limit:
            least = min((one.highest for one in self.searches.values() if one.highest), default=None)
            yield "\n".join([f"{self.limit}:", *(f"  {_found(*one, least)}" for one in self.searches.items())])

    @property
    def folder(self) -> Path:
        """Of what this command writes of all its runs: the same runs under the same limit and prices have the same."""
        asked = {
            "runs": [plan.identity for plan in self.plans],
            "limit": str(self.limit),
            "prices": asdict(self.prices),
        }
        return self.out / TABLES / f"{len(self.plans)}-runs-{digest(asked)[:8]}"

    def write(self) -> list[Path]:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN, {"schema": SCHEMA, "limit": self._limit(), "runs": [row for _, row in self.rows]})
        write_csv(folder / "serving.csv", [line.flat for line in self.lines])
        job, traffic = self.plans[0].job, self.plans[0].point.traffic
        title = f"{job.model.describe().name}, {len(job.items)} conversations, {traffic.slots} slots"
        drawn = table.draw(self.lines, folder / "ttft.png", title, self.limit)
        return [folder / RUN, folder / "serving.csv", *drawn]

    def _limit(self) -> dict[str, Any] | None:
        if self.limit is None:
            return None
        found = {name: {"highest": one.highest, "broken": one.broken} for name, one in self.searches.items()}
        return {"of": self.limit.key, "seconds": self.limit.seconds, "systems": found}


def _most(plan: ServingPlan, limit: FirstTokenLimit) -> float:
    """The rate at which all sessions come within the seconds of the limit."""
    return len(plan.sessions) / limit.seconds


def _coming(plan: ServingPlan) -> str:
    """A run before it begins: how much there is to do, and how long that takes at least."""
    turns, last_s = sum(len(one.item.turns) for one in plan.sessions), max(one.start_s for one in plan.sessions)
    waits = f", the last session comes after {last_s:.0f} s" if plan.point.traffic.clock == "wall" else ""
    return f"{plan.label}: {turns} turns of {len(plan.sessions)} sessions{waits}"


def _said(plan: ServingPlan, row: ServedRow, known: bool) -> str:
    """A run in a line."""
    figures = row["figures"]
    told = f"p90 of TTFT {digits(figures['ttft_p90_s'])} s, hits {percent(figures['hit_rate'])} %"
    return f"{plan.label}: {told}{' (was there already)' * known}"


def _found(system: str, search: RateSearch, least: float | None) -> str:
    """`least`: the highest rate of the system that keeps least."""
    name = f"{system}: " if system else ""
    if search.highest is None:
        return f"{name}kept at no rate down to {search.lowest_broken:.3g} new sessions per second"
    broken = f", broken at {search.lowest_broken:.3g}" if search.broken else ", broken at none: take more sessions"
    times = f"; {digits(search.highest / least)} times the least" if least and search.highest > least else ""
    return f"{name}kept up to {search.highest:.3g} new sessions per second{broken}{times}"
