"""All runs of one command: the points that were given, and under a limit those that a search adds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from harness.cachedattention.serving import table, trace
from harness.cachedattention.serving.figures import Answer, cost, figures
from harness.cachedattention.serving.loop import Loop
from harness.cachedattention.serving.plan import ServingPlan
from harness.cachedattention.serving.traffic import CLOCKS, TrafficPoint
from harness.cachedattention.simulation.costs import Prices
from harness.cachedattention.turns.stored import StoredCaches
from harness.config.settings import Settings, SettingsError
from harness.engine.hf import routed
from harness.jobs.planning.capacity import of_conversations
from harness.jobs.runner import Runner
from harness.results.files import digest, read_json, write_csv, write_json, write_lines
from harness.results.provenance import provenance
from harness.terminal.notices import warn
from harness.terminal.progress import progress
from harness.terminal.tables import digits, percent
from kernels.temporary import TemporaryFolder

MOST = 8  # halvings from the rates that were given
CLOSE = 1.1  # ratio of the two rates between which the limit lies


@dataclass(frozen=True)
class FirstTokenLimit:
    """`p90=2s`: 90 % of the turns have their first token within 2 s of their question."""

    quantile: str
    seconds: float

    @classmethod
    def read(cls, text: str) -> Self:
        found = re.fullmatch(r"(p50|p90|p99)=(\d+(?:\.\d+)?)s?", text)
        if not found or not float(found[2]):
            raise SettingsError(f"--limit {text} is no limit of TTFT: write p50, p90 or p99 and seconds, as in p90=2s.")
        return cls(found[1], float(found[2]))

    @property
    def key(self) -> str:
        """Of the figures of a run."""
        return f"ttft_{self.quantile}_s"

    def __str__(self) -> str:
        return f"{self.quantile} of TTFT <= {self.seconds:g} s"


@dataclass
class RateSearch:
    """Of one system. `given`: rates that are run whatever comes of them. `most`: a rate beyond which nothing changes,
    for all sessions are there at once."""

    given: Sequence[float]
    most: float
    kept: list[float] = field(default_factory=list)  # rates within the limit
    broken: list[float] = field(default_factory=list)

    def learn(self, rate: float, within: bool) -> None:
        (self.kept if within else self.broken).append(rate)

    @property
    def highest(self) -> float | None:
        """Within the limit, and below every rate that is not."""
        return max((rate for rate in self.kept if rate < self.lowest_broken), default=None)

    @property
    def lowest_broken(self) -> float:
        return min(self.broken, default=float("inf"))

    def next(self) -> float | None:
        """The rate to run now; None where all is known."""
        tried = {*self.kept, *self.broken}
        if left := [rate for rate in self.given if rate not in tried]:
            return left[0]
        low, high = self.highest, self.lowest_broken
        if low is None:
            return high / 2 if high > min(self.given) / 2**MOST else None
        if not self.broken:
            return low * 2 if low < self.most else None
        return sqrt(low * high) if high / low > CLOSE else None


SCHEMA = 1
RUN, TURNS, TRACE = "serving.json", "turns.jsonl", "trace.jsonl"
ServedRow = dict[str, Any]


def found(plan: ServingPlan, out: Path) -> ServedRow | None:
    """What serving.json holds of the run, where an earlier command has made it."""
    file = out / plan.folder / RUN
    return read_json(file) if file.is_file() else None


def served(plan: ServingPlan, out: Path) -> ServedRow:
    """What serving.json holds of the run, from now on."""
    folder = out / plan.folder
    folder.mkdir(parents=True, exist_ok=True)
    row = _serve(plan, folder)
    write_json(folder / RUN, row)  # last: what holds it is finished
    return row


def _serve(plan: ServingPlan, folder: Path) -> ServedRow:
    job, traffic = plan.job, plan.point.traffic
    job.refuse_memory()
    loaded = job.load()
    with routed(loaded.model), _fresh(job.settings) as settings:
        attachment = job.attachment(loaded, {})
        with closing(Runner(job.task, settings, folder, attachment, loaded, traffic.read_buffer)) as runner:
            runner.kept.expect(of_conversations(job.model.describe(), settings, job.items))
            runner.warm_up(job.items)
            clock, engine, kept = CLOCKS[traffic.clock](), runner.engine, runner.kept
            loop = Loop(engine, kept, clock, ending=runner.ending, slots=traffic.slots, interleave=traffic.interleave)
            answers = list(_told(loop.serve(plan.sessions), plan))
            totals = figures(answers, clock.now(), clock.idle_s)
            stored = kept.store.statistics.plain() if isinstance(kept, StoredCaches) else None
    lines = list(_lines(plan, answers, runner))
    write_lines(folder / TURNS, lines)
    trace.write(folder / TRACE, plan.sessions, job.config["task"], plan.rate)
    return {
        "schema": SCHEMA,
        "settings": job.config | asdict(traffic) | {"rate": plan.rate},
        "identity": plan.identity,
        "figures": totals | {"score": fmean(line["score"] for line in lines)},
        "reserved": job.settings.store.capacities if stored else {},
        "store": stored,
        "provenance": provenance(job.settings.device),
    }


@contextmanager
def _fresh(settings: Settings) -> Iterator[Settings]:
    """With an empty folder inside `store.folder`, where one is named: it goes with the run."""
    if settings.store.folder is None:
        yield settings
        return
    parent = Path(settings.store.folder)
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("kv-serve-", parent) as folder:
        yield replace(settings, store=replace(settings.store, folder=str(folder)))


def _told(answers: Iterator[Answer], plan: ServingPlan) -> Iterator[Answer]:
    """How far they are, on stderr."""
    turns = [1 for one in plan.sessions for _ in one.item.turns]
    shown = plan.job.settings.progress
    return progress(answers, plan.label, turns, shown, size=lambda _: 1, what="turns", unit="turn")


def _lines(plan: ServingPlan, answers: Sequence[Answer], runner: Runner) -> Iterator[ServedRow]:
    """Of turns.jsonl: what was recorded of a turn, with its text and score."""
    items = {one.name: one.item.turns for one in plan.sessions}
    for answer in answers:
        item = items[answer.session][answer.turn - 1]
        output = runner.output(item, answer.tokens)
        score = plan.job.task.score(item.example, output).value
        times = {name: getattr(answer, name) for name in ("ttft_s", "prefill_s", "prompt_tokens")}
        yield asdict(answer) | times | {"output": output, "score": score}


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
