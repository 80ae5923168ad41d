"""The jobs of a command as Hydra composed them: plain values, so that any process can run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.config import plugins
from harness.config.overrides import Partial
from harness.config.settings import OWN, Settings, StoreSettings
from harness.results.files import canonical

OF_A_BUDGET = (
    "budget", "budget_bytes", "budget_rule", "align", "comm", "windows", "dense_layers", "budget_generated",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobConfig:
    """Holds one job. `words`: its overrides; `presets`: the yaml files they chose, by group."""

    config: dict[str, Any]
    presets: dict[str, str]
    words: list[str]


def groups(jobs: Sequence[JobConfig]) -> list[dict[int, JobConfig]]:
    """Return the jobs that run together, each with its number: under `shared_prefill=true` those that can share one
    prefill, otherwise each alone."""
    found: dict[str, dict[int, JobConfig]] = {}
    for number, job in enumerate(jobs):
        apart = {key: value for key, value in job.config.items() if key not in OWN | {"method"}}
        key = canonical(apart) if job.config.get("shared_prefill") else str(number)
        found.setdefault(key, {})[number] = job
    return list(found.values())


def with_own_settings(jobs: Sequence[JobConfig], partial: Partial) -> list[JobConfig]:
    """Return the jobs of a sweep without settings that are meant for others of them, each run once: budgets are for the
    methods that have one, and settings of the store for the jobs with a store. Where no job uses them, they stay, and
    are said to change nothing."""
    if len(jobs) == 1:
        return list(jobs)
    usual = asdict(Settings())
    budgets = [uses_budget(job, partial) for job in jobs]
    stores = [job.config.get("history") == "store" for job in jobs]
    found: dict[str, JobConfig] = {}
    for job, has_budget, has_store in zip(jobs, budgets, stores, strict=True):
        config, words = dict(job.config), job.words
        if any(budgets) and not has_budget:
            config |= {key: usual[key] for key in OF_A_BUDGET}
            words = [word for word in words if word.lstrip("+").partition("=")[0].partition(".")[0] not in OF_A_BUDGET]
        if any(stores) and not has_store:
            config["store"] = asdict(StoreSettings())
        found.setdefault(canonical(config), replace(job, config=config, words=words))
    return list(found.values())


def uses_budget(job: JobConfig, partial: Partial) -> bool:
    """Return whether the method of a job has a use for a budget; a wrong one is refused when its job runs."""
    try:
        return bool(plugins.build(job.config["method"], "method", partial.get("method", ())).uses_budget)
    except Exception:
        return True


def labels(jobs: Sequence[JobConfig]) -> list[str]:
    """Return what tells each job from the others: its overrides without those that all share; a single job needs no
    name."""
    if len(jobs) == 1:
        return [""]
    common = set.intersection(*(set(job.words) for job in jobs)) if jobs else set[str]()
    return [" ".join(word.lstrip("+") for word in job.words if word not in common) for job in jobs]
