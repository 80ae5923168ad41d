"""Asks GSM8K (arXiv:2110.14168): grade-school arithmetic after worked examples, a long prompt of
short parts. The final number is taken from an output in the four ways of the papers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evals.base import Example, Score, Task, TaskEnv, TaskError
from evals.data import Row, Source, no_answer, open_rows, require

FIELDS = {"question": "text", "answer": "text"}
# The rows of the train split (from 0) that PQCache shows, and the SHA-256 of the prompt that they make.
PQCACHE_SHOTS = (7364, 1708, 669, 6724, 261, 1380, 3715, 7446, 1205, 9)
PQCACHE_SHA256 = "840c910d893478051921f2cc46461522157930646af523c97c350746046f0989"


class Form(NamedTuple):
    """Hold a form of GSM8K's prompt: how the question follows the worked examples, and the texts at
    which an output ends."""

    question: str
    stop: tuple[str, ...]


FORMS = {
    # the paper generates on, and cuts there afterwards
    "pqcache": Form("\nQuestion: {}\n", ("\nQuestion: ",)),
    "lm_eval": Form("\n\nQ: {}\nA:", ("Q:", "</s>", "<|im_end|>")),
}


class Reader(NamedTuple):
    """Hold one way of scoring an output: how the answer is extracted from it, and when it equals
    the solution's."""

    extract: Callable[[str], str | None]
    equal: Callable[[str, str], bool]  # takes the extracted answer and the solution's final number


def strict(output: str) -> str | None:
    """Take the first number after `The answer is ` and the one character, whatever it is, that must
    follow (lm-eval gsm8k_cot, strict-match).

    >>> strict("The answer is 18."), strict("The answer is 18")
    ('18', '1')
    """
    match = re.search(r"The answer is (-?[0-9.,]+).", output)
    return match[1] if match else None


def flexible(output: str) -> str | None:
    """Take the last thing that looks like a number, full stop included (lm-eval, flexible-extract).

    >>> flexible("The answer is $1,234.")
    '$1,234.'
    """
    numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", output)
    return numbers[-1] if numbers else None


def pqcache(output: str) -> str | None:
    """Return the last number in the output, as PQCache reads it: up to where the model asks itself a
    new question, with commas removed and signs ignored.

    >>> pqcache("It is -1,000.5\\nQuestion: 7?")
    '1000.5'
    """
    numbers = re.findall(r"\d*\.?\d+", output.split("\nQuestion: ")[0].replace(",", ""))
    return numbers[-1] if numbers else None


def openai(output: str) -> str | None:
    """Take the first number after `#### ` (OpenAI's own reading).

    >>> openai("#### 1,234")
    '1234'
    """
    match = re.search(r"#### (-?[0-9.,]+)", output)
    return match[1].replace(",", "") if match else None


def final_number(solution: str) -> str:
    """Return the number after `####` in a solution of the data set."""
    return solution.rpartition("####")[2].strip()


def _same_text(*numbers: str) -> bool:
    """Compare two numbers as texts, as lm-eval's exact match does: without commas, dollar signs,
    what precedes `#### `, and one full stop at the end."""
    plain = (text.replace(",", "").replace("$", "").rpartition("#### ")[2] for text in numbers)
    return len({text.removesuffix(".").lower() for text in plain}) == 1


def _same_value(answer: str, final: str) -> bool:
    """Compare two numbers by value. The solution's, `final`, is read as PQCache reads an output,
    which ignores signs, so that -10 equals 10."""
    wanted = pqcache(final)
    return wanted is not None and float(answer) == float(wanted)


READERS = {
    "pqcache": Reader(pqcache, _same_value),
    "strict": Reader(strict, _same_text),
    "flexible": Reader(flexible, _same_text),
    "openai": Reader(openai, lambda answer, final: answer == final.replace(",", "")),
}


def solved(output: str, solutions: Sequence[str]) -> bool:
    """Return whether an output ends with the final number of a worked solution of the data set, read as
    `pqcache` does. It is a scorer for task=rows, which asks a question without worked examples and
    measures the likelihood of the whole solution.

    >>> solved("So it is \\\\boxed{18}.", ["16 - 7 = 9, 9 * 2 = 18\\n#### 18"])
    True
    """
    answer = pqcache(output)
    return answer is not None and any(_same_value(answer, final_number(x)) for x in solutions)


@dataclass(frozen=True)
class Gsm8k(Task):
    """Ask GSM8K's questions after worked examples. The number is taken from every output in four
    ways (READERS); all are recorded, and the one that `extraction` names is the score."""

    version = "1"
    seeded = False
    metric = "accuracy"
    averaged = tuple(READERS)  # the accuracy by each way of reading the number

    prompt: str = "pqcache"
    extraction: str = "pqcache"
    samples: int | None = None
    max_new_tokens: int = 256
    chat: bool = False
    revision: str = "740312add88f781978c0658806c59bc2815b9866"

    def __post_init__(self) -> None:
        if self.prompt not in FORMS:
            raise TaskError(f"prompt={self.prompt!r} is unknown: choose one of {', '.join(FORMS)}")
        if self.extraction not in READERS:
            raise TaskError(
                f"extraction={self.extraction!r} is unknown: choose one of {', '.join(READERS)}"
            )
        if self.extraction == "strict" and self.prompt == "pqcache":
            raise TaskError(
                "extraction=strict needs a full stop behind the answer, which the examples of prompt=pqcache do not "
                "have: choose prompt=lm_eval, or another extraction"
            )
        self._refuse_below("leaves nothing: give {} or more, or null for all rows", samples=1)
        self._refuse_below("leaves no room for an answer: the papers use 256", max_new_tokens=1)

    def require(self, data_root: Path | None) -> None:
        splits = ("train", "test") if self.prompt == "pqcache" else ("test",)
        require(map(self._source, splits), data_root)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        shots = self._pqcache_shots(env) if self.prompt == "pqcache" else _lm_eval_shots()
        test = open_rows(self._source("test"), env, FIELDS)
        self._opened.update(test=test.provenance, prompt_sha256=_sha256(shots))
        form = FORMS[self.prompt]
        for index, row in enumerate(test.rows[: self.samples]):
            question, solution = row["question"], row["answer"]
            if "####" not in solution or not final_number(solution):
                raise no_answer(f"gsm8k/test: row {index + 1} of {test.origin}")
            yield Example(
                id=f"gsm8k-{index}",
                group="gsm8k",
                context=shots,
                question=form.question.format(question),
                references=(final_number(solution),),
                max_new_tokens=self.max_new_tokens,
                chat=self.chat,
                stop=form.stop,
            )

    def score(self, example: Example, output: str) -> Score:
        for stop in example.stop:
            output = output.split(stop)[0]
        details: dict[str, float | str] = {}
        for name, reader in READERS.items():
            answer = reader.extract(output)
            details[name] = float(
                answer is not None and reader.equal(answer, example.references[0])
            )
            details[f"{name}_answer"] = "" if answer is None else answer
        return Score(float(details[self.extraction]), details)

    def _source(self, split: str) -> Source:
        return Source(
            name=f"gsm8k/{split}",
            local=(f"gsm8k/{split}.jsonl", f"gsm8k/main/{split}-*.parquet"),
            hub_repo="openai/gsm8k",
            hub_file=f"main/{split}-00000-of-00001.parquet",
            hub_revision=self.revision,
        )

    def _pqcache_shots(self, env: TaskEnv) -> str:
        train = open_rows(self._source("train"), env, FIELDS)
        if len(train.rows) <= max(PQCACHE_SHOTS):
            raise TaskError(
                f"{train.origin} has {len(train.rows)} rows, not GSM8K's 7473: fetch it again"
            )
        shots = "\n\n".join(_pqcache_shot(train.rows[index]) for index in PQCACHE_SHOTS)
        if _sha256(shots) != PQCACHE_SHA256:
            raise TaskError(
                f"{train.origin} does not make PQCache's prompt (SHA-256 {PQCACHE_SHA256}): fetch it again"
            )
        self._opened["train"] = train.provenance
        return shots


def _pqcache_shot(row: Row) -> str:
    steps, _, final = re.sub(r"<<.*?>>", "", row["answer"]).rpartition("\n#### ")
    return f"Question: {row['question']}\nLet's think step by step\n{steps}\nThe answer is {final}"


def _lm_eval_shots() -> str:
    """Return the eight worked examples of gsm8k_cot, from Wei et al. (arXiv:2201.11903)."""
    shots = json.loads(Path(__file__).with_name("gsm8k_shots.json").read_text(encoding="utf-8"))
    return "\n\n".join(f"Q: {shot['question']}\nA: {shot['answer']}" for shot in shots)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
