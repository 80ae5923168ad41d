"""Turns the words of `python -m harness.serve` into checked runs: their jobs, times of arrival and
identities.

Every key may have several values, and every combination is a run. The rate varies slowest, so that
the systems that are compared take turns at each rate. All is checked before any weights are
loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.cachedattention.simulation.trace import TurnLengths, timed
from harness.config.catalogue import GROUPS
from harness.config.compose import built, combinations, composed
from harness.config.entry import SERVE
from harness.config.plugins import suggestion
from harness.config.settings import ENTRIES, INSTEAD, KEYS, unknown_setting
from harness.config.values import ABOVE_0, FROM_0, FROM_1, SettingsError, check_values
from harness.jobs.examples import PreparedExample
from harness.jobs.job import Job
from harness.results.files import digest

VERSION = 3  # of the loop: goes up when its times mean something else
CLOCKS = ("wall", "busy")
# keys of a run that the loop reads
READ = [key for key, entry in ENTRIES.items() if SERVE in entry.read_by]
RANGES = {"rate": ABOVE_0, "think_s": FROM_0, "slots": FROM_1}
TASK = "task=multiturn"  # where none is named


@dataclass(frozen=True, kw_only=True)
class TrafficSettings:
    """Settings of how conversations arrive, and of how they are served."""

    rate: float = 1.0  # new sessions per second, a Poisson process
    think_s: float = 5.0  # mean, from an answer to the next question
    slots: int = 4  # turns that run side by side
    clock: str = "wall"  # busy: idle time is skipped

    def __post_init__(self) -> None:
        check_values(self, RANGES)
        if self.clock not in CLOCKS:
            raise SettingsError(
                f"clock={self.clock} is unknown: choose one of {', '.join(CLOCKS)}."
            )


OWN = tuple(field.name for field in fields(TrafficSettings))


@dataclass(frozen=True)
class TrafficPoint:
    """A run of `python -m harness.serve`, before its words are checked. `words`: those for `python
    -m harness`; `named`: the keys that vary between the runs, with their values in this one."""

    traffic: TrafficSettings
    words: tuple[str, ...]
    named: Mapping[str, str]

    @property
    def system(self) -> str:
        """Return the values of the keys that vary, apart from the rate, in one line: they name the
        system that is compared with others at each rate."""
        return " ".join(f"{key}={value}" for key, value in self.others.items() if value)

    @property
    def others(self) -> dict[str, str]:
        """Return the keys that vary between the runs, apart from the rate (sessions per second),
        with their values in this run."""
        return {key: value for key, value in self.named.items() if key != "rate"}


def points(words: Sequence[str]) -> list[TrafficPoint]:
    """Return one run for each combination of the values in `words`, which are `key=value,value`.
    Raise `SettingsError` for keys that a server does not read."""
    chosen = list(combinations(words, slowest="rate"))
    for key in chosen[0]:
        _refuse_unread(key)
    varied = [key for key in chosen[0] if len({point[key].text for point in chosen}) > 1]
    stored = ["history" in point and point["history"].value == "store" for point in chosen]
    runs = []
    for point, own in zip(chosen, stored, strict=True):
        if any(stored) and not own:  # settings of the store are for the others
            point = {key: word for key, word in point.items() if not key.startswith("store.")}
        traffic = TrafficSettings(**{key: word.value for key, word in point.items() if key in OWN})
        named = {key: point[key].text.partition("=")[2] if key in point else "" for key in varied}
        texts = [word.text for key, word in point.items() if key not in OWN]
        task = [] if "task" in point else [TASK]
        runs.append(TrafficPoint(traffic, (*task, *texts), named))
    return list({(run.system, run.traffic.rate): run for run in runs}.values())


def _refuse_unread(key: str) -> None:
    first = key.partition(".")[0]
    if key == "store.folder":
        raise SettingsError(
            "A server's disk tier is temporary: leave store.folder out, and set TMPDIR for its place."
        )
    if key == "generation.samples":
        raise SettingsError("A server answers each question once: leave generation.samples out.")
    if key in OWN or first in (*READ, *GROUPS):
        return
    if first in KEYS:
        raise SettingsError(
            f"{key} changes nothing for harness.serve: leave it out. docs/conversations.md says what it reads."
        )
    if key in INSTEAD:
        raise SettingsError(unknown_setting(key))
    raise SettingsError(f"There is no setting {key}{suggestion(key, (*OWN, *READ, *GROUPS))}")


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation that arrives at a server at `start_s`. `think_s`: seconds from each answer to
    the next question, one fewer than there are turns."""

    item: PreparedExample
    start_s: float
    think_s: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.item.example.id


def drawn(items: Sequence[PreparedExample], traffic: TrafficSettings, seed: int) -> list[Session]:
    """Return the conversations with times. They arrive as a Poisson process, and users think for
    exponentially distributed times before the next question. With the same `seed`, another rate
    scales the times of arrival and changes nothing else."""
    turns = [
        [TurnLengths(len(turn.prompt.ids), turn.new_tokens) for turn in item.turns]
        for item in items
    ]
    rng = np.random.default_rng(seed)
    times = timed([item.example.id for item in items], turns, traffic.rate, traffic.think_s, rng)
    return [
        Session(item, talk.start_s, talk.think_s) for item, talk in zip(items, times, strict=True)
    ]


@dataclass(frozen=True)
class ServingPlan:
    """A checked run of `python -m harness.serve`: its settings, the job that a run without traffic
    would be, and the conversations with their times."""

    point: TrafficPoint
    job: Job
    sessions: list[Session]

    @classmethod
    def of(cls, point: TrafficPoint, config_dirs: Sequence[Path] = ()) -> ServingPlan:
        method, task, model, settings = built(composed(point.words, config_dirs))
        if task.fills is not None:
            raise SettingsError(
                "This task is about overflow, which a server does not have: choose another, as multiturn."
            )
        job = Job.plan(method, task, model, replace(settings, batch=point.traffic.slots))
        if any(
            turn.given or turn.prompt.replaces_answer for item in job.items for turn in item.turns
        ):
            raise SettingsError(
                "A server goes on with its own answers, and this task puts others in their place: set "
                "task.replies=own, or task.golden=false for task=scbench."
            )
        return cls(point, job, drawn(job.items, point.traffic, settings.seed))

    def at(self, point: TrafficPoint) -> ServingPlan:
        """Return the plan of the same job with the rate and the times of arrival of `point`."""
        return replace(
            self, point=point, sessions=drawn(self.job.items, point.traffic, self.job.settings.seed)
        )

    @property
    def rate(self) -> float:
        return self.point.traffic.rate

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.point.system, f"rate={self.rate:.4g}")))

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that shapes the run's results; a run with the same identity that has
        finished is not made again."""
        times = [
            [session.start_s, list(session.think_s), session.item.sha256]
            for session in self.sessions
        ]
        traffic = {
            key: value
            for key, value in asdict(self.point.traffic).items()
            if key not in ("rate", "think_s")
        }
        return {
            "version": VERSION,
            "trace": digest({"sessions": times}),
            **traffic,
            "job": self.job.identity,
        }

    @property
    def folder(self) -> str:
        kind = f"{type(self.job.method).__name__.lower()}_{self.job.settings.history}"
        return f"{kind}_{self.rate:.4g}_{digest(self.identity)[:8]}"
