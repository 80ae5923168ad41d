"""The conversations of a task with the times of their arrivals, drawn by seed or read from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from evals.base import Example, Task, Turn
from evals.data import check
from harness.cachedattention.simulation.trace import TraceError, TurnLengths, rows_in, timed
from harness.jobs.planning.examples import PreparedExample
from harness.results.files import canonical, write_lines

SCHEMA = 1
SECONDS = "a number from 0 on"
HEAD = {"schema": "a whole number", "rate": "a number above 0", "task": "an object"}
SAID = {"references": ["text"], "prefix?": "text", "reply?": "text", "data?": "an object"}
TURN = SAID | {"question": "text", "max_new_tokens?": "a whole number above 0"}
CONVERSATION = SAID | {
    "id": "text",
    "group": "text",
    "context": "text",
    "question?": "text",
    "system?": "text",
    "max_new_tokens": "a whole number above 0",
    "min_new_tokens?": "a whole number",
    "teacher_forced?": "true or false",
    "choices?": ["text"],
    "chat?": "true or false",
    "stop?": ["text"],
    "max_prompt_tokens?": "a whole number above 0",
    "further?": [TURN],
    "unit?": "text",
}
LINE = {"start_s": SECONDS, "think_s": [SECONDS], "conversation": CONVERSATION}


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. `think_s`: seconds from an answer to the next question, one less than there are turns."""

    item: PreparedExample
    start_s: float
    think_s: tuple[float, ...]

    @property
    def name(self) -> str:
        return self.item.example.id


def drawn(items: Sequence[PreparedExample], *, seed: int, think_s: float) -> list[Session]:
    """Return sessions that come as a Poisson process, one per second. `think_s`: mean of an exponential law."""
    turns = [[TurnLengths(len(turn.prompt.ids), turn.new_tokens) for turn in item.turns] for item in items]
    timings = timed([item.example.id for item in items], turns, 1.0, think_s, np.random.default_rng(seed))
    return [Session(item, one.start_s, one.think_s) for item, one in zip(items, timings, strict=True)]


def stretched(sessions: Sequence[Session], factor: float) -> list[Session]:
    """Return the same arrivals with `factor` times the time between them; users think as long as before."""
    return [replace(one, start_s=one.start_s * factor) for one in sessions]


@dataclass(frozen=True)
class Recorded:
    """A trace that was read from a file. `task`: the configuration of the task that scores its answers; `rate`: the
    sessions per second that its times are for."""

    task: dict[str, Any]
    rate: float
    examples: list[Example]
    start_s: list[float]
    think_s: list[tuple[float, ...]]

    def check(self, task: Task) -> None:
        """Raise `TraceError` for a conversation that its task cannot score, which a run would find at its end."""
        for turn in (turn for example in self.examples for turn in example.turns):
            try:
                task.score(turn, "0")
            except Exception as error:
                raise TraceError(
                    f"replay: {turn.id} is no conversation that {type(task).__name__} can score ({error!r}): correct "
                    "its data and references, or the task in the first line."
                ) from error

    def sessions(self, items: Sequence[PreparedExample]) -> list[Session]:
        """Return the sessions of `items`, which were made of the examples."""
        return [Session(*one) for one in zip(items, self.start_s, self.think_s, strict=True)]


def write(path: Path, sessions: Sequence[Session], task: dict[str, Any], rate: float) -> None:
    """Write texts and times for a later replay: a line about all, then a line per session."""
    head = {"schema": SCHEMA, "rate": rate, "task": json.loads(canonical(task))}
    lines = [
        {"start_s": one.start_s, "think_s": one.think_s, "conversation": asdict(one.item.example)} for one in sessions
    ]
    write_lines(path, [head, *lines])


def read(path: Path) -> Recorded:
    """Read a trace that `write` has written. Raise `TraceError` with the row that is wrong."""
    head, *lines = rows_in(path, "replay")
    place = f"replay: row 1 of {path}"
    check(head, {"schema": "a whole number"}, place)
    if head["schema"] != SCHEMA:
        raise TraceError(f"{path} has schema {head['schema']}, and this version reads {SCHEMA}: record it again.")
    check(head, HEAD, place)
    if not lines:
        raise TraceError(f"{path} holds no conversations: record it again.")
    examples = []
    for number, line in enumerate(lines, 2):
        place = f"replay: row {number} of {path}"
        check(line, LINE, place)
        examples.append(_made(Example, line["conversation"], place))
        further, pauses = len(examples[-1].further), len(line["think_s"])
        if further != pauses:
            raise TraceError(f"{place} has {further} further turns and {pauses} think_s: give one to each.")
    times = [(float(line["start_s"]), tuple(map(float, line["think_s"]))) for line in lines]
    return Recorded(head["task"], float(head["rate"]), examples, *map(list, zip(*times, strict=True)))


def _made(kind: Any, plain: dict[str, Any], place: str) -> Any:
    """Return an example, or a turn of one, with the fields of `plain`; a field that is null is left out."""
    if unknown := sorted(plain.keys() - {field.name for field in fields(kind)}):
        raise TraceError(f"{place} has {unknown[0]!r}, which is no field of a conversation: leave it out.")
    given = {name: value for name, value in plain.items() if value is not None}
    given |= {name: tuple(given[name]) for name in ("references", "choices", "stop") if name in given}
    if "further" in given:
        given["further"] = tuple(_made(Turn, turn, place) for turn in given["further"])
    return kind(**given)
