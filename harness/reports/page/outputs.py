"""What every run put out, for two of them side by side: each text once, and no more than a page can carry."""

from __future__ import annotations

import hashlib
from typing import Any

from harness.reports.compare import Comparison
from harness.results.records import Record

LONGEST = 4000  # characters of one output
MOST = 8_000_000  # characters of all outputs of a page


class Room:
    """The texts of the page, each once; `add` gives its place."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.size = self.cut = self.missing = 0

    def add(self, text: str) -> int | None:
        """Add a text and return its number; None where no room is left."""
        if len(text) > LONGEST:
            self.cut += 1
            text = text[:LONGEST]
        if text not in self.texts:
            if self.size + len(text) > MOST:
                self.missing += 1
                return None
            self.size += len(text)
            self.texts[text] = len(self.texts)
        return self.texts[text]

    @property
    def sentence(self) -> str:
        """Return a sentence on what had to be cut."""
        cut = f"{self.cut} outputs are cut after {LONGEST} characters"
        missing = f"{self.missing} outputs are left out, for the page holds {MOST / 1e6:.0f} million characters of them"
        return "; ".join([*[cut] * bool(self.cut), *[missing] * bool(self.missing)])


def outputs(table: Comparison, room: Room) -> dict[str, Any]:
    """`examples`: id and group of every prompt of the table; `answers`: per row, by the example's place."""
    places: dict[tuple[str, str], int] = {}
    groups: list[tuple[str, str]] = []
    answers: list[dict[int, Any]] = []
    for entry in table.entries:
        own: dict[int, Any] = {}
        for record in entry.run.records:
            key = (record.id, record.prompt_sha256)
            if key not in places:
                places[key] = len(places)
                groups.append((record.id, record.group))
            own[places[key]] = _answer(record, room, scored=not table.of_perplexity)
        answers.append(own)
    return {"examples": groups, "answers": answers}


def _answer(record: Record, room: Room, scored: bool) -> list[Any]:
    """Text, score (null of a text that was fed), tokens, stop, whether it is cut, and a mark that is the same where the
    whole answer is."""
    mark = hashlib.sha256(repr(record.answer).encode()).hexdigest()[:8]
    score = record.score if scored else None
    return [room.add(record.output), score, len(record.tokens), record.stop, len(record.output) > LONGEST, mark]
