"""The runs of one command, from plans to the files of their folders; with a limit also those that a search adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.cachedattention.serving import trace
from harness.cachedattention.serving.figures import Answer, FirstTokenLimit, ShownRun, cost, draw, figures, table
from harness.cachedattention.serving.loop import ServingLoop
from harness.cachedattention.serving.plan import ServingPlan
from harness.cachedattention.serving.traffic import CLOCKS, TrafficPoint
from harness.cachedattention.simulation.costs import Prices
from harness.cachedattention.turns.stored import StoredCaches
from harness.config.settings import Settings
from harness.engine.hf import routed
from harness.jobs.planning.capacity import of_conversations
from harness.jobs.runner import Runner
from harness.results.files import digest, read_json, write_csv, write_json, write_lines
from harness.results.provenance import provenance
from harness.terminal.notices import warn
from harness.terminal.progress import progress
from harness.terminal.tables import digits, percent
from kernels.temporary import TemporaryFolder

SCHEMA = 1
RUN, TURNS, TRACE = "serving.json", "turns.jsonl", "trace.jsonl"
ServedRow = dict[str, Any]  # what serving.json holds of a run
MOST = 8  # halvings from the rates that were given
CLOSE = 1.1  # ratio of the two rates between which the limit lies


@dataclass
class RateSearch:
    """A search for the highest rate at which one system keeps a limit: it doubles, halves, then bisects. `given`: rates
    that are run in any case. `most`: a rate above which nothing changes, since all sessions are there at once."""

    given: Sequence[float]
    most: float
    kept: list[float] = field(default_factory=list)  # rates within the limit
    broken: list[float] = field(default_factory=list)

    def learn(self, rate: float, within: bool) -> None:
        (self.kept if within else self.broken).append(rate)

    @property
    def highest(self) -> float | None:
        """Return the highest rate within the limit that is below every rate that breaks it."""
        return max((rate for rate in self.kept if rate < self.lowest_broken), default=None)

    @property
    def lowest_broken(self) -> float:
        return min(self.broken, default=float("inf"))

    def next(self) -> float | None:
        """Return the rate to run now, or None where all is known."""
        tried = {*self.kept, *self.broken}
        if left := [rate for rate in self.given if rate not in tried]:
            return left[0]
        low, high = self.highest, self.lowest_broken
        if low is None:
            return high / 2 if high > min(self.given) / 2**MOST else None
        if not self.broken:
            return low * 2 if low < self.most else None
        return sqrt(low * high) if high / low > CLOSE else None


class Runs:
    """The runs of the command. `points` are planned at once, so that an error in the last is found before the first
    runs."""

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
        for point in points:
            if point.system not in self.systems:
                self.systems[point.system] = ServingPlan.of(point, config_dirs)
        known = [(point.traffic.rate, self.systems[point.system]) for point in points]
        self.plans = [plan.at(rate or plan.rate) for rate, plan in known]
        self.rows: list[tuple[ServingPlan, ServedRow]] = []
        rates = sorted({plan.rate for plan in self.plans})
        self.searches: dict[str, RateSearch] = {}
        if limit:
            most = {name: len(plan.sessions) / limit.seconds for name, plan in self.systems.items()}
            self.searches = {name: RateSearch(rates, most[name]) for name in self.systems}

    def serve(self) -> None:
        """Run what was given, then step by step what the searches ask for, so that the systems take turns."""
        coming = self.plans
        while coming:
            for plan in coming:
                self._serve(plan)
            rates = {system: search.next() for system, search in self.searches.items()}
            coming = [self.systems[system].at(rate) for system, rate in rates.items() if rate is not None]

    def _serve(self, plan: ServingPlan) -> None:
        plan.job.remove_leftovers()
        folder = self.out / plan.folder
        known = (folder / RUN).is_file()
        if known:
            made = read_json(folder / RUN)
        else:
            turns, last_s = sum(len(one.item.turns) for one in plan.sessions), max(one.start_s for one in plan.sessions)
            waits = f", the last session comes after {last_s:.0f} s" if plan.point.traffic.clock == "wall" else ""
            warn(f"{plan.label}: {turns} turns of {len(plan.sessions)} sessions{waits}")
            folder.mkdir(parents=True, exist_ok=True)
            made = served(plan, folder)
            write_json(folder / RUN, made)  # last: a folder that has it is finished
        totals = made["figures"] | cost(made["figures"]["busy_s"], self.prices, made["reserved"])
        self.rows.append((plan, {**made, "figures": totals}))
        if self.limit:
            self.searches[plan.point.system].learn(plan.rate, totals[self.limit.key] <= self.limit.seconds)
        first = f"p90 of TTFT {digits(totals['ttft_p90_s'])} s, hits {percent(totals['hit_rate'])} %"
        warn(f"{plan.label}: {first}{' (was there already)' * known}")

    @property
    def shown(self) -> list[ShownRun]:
        """Return the runs by rate, so that the systems stand below each other."""
        order = list(self.systems)
        rows = sorted(self.rows, key=lambda row: (row[0].rate, order.index(row[0].point.system)))
        return [ShownRun(plan.point.others, plan.rate, row["figures"]) for plan, row in rows]

    def text(self) -> str:
        """Return the table, and below it what the searches found."""
        if self.limit is None:
            return table(self.shown)
        least = min((search.highest for search in self.searches.values() if search.highest), default=None)
        lines = [f"  {_outcome(system, search, least)}" for system, search in self.searches.items()]
        return "\n".join([table(self.shown), "", f"{self.limit}:", *lines])

    @property
    def folder(self) -> Path:
        """Return the folder of the tables: the same runs with the same limit and prices have the same one."""
        runs = [plan.identity for plan in self.plans]
        asked = {"runs": runs, "limit": str(self.limit), "prices": asdict(self.prices)}
        return self.out / "tables" / f"{len(self.plans)}-runs-{digest(asked)[:8]}"

    def write(self) -> list[Path]:
        """Write the tables and the picture; return their files."""
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        limit: dict[str, Any] | None = None
        if self.limit is not None:
            found = {name: {"highest": one.highest, "broken": one.broken} for name, one in self.searches.items()}
            limit = {"of": self.limit.key, "seconds": self.limit.seconds, "systems": found}
        write_json(folder / RUN, {"schema": SCHEMA, "limit": limit, "runs": [row for _, row in self.rows]})
        write_csv(folder / "serving.csv", [run.flat for run in self.shown])
        job, traffic = self.plans[0].job, self.plans[0].point.traffic
        title = f"{job.model.describe().name}, {len(job.items)} conversations, {traffic.slots} slots"
        return [folder / RUN, folder / "serving.csv", *draw(self.shown, folder / "ttft.png", title, self.limit)]


def _outcome(system: str, search: RateSearch, least: float | None) -> str:
    """Return what a search found, in words. `least`: the highest rate of the system that keeps least."""
    name = f"{system}: " if system else ""
    if search.highest is None:
        return f"{name}kept at no rate down to {search.lowest_broken:.3g} new sessions per second"
    broken = f", broken at {search.lowest_broken:.3g}" if search.broken else ", broken at none: take more sessions"
    times = f"; {digits(search.highest / least)} times the least" if least and search.highest > least else ""
    return f"{name}kept up to {search.highest:.3g} new sessions per second{broken}{times}"


def served(plan: ServingPlan, folder: Path) -> ServedRow:
    """Run a plan; write its turns and its trace to `folder`, and return the rest."""
    job, traffic = plan.job, plan.point.traffic
    job.refuse_memory()
    loaded = job.load()
    with routed(loaded.model), _with_empty_folder(job.settings) as settings:
        attachment = job.attachment(loaded, {})
        with closing(Runner(job.task, settings, folder, attachment, loaded, traffic.read_buffer)) as runner:
            runner.kept.expect(of_conversations(job.model.describe(), settings, job.items))
            runner.warm_up(job.items)
            clock, kept = CLOCKS[traffic.clock](), runner.kept
            loop = ServingLoop(
                runner.engine, kept, clock, ending=runner.ending, slots=traffic.slots, interleave=traffic.interleave
            )
            turns = [1 for one in plan.sessions for _ in one.item.turns]
            coming = loop.serve(plan.sessions)
            answers = list(progress(coming, plan.label, turns, size=lambda _: 1, what="turns", unit="turn"))
            totals = figures(answers, clock.now(), clock.idle_s)
            stored = kept.store.statistics.plain() if isinstance(kept, StoredCaches) else None
    lines = list(_scored(plan, answers, runner))
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
def _with_empty_folder(settings: Settings) -> Iterator[Settings]:
    """Give the settings an empty folder inside `store.folder`, where that is named; it goes with the run."""
    if settings.store.folder is None:
        yield settings
        return
    parent = Path(settings.store.folder)
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("kv-serve-", parent) as folder:
        yield replace(settings, store=replace(settings.store, folder=str(folder)))


def _scored(plan: ServingPlan, answers: Sequence[Answer], runner: Runner) -> Iterator[ServedRow]:
    """Yield the lines of turns.jsonl: the record of each turn, with its text and score."""
    items = {one.name: one.item.turns for one in plan.sessions}
    for answer in answers:
        item = items[answer.session][answer.turn - 1]
        output = runner.output(item, answer.tokens)
        score = plan.job.task.score(item.example, output).value
        times = {name: getattr(answer, name) for name in ("ttft_s", "prefill_s", "prompt_tokens")}
        yield asdict(answer) | times | {"output": output, "score": score}
