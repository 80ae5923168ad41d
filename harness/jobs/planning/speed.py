"""How long a run will take, from earlier runs of the same task under the same conditions: times of other work say
nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.config.catalogue import plain
from harness.config.nested import flatten
from harness.results.provenance import machine
from harness.results.run_folder import StoredRun, load_all, runs_below
from harness.results.summary import decode_throughput

if TYPE_CHECKING:
    from harness.jobs.job import Job

# what the time of the same work depends on
TIMED = (
    "dtype", "device", "threads", "batch", "prefill_chunk", "placement", "codec", "overlap",
    "protocol", "questions", "history", "shared_prefill", "fidelity", "trace", "graphs", "backends", "generation",
)  # fmt: skip
MACHINE = ("device_name", "cpus_usable")
APART = 2  # how many times as long prompts may be, where their tokens still take about as long


class Speed(NamedTuple):
    """Of a run: prompt tokens per second up to the second token, seconds of each token behind it, tokens per answer."""

    run: str
    prompt_tok_s: float
    step_s: float
    answer: float

    @classmethod
    def of(cls, run: StoredRun) -> Speed:
        fed = [record for record in run.records if record.prefilled_by is None]
        first_s = sum(record.machine_s - record.decode_machine_s for record in fed)
        rate = decode_throughput(run.records)
        answer = fmean(len(reply.tokens) for record in run.records for reply in record.replies)
        return cls(
            run.folder.name, sum(record.prompt_tokens for record in fed) / first_s, 1 / rate if rate else 0, answer
        )

    def seconds(self, job: Job, prompt_tokens: int) -> float:
        turns = [turn for item in job.items for turn in item.turns]
        whole = job.settings.generation.force_length
        tokens = (turn.new_tokens if whole or turn.given else min(self.answer, turn.new_tokens) for turn in turns)
        return prompt_tokens / self.prompt_tok_s + sum(max(0.0, count - 2) for count in tokens) * self.step_s


def measured(job: Job, earlier: Sequence[StoredRun]) -> Speed | str:
    """The most recent of the runs that say something of `job`, one of its own method if there is one; else what they
    lack. `earlier`: most recent first."""
    known = [run for run in earlier if run.records and run.config.get("model") == job.config["model"]]
    if not known:
        return "no run of this model yet"
    found = [(_others(run, job), _method(run.config) != _method(job.config), run) for run in known]
    others, _, run = min(found, key=lambda one: (len(one[0]), one[1]))
    return f"no run of this model {' and '.join(others)} yet" if others else Speed.of(run)


def earlier_runs(root: Path) -> list[StoredRun]:
    """That can be read, the most recent first."""
    found, _ = load_all(runs_below(root))
    return sorted(found, key=lambda run: str(run.info.get("started", "")), reverse=True)


def _others(run: StoredRun, job: Job) -> list[str]:
    """Conditions in which times of another run say nothing of ours, in words."""
    found = []
    if run.config.get("task", {}).get("_target_") != job.config["task"]["_target_"]:
        found.append(f"with task={(job.presets or {}).get('task') or job.label.split()[0]}")
    ours, theirs = flatten(_timed(job.config)), flatten(_timed(run.config))
    found += [f"with {key}={plain(value)}" for key, value in ours.items() if theirs.get(key, value) != value]
    if _machine(run.provenance("machine")) != _machine(_here(job.settings.device)):
        found.append("on this machine")
    return found if _alike(run, job) else [*found, "at such lengths"]


def _timed(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in TIMED if key in config}


def _machine(known: Mapping[str, Any]) -> list[Any]:
    return [known.get(name) for name in MACHINE]


@cache
def _here(device: str) -> dict[str, Any]:
    return machine(device)


def _alike(run: StoredRun, job: Job) -> bool:
    theirs = [record.prompt_tokens for record in run.records]
    ours = [sum(len(turn.prompt.ids) for turn in item.turns) for item in job.items]
    return min(theirs) <= APART * min(ours) and max(ours) <= APART * max(theirs)


def _method(config: Mapping[str, Any]) -> object:
    return config.get("method", {}).get("_target_")
