"""Asks LongBench v2 (arXiv:2412.15204): 503 questions with four choices on documents of 8K to 2M words, with the
official prompts, cut and reading of the answer (pred.py and result.py of github.com/THUDM/LongBench)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from evals.base import Example, Score, Task, TaskEnv, TaskError
from evals.data import Row, Shape, Source, check, open_rows, require, value_of

HUB_REPO = "zai-org/LongBench-v2"
PLACES = ("LongBench-v2/data.json", "longbench_v2/data.json", "longbench_v2.json")
LENGTHS = ("short", "medium", "long")  # to 32K words, to 128K, more
SPLITS = ("easy", "hard", *LENGTHS)  # of the official result table, each over its rows
MOST_TOKENS = 120_000  # of a prompt, in the official model2maxlen.json
# for a BOS, and for what the two halves of a cut prompt may grow by when they are tokenised again
_SPARE_TOKENS = 16
_TEXTS = (
    "question",
    "choice_A",
    "choice_B",
    "choice_C",
    "choice_D",
    "context",
    "difficulty",
    "length",
    "answer",
)
_SHAPE: Shape = dict.fromkeys(_TEXTS, "text") | {"_id": "text or a whole number", "domain?": "text"}
_LEGAL = {"answer": tuple("ABCD"), "difficulty": SPLITS[:2], "length": LENGTHS}
_FILLED = {"$DOC$": "context", "$Q$": "question"} | {
    f"$C_{letter}$": f"choice_{letter}" for letter in "ABCD"
}

_ASKED = "What is the correct answer to this question: $Q$\nChoices:\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\n\n"
_FORMAT = 'Format your response as follows: "The correct answer is (insert answer here)".'
PROMPTS = {  # named as the official files
    "0shot": "Please read the following text and answer the question below.\n\n<text>\n$DOC$\n</text>\n\n"
    + f"{_ASKED}{_FORMAT}",
    "0shot_cot": "Please read the following text and answer the questions below.\n\n<text>\n$DOC$\n</text>\n\n"
    + f"{_ASKED}Let’s think step by step:",
    "0shot_cot_ans": "Please read the following text and answer the questions below.\n\n"
    + f"The text is too long and omitted here.\n\n{_ASKED}Let’s think step by step: $COT$\n\n"
    + f"Based on the above, what is the single, most likely answer choice? {_FORMAT}",
    "0shot_no_context": f"{_ASKED}What is the single, most likely answer choice? {_FORMAT}",
}


@dataclass(frozen=True)
class LongBenchV2(Task):
    """Ask LongBench v2's questions. The answer is the letter that stands in "The correct answer is (A)" (`extract`);
    an output without it is wrong, as officially.

    The official chain of thought is two requests: `0shot_cot` brings the reasoning, and `0shot_cot_ans` asks for its
    letter without the document. The second run reads the outputs of the first, whose folder `reasoning` names."""

    version: ClassVar[str] = "2"
    seeded: ClassVar[bool] = False
    metric: ClassVar[str] = "accuracy"
    chance: ClassVar[float | None] = 0.25

    prompt: str = "0shot"
    reasoning: str | None = None
    lengths: Sequence[str] = LENGTHS
    samples: int | None = None
    max_prompt_tokens: int | None = None
    revision: str = "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"
    _opened: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.prompt not in PROMPTS:
            raise TaskError(
                f"task.prompt={self.prompt} is unknown: choose one of {', '.join(PROMPTS)}"
            )
        if (self.prompt == "0shot_cot_ans") != (self.reasoning is not None):
            raise TaskError(
                f"task.prompt={self.prompt} does not fit task.reasoning={self.reasoning}: 0shot_cot_ans asks for the "
                "answers to the reasoning of a run with task.prompt=0shot_cot, whose folder task.reasoning names"
            )
        if not self.lengths or set(self.lengths) - set(LENGTHS):
            raise TaskError(f"task.lengths={self.lengths} must be a list of {', '.join(LENGTHS)}")
        for key, least in (("samples", 1), ("max_prompt_tokens", 2)):
            if (value := getattr(self, key)) is not None and value < least:
                raise TaskError(f"task.{key}={value} leaves nothing: give {least} or more, or null")

    def require(self, data_root: Path | None) -> None:
        require([self._source], data_root)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        opened = open_rows(self._source, env, _SHAPE)
        reasoning = self._reasoning()
        self._opened["longbench_v2"] = opened.provenance
        for row, (key, legal) in product(opened.rows, _LEGAL.items()):
            if row[key] not in legal:
                place = f"longbench_v2: row {row['_id']} of {opened.origin}"
                raise TaskError(
                    f"{place} has {key}={row[key]!r}, not {' or '.join(legal)}: correct it, or drop the row"
                )
        for row in [row for row in opened.rows if row["length"] in self.lengths][: self.samples]:
            if reasoning is not None and str(row["_id"]) not in reasoning:
                raise TaskError(
                    f"{self.reasoning} has no output for {row['_id']}: finish that run first"
                )
            yield self._example(row, None if reasoning is None else reasoning[str(row["_id"])], env)

    def score(self, example: Example, output: str) -> Score:
        letter = extract(output)
        value = float(letter in example.references)
        parts = {example.data["difficulty"]: value, example.data["length"]: value}
        return Score(
            value, parts | {"extracted_share": float(letter is not None), "answer": letter or ""}
        )

    def averages(
        self, groups: Mapping[str, float], details: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return `mean` over all rows, the accuracy over the rows of each official split that was asked, and the
        share of outputs with a letter that could be read."""
        return super().averages(groups) | {
            name: details[name]
            for name in (*SPLITS, "extracted_share")
            if details and name in details
        }

    def provenance(self) -> dict[str, Any]:
        return dict(self._opened)

    @property
    def _source(self) -> Source:
        return Source(
            name="longbench_v2",
            local=PLACES,
            hub_repo=HUB_REPO,
            hub_file="data.json",
            hub_revision=self.revision,
        )

    @property
    def _answer_tokens(self) -> int:
        return 1024 if self.prompt == "0shot_cot" else 128

    def _reasoning(self) -> dict[str, str] | None:
        """Return the outputs of the run in `reasoning` by the ids of its examples; None without one."""
        if self.reasoning is None:
            return None
        path = Path(self.reasoning).expanduser() / "examples.jsonl"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TaskError(
                f"task.reasoning={self.reasoning} is no folder of a run ({error}): name one"
            ) from error
        lines = [
            value_of(line, {"id": "text"}, f"{path}") for line in data.split(b"\n") if line.strip()
        ]
        self._opened["reasoning"] = {
            "origin": str(path),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        for line in lines:
            check(line, {"output": "text"}, f"{path}: {line['id']}")
        return {line["id"]: line["output"].strip() for line in lines}

    def _example(self, row: Row, reasoning: str | None, env: TaskEnv) -> Example:
        head, document, tail = PROMPTS[self.prompt].partition("$DOC$")
        if not document:  # nothing stands before the question
            head, tail = head + tail, ""
        context = _filled(head + document, row)
        return Example(
            id=str(row["_id"]),
            group="longbench_v2",
            context=context if reasoning is None else context.replace("$COT$", reasoning),
            question=_filled(tail, row),
            references=(row["answer"],),
            max_new_tokens=self._answer_tokens,
            max_prompt_tokens=self._limit(env),
            data={
                key: row[key]
                for key in ("difficulty", "length", "domain")
                if row.get(key) is not None
            },
        )

    def _limit(self, env: TaskEnv) -> int:
        """Return how many tokens a prompt may have before the chat template is put around it; of a longer one the
        first and the last half of so many stay."""
        if self.max_prompt_tokens is not None:
            return self.max_prompt_tokens
        if env.window is None:
            return MOST_TOKENS
        limit = min(
            MOST_TOKENS, env.window - self._answer_tokens - env.text.count("") - _SPARE_TOKENS
        )
        if limit < 2:
            raise TaskError(
                f"the model's window of {env.window} tokens is too small for LongBench v2: take another"
            )
        return limit


def extract(output: str) -> str | None:
    """Return the letter that an output gives as its answer, read as the official code does; None without one.

    >>> extract("So **The correct answer is (C)**."), extract("The correct answer is B"), extract("(A)")
    ('C', 'B', None)
    """
    plain = output.replace("*", "")
    read = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(
        r"The correct answer is ([A-D])", plain
    )
    return read[1] if read else None


def _filled(template: str, row: Row) -> str:
    """Return the template with a row's texts in place of its marks, one mark after the other as in the official
    code: a mark that stands in the document itself, such as a formula's $Q$, is replaced as well."""
    for mark, name in _FILLED.items():
        template = template.replace(mark, row[name].strip())
    return template
