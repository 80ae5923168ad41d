"""Who comes when: the conversations of a task with the times of their arrivals, drawn by seed or read from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from evals.base import Example, Turn
from harness.history.simulation.trace import TraceError, timed
from harness.history.simulation.trace import Turn as Lengths
from harness.jobs.planning.items import Item
from harness.results.files import canonical, read_lines, write_lines

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. `think_s`: from an answer to the next question, one less than there are turns."""

    item: Item
    start_s: float
    think_s: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.item.example.id


def drawn(items: Sequence[Item], *, seed: int, think_s: float) -> list[Session]:
    """One new session per second, a Poisson process. `think_s`: mean of an exponential law."""
    turns = [[Lengths(len(turn.prompt.ids), turn.new_tokens) for turn in item.turns] for item in items]
    told = timed([item.example.id for item in items], turns, 1.0, think_s, np.random.default_rng(seed))
    return [Session(item, one.start_s, one.think_s) for item, one in zip(items, told, strict=True)]


def stretched(sessions: Sequence[Session], factor: float) -> list[Session]:
    """The same arrivals with `factor` times the time between them; users think as long as before."""
    return [replace(one, start_s=one.start_s * factor) for one in sessions]


@dataclass(frozen=True)
class Recorded:
    """A trace from a file. `task`: the configuration of the task that scores its answers; `rate`: the sessions per
    second that its times are for."""

    task: dict[str, Any]
    rate: float
    examples: list[Example]
    start_s: list[float]
    think_s: list[tuple[float, ...]]

    def sessions(self, items: Sequence[Item]) -> list[Session]:
        """`items`: of its examples."""
        return [Session(*one) for one in zip(items, self.start_s, self.think_s, strict=True)]


def write(path: Path, sessions: Sequence[Session], task: dict[str, Any], rate: float) -> None:
    """Text and times, for a replay here or elsewhere: a line about all, then a line per session."""
    head = {"schema": SCHEMA, "rate": rate, "task": json.loads(canonical(task))}
    lines = [
        {"start_s": one.start_s, "think_s": one.think_s, "conversation": asdict(one.item.example)} for one in sessions
    ]
    write_lines(path, [head, *lines])


def read(path: Path) -> Recorded:
    head, *lines = read_lines(path) or [{}]
    try:
        if head["schema"] != SCHEMA:
            raise TraceError(f"{path} has schema {head['schema']}, and this version reads {SCHEMA}: record it again.")
        examples = [_example(line["conversation"]) for line in lines]
        starts = [float(line["start_s"]) for line in lines]
        thinks = [tuple(map(float, line["think_s"])) for line in lines]
        rate, task = float(head["rate"]), dict(head["task"])
    except (KeyError, TypeError) as error:
        raise TraceError(f"{path} is no trace of harness.serve: {error!r}; see docs/serving.md.") from error
    for example, think_s in zip(examples, thinks, strict=True):
        if len(think_s) != len(example.further):
            raise TraceError(f"{path}: {example.id} has {len(example.further)} further turns, {len(think_s)} think_s.")
    return Recorded(task, rate, examples, starts, thinks)


def _example(plain: dict[str, Any]) -> Example:
    further = tuple(Turn(**turn | {"references": tuple(turn["references"])}) for turn in plain.get("further", ()))
    tuples: dict[str, Any] = {name: tuple(plain[name]) for name in ("references", "stop") if name in plain}
    return Example(**plain | tuples | {"further": further})
