"""When a sweep ends, and what that is guessed from."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from statistics import fmean
from typing import NamedTuple

from harness.sweeps.state import State, each_once


class Estimate(NamedTuple):
    """`seconds` that are left, None where nothing says it; `basis`: what they are guessed from."""

    seconds: float | None
    basis: str

    def sentence(self, is_running: bool) -> str:
        if self.seconds is None:
            return f"end unknown: {self.basis}"
        if not is_running:
            return f"about {duration(self.seconds)} left ({self.basis})"
        end = datetime.now(UTC) + timedelta(seconds=self.seconds)
        return f"ends in about {duration(self.seconds)}, at {end:%H:%M} UTC ({self.basis})"


def estimate(states: Sequence[State]) -> Estimate:
    """Examples that are left, at the seconds per example of runs of the same task and model, or else of all."""
    waiting = [state for state in each_once(states) if state.status in ("running", "to do", "interrupted")]
    rates = {state.folder: state.rate for state in states if state.rate}
    if not rates:
        return Estimate(None, "no example has been timed yet")
    if any(state.left is None for state in waiting):
        return Estimate(None, "no job on the same task has been planned yet")
    together = max(1, sum(state.status == "running" for state in waiting))
    work = sum((state.left or 0) * _rate(state, states) for state in waiting)
    each = work / max(1, sum(state.left or 0 for state in waiting))
    runs = f"{len(rates)} run{'s' * (len(rates) > 1)}"
    return Estimate(work / together, f"{each:.2g} s per example, from {runs}; {together} at a time")


def _rate(state: State, states: Sequence[State]) -> float:
    if state.rate:
        return state.rate
    akin = {other.folder: other.rate for other in states if other.rate and other.about == state.about}
    return fmean(akin.values() or {other.folder: other.rate for other in states if other.rate}.values())


def duration(seconds: float) -> str:
    """45 s, 12 min, 3.5 h, 2.1 days."""
    for size, unit in ((86400, "days"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
