"""The jobs of a command as Hydra composed them: plain values, so that any process can run them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.config.settings import OWN, WITHOUT_EFFECT, StoreSettings
from harness.results.files import canonical


@dataclass(frozen=True, slots=True)
class JobConfig:
    """One job. `words`: its overrides; `presets`: the yaml files they chose, by group."""

    config: dict[str, Any]
    presets: dict[str, str]
    words: list[str]


def groups(jobs: Sequence[JobConfig]) -> list[list[int]]:
    """Numbers of the jobs that run together: under `shared_prefill=true` those that can share one, else each alone."""
    found: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        apart = {key: value for key, value in job.config.items() if key not in OWN | {"method"}}
        key = canonical(apart) if job.config.get("shared_prefill") else str(number)
        found.setdefault(key, []).append(number)
    return list(found.values())


def with_own_stores(jobs: Sequence[JobConfig]) -> list[JobConfig]:
    """Settings of the store are for the jobs that have one, where some have and some have not."""
    stored = [job.config.get("history") == "store" for job in jobs]
    if not any(stored):
        return list(jobs)
    none = asdict(StoreSettings())
    pairs = zip(jobs, stored, strict=True)
    return [job if own else replace(job, config=job.config | {"store": dict(none)}) for job, own in pairs]


def digest(jobs: Sequence[JobConfig]) -> str:
    """The same jobs in the same order have the same one, whatever the launcher."""
    dropped = set(WITHOUT_EFFECT) - {"baseline"}
    kept = [{key: value for key, value in job.config.items() if key not in dropped} for job in jobs]
    return hashlib.sha256("\n".join(map(canonical, kept)).encode()).hexdigest()[:8]


def distinct(jobs: Sequence[JobConfig]) -> list[list[str]]:
    """What tells each job from the others: its overrides without those that all share."""
    common = set.intersection(*(set(job.words) for job in jobs)) if len(jobs) > 1 else set[str]()
    return [[word.lstrip("+") for word in job.words if word not in common] for job in jobs]
