"""What one run of `harness.serve` does, checked before any weights are loaded: its job, conversations and identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.cachedattention.serving import trace
from harness.cachedattention.serving.trace import Session
from harness.cachedattention.serving.traffic import TrafficPoint
from harness.config.compose import built, composed
from harness.config.settings import Settings, SettingsError
from harness.jobs.job import Job
from harness.jobs.planning.examples import itemised
from harness.results.files import digest
from harness.terminal.arguments import typed

VERSION = 2  # of the loop: goes up when its times mean something else


@dataclass(frozen=True)
class ServingPlan:
    """A checked run: its settings, its job, and its conversations at `rate` new sessions per second."""

    point: TrafficPoint
    job: Job
    sessions: list[Session]
    rate: float

    @classmethod
    def of(cls, point: TrafficPoint, config_dirs: Sequence[Path] = ()) -> ServingPlan:
        traffic = point.traffic
        config = composed(point.words, config_dirs)
        recorded = trace.read(typed(traffic.replay, "replay=")) if traffic.replay else None
        method, task, model, settings = built(config | ({"task": recorded.task} if recorded else {}))
        if task.fills is not None:
            raise SettingsError(
                "This task is about overflow, which a server does not have: choose another, as multiturn."
            )
        if recorded:
            recorded.check(task)
        if recorded and settings.seed != Settings().seed and not settings.generation.temperature:
            raise SettingsError(
                "seed changes nothing with replay: the trace has its own texts and times. Leave it out."
            )
        settings = replace(settings, batch=traffic.slots)
        items = itemised(recorded.examples, model.tokenizer(), settings, model.describe().limit) if recorded else None
        job = Job.plan(method, task, model, settings, items)
        _check(point, job)
        if recorded:
            sessions, rate = recorded.sessions(job.items), recorded.rate
        else:
            sessions, rate = trace.drawn(job.items, seed=settings.seed, think_s=traffic.think_s), 1.0
        return cls(point, job, sessions, rate).at(traffic.rate or rate)

    def at(self, rate: float) -> ServingPlan:
        """Return the plan of the same conversations at another rate."""
        return replace(
            self, point=self.point.at(rate), sessions=trace.stretched(self.sessions, self.rate / rate), rate=rate
        )

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.point.system, f"rate={self.rate:.4g}")))

    @property
    def identity(self) -> dict[str, Any]:
        """Return what tells runs apart: a finished run of the same identity is not made again."""
        times = [[one.start_s, list(one.think_s), one.item.sha256] for one in self.sessions]
        traffic = asdict(self.point.traffic)
        shape = {key: traffic[key] for key in ("slots", "interleave", "clock")}
        if traffic["read_buffer"] is not None:
            shape["read_buffer"] = traffic["read_buffer"]
        return {"version": VERSION, "trace": digest({"sessions": times}), **shape, "job": self.job.identity}

    @property
    def folder(self) -> str:
        kind = f"{type(self.job.method).__name__.lower()}_{self.job.settings.history}"
        return f"{kind}_{self.rate:.4g}_{digest(self.identity)[:8]}"


def _check(point: TrafficPoint, job: Job) -> None:
    traffic, settings = point.traffic, job.settings
    if any(turn.given for item in job.items for turn in item.turns):
        raise SettingsError(
            "A server goes on with its own answers, and those of this task are fed: choose another, as task=multiturn "
            "with task.replies=own."
        )
    if any(turn.prompt.replaces_answer for item in job.items for turn in item.turns):
        raise SettingsError(
            "A server goes on with its own answers, and this task puts others in their place: set task.replies=own, or "
            "task.golden=false for task=scbench."
        )
    if traffic.interleave and settings.prefill_chunk is None:
        raise SettingsError("interleave=true steps between the chunks of a prefill: set prefill_chunk, as to 512.")
    if traffic.clock == "cpu" and (settings.device != "cpu" or settings.threads != 1):
        raise SettingsError("clock=cpu adds up the seconds of all threads and sees no GPU: set device=cpu threads=1.")
