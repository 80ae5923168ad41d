"""Makes the prompts of a RULER task at a length: chooses the generator and its data, and lists all
that decides what the prompts are, by which a run and a cache know them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from evals import haystack
from evals.base import TaskEnv
from evals.data import Row, value_of
from evals.ruler import qa
from evals.ruler.aggregation import ENGLISH_WORDS, CommonWords, FrequentWords
from evals.ruler.fitting import OFFICIAL_FROM, Generator, TooShort
from evals.ruler.niah import KINDS, Niah, essay_words
from evals.ruler.templates import FAMILIES, FilledTemplate
from evals.ruler.tracing import Tracing
from evals.ruler.vocabulary import Streams, words_sha256

log = logging.getLogger(__name__)

OFFICIAL = "official"  # prompts equal those of the official scripts, string by string
# lengths to name where a task does not fit the one that was asked for
DOUBLED = (1024, 2048, 4096, 8192, 16384)
FINE = "fine-1"  # our own prompts below OFFICIAL_FROM tokens; raised when they change
# raised when any prompt changes: cached ones are then made again
GENERATOR = f"{OFFICIAL}-1 {FINE}"
HIDDEN_IN = {"vt": "noise", "cwe": "words", "fwe": "words", "qa": "documents"}


class Factory:
    """Make RULER's prompts for one run. Data sets are read when it is made, and only those that the
    run's tasks need."""

    def __init__(
        self, env: TaskEnv, tasks: Sequence[str], haystack_name: str, questions: int = 1
    ) -> None:
        self._env, self._questions = env, questions
        self._haystack = haystack.load(haystack_name, env) if any(map(_uses_essay, tasks)) else None
        self._corpora = {task: qa.load(task, env) for task in tasks if FAMILIES[task] == "qa"}

    def prompts(self, task: str, length: int, samples: int) -> list[FilledTemplate]:
        """Return `samples` prompts of a task at a length, from the cache if it has them; else they
        are made and kept there. Only making them asks the tokenizer."""
        if self._env.cache_dir is None:
            rows = self._rows(task, length, samples)
        else:
            digest = hashlib.sha256(_dumps(self._key(task, length, samples)).encode()).hexdigest()
            path = self._env.cache_dir / "ruler" / f"{task}-{length}-{digest[:16]}.json"
            try:
                rows = json.loads(path.read_bytes())
            except (OSError, ValueError):
                rows = self._rows(task, length, samples)
                _keep(path, _dumps(rows))
        return [FilledTemplate.from_row(row) for row in rows]

    def provenance(self) -> dict[str, Any]:
        return self._shaped_by([*self._corpora], self._haystack)

    def _shaped_by(self, corpora: Sequence[str], text: haystack.Haystack | None) -> dict[str, Any]:
        """Return what shapes prompts beside task and size: `corpora` are tasks with documents, `text`
        is what needles are hidden in."""
        shaped: dict[str, Any] = {
            "seed": self._env.seed,
            "tokenizer": self._env.text.fingerprint,
            "words_sha256": words_sha256(),
        }
        if text is not None:
            shaped |= {
                "haystack": text.name,
                "haystack_sha256": text.sha256,
                "splitter": haystack.SPLITTER,
            }
        read = {task: self._corpora[task] for task in corpora}
        return shaped | {
            task: {"origin": corpus.origin, "sha256": corpus.sha256}
            for task, corpus in read.items()
        }

    def _rows(self, task: str, length: int, samples: int) -> list[Row]:
        prompts = self._drawn(task, length, samples)
        if prompts is None:
            remedies = (
                f" ({longer} would do)"
                for longer in DOUBLED
                if longer > length and self._drawn(task, longer, samples)
            )
            raise TooShort(f"{task} does not fit {length} tokens{next(remedies, '')}")
        hidden_in = KINDS[task].haystack if task in KINDS else HIDDEN_IN[FAMILIES[task]]
        if self._haystack is not None and hidden_in == "essay":
            hidden_in = self._haystack.name
        stamp = {
            "generator": OFFICIAL if length >= OFFICIAL_FROM else FINE,
            "haystack": hidden_in,
        }
        return [asdict(replace(prompt, data={**stamp, **prompt.data})) for prompt in prompts]

    def _drawn(self, task: str, length: int, samples: int) -> list[FilledTemplate] | None:
        """Draw prompts anew; None if the task does not fit the length."""
        try:
            return self._generator(task, length).prompts(samples)
        except TooShort:
            return None

    def _key(self, task: str, length: int, samples: int) -> dict[str, Any]:
        """Return everything that shapes the prompts, which names their file in the cache."""
        text = self._haystack if _uses_essay(task) else None
        english = "\n".join(self._english) if task == "cwe" else ""
        return self._shaped_by([task] * (task in self._corpora), text) | {
            "generator": GENERATOR,
            "task": task,
            "length": length,
            "samples": samples,
            "questions": self._questions,
            "english_words": hashlib.sha256(english.encode()).hexdigest(),
        }

    def _generator(self, task: str, length: int) -> Generator:
        """Return the generator of a task's prompts at a length, with its random numbers at their
        beginning."""
        text, streams = self._env.text, Streams(self._env.seed)
        match FAMILIES[task]:
            case "niah":
                essay = self._essay if _uses_essay(task) else ()
                return Niah(
                    text, streams, length, kind=KINDS[task], essay=essay, questions=self._questions
                )
            case "vt":
                return Tracing(text, streams, length)
            case "cwe":
                return CommonWords(text, streams, length, english=self._english)
            case "fwe":
                return FrequentWords(text, streams, length)
            case _:
                return qa.QuestionAnswering(text, streams, length, corpus=self._corpora[task])

    @cached_property
    def _essay(self) -> list[str]:
        assert self._haystack is not None
        return essay_words(self._haystack.text)

    @cached_property
    def _english(self) -> list[str]:
        root = self._env.data_root
        places = (root / "words" / ENGLISH_WORDS, root / ENGLISH_WORDS) if root else ()
        path = next((path for path in places if path.is_file()), None)
        if path is None:
            return []
        place = f"{path} (which git-lfs may keep elsewhere)"
        return list(value_of(path.read_bytes(), {str: "text that is not blank"}, place).values())


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _keep(path: Path, text: str) -> None:
    """Write a file of generated prompts to the cache, whole or not at all."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:  # a full disk costs time, but does not end the run
        log.warning("%s cannot be written (%s): it is made again next time", path, error.strerror)
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _uses_essay(task: str) -> bool:
    return task in KINDS and KINDS[task].haystack == "essay"
