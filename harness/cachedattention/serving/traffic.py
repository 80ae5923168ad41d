"""The command line of `python -m harness.serve`, with keys of its own and those of `python -m harness`; its clocks.

Every key may have several values, and every combination is a run. The rate varies slowest, so that the systems that are
compared take turns at each rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial

from harness.config.catalogue import GROUPS
from harness.config.grids import Word, combinations
from harness.config.overrides import settings as known_settings
from harness.config.values import ABOVE_0, FROM_0, FROM_1, Range, SettingsError, check_values


class Clock:
    """A clock that runs from 0 at `start`. `source` gives seconds; `sleep` lets them pass, and without it the clock is
    set forward instead."""

    def __init__(
        self, source: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] | None = None
    ) -> None:
        self._source, self._sleep = source, sleep
        self.start()

    def start(self) -> None:
        self._began = self._source()
        self.idle_s = 0.0  # of the seconds since, in which there was nothing to do

    def now(self) -> float:
        return self._source() - self._began

    def wait_until(self, at_s: float) -> None:
        before = self.now()
        if before >= at_s:
            return
        if self._sleep:
            self._sleep(at_s - before)
        else:
            self._began -= at_s - before
        self.idle_s += self.now() - before


CLOCKS: Mapping[str, Callable[[], Clock]] = {
    "wall": partial(Clock, time.perf_counter, time.sleep),
    "busy": Clock,  # wall time, idle time skipped
    "cpu": partial(Clock, time.process_time),  # of all threads of this process alone
}


READ = (  # keys of a run that the loop reads
    "budget", "budget_bytes", "budget_rule", "align", "comm", "windows", "dense_layers",
    "budget_generated", "placement", "codec", "overlap", "chat",
    "dtype", "device", "prefill_chunk", "seed", "threads", "warmup", "graphs", "backends", "generation",
    "data", "history", "store",
)  # fmt: skip
RANGES = {"rate": ABOVE_0, "think_s": FROM_0, "slots": FROM_1, "read_buffer": Range(least=0, hint="which is none")}
INSTEAD = {
    "batch": "slots=N says how many turns run side by side",
    "trace": "replay=FILE reads a trace of arrivals",
    "overflow": "conversations must fit the model's window",
    "protocol": "a turn is prefilled and sealed whole",
    "questions": "every turn is the next one of a conversation",
    "results": "--out DIR says where files go",
    "baseline": "method=full,NAME serves Full as well",
}


@dataclass(frozen=True, kw_only=True)
class TrafficSettings:
    """The settings of the arrivals, and of how they are served."""

    rate: float | None = None  # new sessions per second, a Poisson process; null: 1, or that of a replayed trace
    think_s: float = 5.0  # mean, from an answer to the next question
    replay: str | None = None  # a trace that an earlier command wrote, in place of task and think_s
    slots: int = 4  # turns that run side by side
    interleave: bool = False  # the others make a step between two chunks of a prefill
    read_buffer: int | None = None  # layers that the next turn loads before it has a slot; null: by the paper's formula
    clock: str = "wall"  # busy: idle time is skipped; cpu: so, and seconds are those of this process on its CPU

    def __post_init__(self) -> None:
        check_values(self, RANGES)
        if self.clock not in CLOCKS:
            raise SettingsError(f"clock={self.clock} is unknown: choose one of {', '.join(CLOCKS)}.")


OWN = tuple(field.name for field in fields(TrafficSettings))
TASK = "task=multiturn"  # where none is named
OF_STORE = ("store.", "read_buffer")
OF_TRACE = ("task", "think_s")  # what a replayed trace brings itself


@dataclass(frozen=True)
class TrafficPoint:
    """A run in words. `words`: those for `python -m harness`; `named`: the keys that vary, with their values here."""

    traffic: TrafficSettings
    words: tuple[str, ...]
    named: Mapping[str, str]

    @property
    def system(self) -> str:
        """Return what is compared with others at each rate."""
        return " ".join(f"{key}={value}" for key, value in self.others.items() if value)

    @property
    def others(self) -> dict[str, str]:
        """Return the keys that vary, apart from the rate."""
        return {key: value for key, value in self.named.items() if key != "rate"}

    def at(self, rate: float) -> TrafficPoint:
        return replace(self, traffic=replace(self.traffic, rate=rate))


def points(words: Sequence[str]) -> list[TrafficPoint]:
    """Return a run for each combination of the values. Raise `SettingsError` for keys that change nothing."""
    found = list(combinations(words, slowest="rate"))
    for key in found[0]:
        _refuse_unread(key)
        if "replay" in found[0] and key.partition(".")[0] in OF_TRACE:
            raise SettingsError(f"{key} changes nothing with replay: the trace has its own. Leave one out.")
    varied = [key for key in found[0] if len({point[key].text for point in found}) > 1]
    stored = ["history" in point and point["history"].value == "store" for point in found]
    if "read_buffer" in found[0] and not any(stored):
        raise SettingsError("read_buffer changes nothing without history=store.")
    made = [_point(point, varied, any(stored) and not own) for point, own in zip(found, stored, strict=True)]
    return list({(one.system, one.traffic.rate): one for one in made}.values())


def _point(chosen: Mapping[str, Word], varied: Sequence[str], others_store: bool) -> TrafficPoint:
    """Return the run of one combination. `others_store`: settings of the store belong to other combinations."""
    if others_store:
        chosen = {key: word for key, word in chosen.items() if not key.startswith(OF_STORE)}
    own = {key: word.value for key, word in chosen.items() if key in OWN}
    traffic = TrafficSettings(**own)
    others = [key for key in chosen if key not in OWN]
    named = {key: chosen[key].text.partition("=")[2] if key in chosen else "" for key in varied}
    task = [] if {"task", "replay"} & chosen.keys() else [TASK]
    return TrafficPoint(traffic, (*task, *(chosen[key].text for key in others)), named)


def _refuse_unread(key: str) -> None:
    first = key.partition(".")[0]
    if key in OWN or first in (*READ, *GROUPS):
        return
    if first in INSTEAD:
        raise SettingsError(f"{key} changes nothing for harness.serve: {INSTEAD[first]}.")
    if first in known_settings():
        raise SettingsError(
            f"{key} changes nothing for harness.serve: leave it out. docs/conversations.md says what it reads."
        )
    near = get_close_matches(key, (*OWN, *READ, *GROUPS), n=1, cutoff=0.5)
    raise SettingsError(
        f"There is no setting {key}; " + (f"did you mean {near[0]}?" if near else "see docs/conversations.md.")
    )
