"""Makes the runs of one command of `python -m harness.serve`, from their plans to the files in
their folders."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.cachedattention.serving.figures import Answer, cost, figures, table
from harness.cachedattention.serving.loop import Clock, ServingLoop
from harness.cachedattention.serving.plan import ServingPlan, TrafficPoint
from harness.cachedattention.simulation.costs import Prices
from harness.cachedattention.turns.opening import Histories
from harness.cachedattention.turns.stored import StoredCaches
from harness.config.errors import one_sentence
from harness.engine.hf import routed
from harness.jobs.memory import conversation_bytes
from harness.jobs.questions import let_go, refuse_to_go_on
from harness.jobs.runner import Runner
from harness.results.files import digest, read_json, write_csv, write_json, write_lines
from harness.results.provenance import provenance
from harness.terminal.notices import complain, warn
from harness.terminal.progress import progress
from harness.terminal.tables import digits, percent

SCHEMA = 1
RUN, TURNS = "serving.json", "turns.jsonl"
ServedRow = dict[str, Any]  # what serving.json holds of a run


class Runs:
    """The runs of one command of `python -m harness.serve`. `points`: what each run is to do; all
    are planned at once, so that an error in the last is found before the first runs. `prices`: what
    a device and storage cost; `out`: the folder of the results."""

    def __init__(
        self,
        points: Sequence[TrafficPoint],
        out: Path,
        prices: Prices,
        config_dirs: Sequence[Path] = (),
    ) -> None:
        self.out, self.prices = out, prices
        self.plans: list[ServingPlan] = []
        self.rows: list[tuple[ServingPlan, ServedRow]] = []  # of the runs that are made
        systems: dict[str, ServingPlan] = {}
        for point in points:
            if point.system not in systems:
                systems[point.system] = ServingPlan.of(point, config_dirs)
            self.plans.append(systems[point.system].at(point))

    def serve(self) -> None:
        """Make all runs, one after the other. A run that an earlier command has finished is read
        from its folder instead. If one of several runs fails, its error is printed and the others
        are made, unless they would fail the same way."""
        for plan in self.plans:
            plan.job.remove_leftovers()
            folder = self.out / plan.folder
            known = (folder / RUN).is_file()
            if known:
                row = read_json(folder / RUN)
            else:
                turns = sum(len(session.item.turns) for session in plan.sessions)
                warn(f"{plan.label}: {turns} turns of {len(plan.sessions)} sessions")
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    row = served(plan, folder)
                except Exception as error:
                    if len(self.plans) == 1:
                        raise
                    refuse_to_go_on(error)
                    complain(f"{plan.label}: {one_sentence(error)}")
                    let_go(error)
                    continue
                write_json(folder / RUN, row)  # last: a folder that has it is finished
            totals = row["figures"] | cost(row["figures"]["busy_s"], self.prices, row["reserved"])
            self.rows.append((plan, {**row, "figures": totals}))
            first = f"p90 of TTFT {digits(totals['ttft_p90_s'])} s, hits {percent(totals['hit_rate'])} %"
            warn(f"{plan.label}: {first}{' (was there already)' * known}")

    def text(self) -> str:
        return table([plan.point.others for plan, _ in self.rows], self._flat)

    @property
    def _flat(self) -> list[ServedRow]:
        """Return one row per run for a spreadsheet: the keys that vary, the rate, and the
        totals."""
        return [
            {**plan.point.others, "rate": plan.rate, **row["figures"]} for plan, row in self.rows
        ]

    def write(self) -> list[Path]:
        """Write the tables over all runs; return their files. The same runs at the same prices have
        the same folder."""
        asked = {"runs": [plan.identity for plan, _ in self.rows], "prices": asdict(self.prices)}
        folder = self.out / "tables" / f"{len(self.rows)}-runs-{digest(asked)[:8]}"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN, {"schema": SCHEMA, "runs": [row for _, row in self.rows]})
        write_csv(folder / "serving.csv", self._flat)
        return [folder / RUN, folder / "serving.csv"]


def served(plan: ServingPlan, folder: Path) -> ServedRow:
    """Make one run: load the model, serve the conversations, and write the record of each turn to
    `folder`. Return all else that is recorded: settings, totals, counts of the store and
    provenance."""
    job, traffic = plan.job, plan.point.traffic
    job.refuse_memory()
    loaded = job.load()
    with routed(loaded.model):
        attachment = job.attachment(loaded, {})
        with closing(Runner(job.task, job.settings, folder, attachment, loaded)) as runner:
            runner.kept.expect(conversation_bytes(job.model.describe(), job.settings, job.items))
            runner.warm_up(job.items)
            clock = Clock(sleep=time.sleep if traffic.clock == "wall" else None)
            assert isinstance(runner.kept, Histories)
            kept = runner.kept.caches
            loop = ServingLoop(
                runner.engine, kept, clock, ending=runner.ending, slots=traffic.slots
            )
            turns = [1 for session in plan.sessions for _ in session.item.turns]
            coming = loop.serve(plan.sessions)
            answers = list(
                progress(coming, plan.label, turns, size=lambda _: 1, what="turns", unit="turn")
            )
            totals = figures(answers, clock.now(), clock.idle_s)
            stored = kept.store.statistics.plain() if isinstance(kept, StoredCaches) else None
    lines = list(_scored(plan, answers, runner))
    write_lines(folder / TURNS, lines)
    return {
        "schema": SCHEMA,
        "settings": job.config | asdict(traffic),
        "identity": plan.identity,
        "figures": totals | {"score": fmean(line["score"] for line in lines)},
        "reserved": job.settings.store.capacities if stored else {},
        "store": stored,
        "provenance": provenance(job.settings.device),
    }


def _scored(plan: ServingPlan, answers: Sequence[Answer], runner: Runner) -> Iterator[ServedRow]:
    """Yield the lines of turns.jsonl: the record of each turn, with its text and its score."""
    items = {session.name: session.item.turns for session in plan.sessions}
    for answer in answers:
        item = items[answer.session][answer.turn - 1]
        output = runner.output(item, answer.tokens)
        score = plan.job.task.score(item.example, output).value
        times = {name: getattr(answer, name) for name in ("ttft_s", "prefill_s", "prompt_tokens")}
        yield asdict(answer) | times | {"output": output, "score": score}
