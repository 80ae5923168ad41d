"""triage=on: every wrong answer of a complete run is given again, followed by a probe, until its cause is found.

Nothing of the run itself changes: records, tokens and times are on disk before this begins, and its lines go into a
file of their own (harness/results/triage.py). What is there already is not done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from harness.diagnosis.ladder import cause
from harness.diagnosis.needles import LocatedNeedle, missing, needles, plain
from harness.diagnosis.probe import Reads
from harness.diagnosis.replay import Replay, Replayed
from harness.engine.attach import Attachment
from harness.engine.batch.generation import LENGTH
from harness.engine.hf import routed
from harness.jobs.job import Job
from harness.jobs.planning.items import Item
from harness.jobs.runner import Runner
from harness.results import triage as stored
from harness.results.lock import FolderLock
from harness.results.records import Record
from harness.results.run_folder import load as load_run
from harness.terminal.progress import progress
from methods.full import Full

MORE = 32  # tokens that an answer gets on top, where it ran into the limit
COLUMNS = 32  # tokens of an answer whose shares are stored
KEPT = 1000  # of Full's answers under a model, for the other methods of a sweep

_full_answers: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Replayed]] = WeakKeyDictionary()


def triage(job: Job) -> None:
    """Adds what is lacking to the folder of a run whose examples are all there."""
    lock = FolderLock(job.folder, wait=True)
    try:
        run = load_run(job.folder)
        known = {line["id"] for line in run.triaged}
        pending = [record for record in stored.wrong(run.records) if record.id not in known]
        if pending:
            try:
                _examine(job, pending, run.info)
            finally:
                stored.bind(run.folder, run.info)
    finally:
        lock.release()


def _examine(job: Job, pending: Sequence[Record], info: Mapping[str, Any]) -> None:
    loaded = job.load()
    items = {item.example.id: item for item in job.items}
    plain_run = replace(job.settings, fidelity=0, trace="off", graphs="off")
    attachment = job.attachment(loaded, info)
    full = Attachment(loaded.model, Full())
    with routed(loaded.model):
        runner = Runner(job.task, plain_run, job.folder, attachment, loaded)

        def lines() -> Iterator[Record]:
            for record in pending:
                answer = WrongAnswer(runner, full, items[record.id], record)
                stored.append(job.folder, answer.line(), info)
                yield record

        wanted = [len(items[record.id].prompt.ids) for record in pending]
        label, shown = f"{job.label}, triage", job.settings.progress
        for _ in progress(lines(), label, wanted, shown, size=lambda record: record.prompt_tokens):
            pass


@dataclass
class WrongAnswer:
    """One wrong answer."""

    runner: Runner
    full: Attachment
    item: Item
    record: Record
    lost: list[LocatedNeedle] = field(init=False)  # needles whose answers are missing

    def __post_init__(self) -> None:
        found = needles(self.item.example, self.item.prompt, self.runner.loaded.tokenizer)
        self.lost = missing(found, self.record.output) if found else []

    def line(self) -> dict[str, Any]:
        """What triage.jsonl holds of it."""
        answers = [needle.answer for needle in self.lost]
        line = {
            "id": self.record.id,
            "answer": self.record.answer_sha256,
            "score": self.record.score,
            "answers": answers,
        }
        if seen := self.seen():
            return line | {"cause": seen}
        return line | {"needle": list(self.positions)} | self._followed()

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(sorted({position for needle in self.lost for position in needle.positions}))

    def seen(self) -> str | None:
        """The cause that shows without running the model."""
        if not self.lost:
            return "no_needle"
        if not self.positions:
            return "not_in_prompt"
        given = all(plain(needle.answer) in plain(self.record.output) for needle in self.lost)
        return "format" if given else None

    def _followed(self) -> dict[str, Any]:
        attachment, count = self.runner.engine.attachment, self.item.new_tokens
        more = self._more()
        sealed = self.replay.under(attachment, more)
        own, full = sealed.answer(more=more), self._full()
        full_score = self._score(full.tokens)
        found: dict[str, Any] = {
            "full_score": full_score,
            "repeated": own.tokens[: len(self.record.tokens)] == self.record.tokens,
            "departs": _departs(own.tokens[:count], full.tokens),
            "first": own.first,
            "held": _cut(own.held, len(self.record.tokens), own.first),
            "mass": _cut(own.mass, len(self.record.tokens), own.first),
            "full_mass": _cut(full.mass, len(full.tokens), full.first),
        }
        longer = self._score(own.tokens) if len(own.tokens) > count else 0.0
        if longer > self.record.score and longer >= full_score:
            return {"cause": "token_limit"} | found

        def answer(reads: Reads) -> float:
            made = own if reads == "own" else sealed.answer(reads)
            return self._score(made.tokens[:count])

        kind = {"evicts": own.evicts, "dense_prefill": attachment.method.dense_prefill}
        name, scores = cause(self.record.score, full_score, answer, **kind)
        return {"cause": name, "scores": scores} | found

    @property
    def replay(self) -> Replay:
        ids = self.item.prompt.ids
        context = self.item.prompt.split if self.runner.settings.protocol == "context" else len(ids)
        return Replay(
            ids, context, self.positions, self._ending, self.item.new_tokens, self.runner.settings.prefill_chunk
        )

    def _ending(self, new_tokens: int) -> dict[str, Any]:
        return self.runner.ending(replace(self.item, new_tokens=new_tokens))

    def _more(self) -> int:
        if self.record.stop != LENGTH or self.runner.settings.generation.force_length:
            return 0
        return max(0, min(MORE, self.runner.loaded.window - len(self.item.prompt.ids) - self.item.new_tokens))

    def _full(self) -> Replayed:
        """Full's answer, once for all methods of a command, as long as its model is there."""
        known = _full_answers.setdefault(self.full.model, {})
        replay, example, force = self.replay, self.item.example, self.runner.settings.generation.force_length
        ends = (replay.new_tokens, force, example.stop, example.min_new_tokens)
        key = (self.item.sha256, replay.context, replay.needle, replay.prefill_chunk, *ends)
        if key not in known:
            if len(known) >= KEPT:
                known.clear()
            known[key] = replay.under(self.full).answer()
        return known[key]

    def _score(self, tokens: Sequence[int]) -> float:
        return self.runner.task.score(self.item.example, self.runner.output(self.item, tokens)).value


def _departs(mine: Sequence[int], full: Sequence[int]) -> int | None:
    """The first token, counted from 1, that is not Full's."""
    pairs = zip(mine, full, strict=False)
    differ = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), min(len(mine), len(full)) + 1)
    return None if list(mine) == list(full) else differ


def _cut(rows: Sequence[Sequence[float]], tokens: int, first: int) -> list[list[float]]:
    """The columns of an answer of so many tokens, as far as they are stored."""
    return [list(row[: min(COLUMNS, tokens - first + 1)]) for row in rows]
