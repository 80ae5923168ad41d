"""Asks LongBench v2 (arXiv:2412.15204): 503 questions with four choices on documents of 8K to 2M words, with the
official prompts, cut and reading of the answer (pred.py and result.py of github.com/THUDM/LongBench)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from evals.base import Example, Score, Task, TaskEnv, TaskError, prompt_limit
from evals.data import Content, Row, Shape, Source, check, open_rows, require, value_of

HUB_REPO = "zai-org/LongBench-v2"
PLACES = ("LongBench-v2/data.json", "longbench_v2/data.json", "longbench_v2.json")
LENGTHS = ("short", "medium", "long")  # to 32K words, to 128K, more
SPLITS = ("easy", "hard", *LENGTHS)  # of the official result table, each over its rows
MOST_TOKENS = 120_000  # of a prompt, in the official model2maxlen.json
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

    version = "2"
    seeded = False
    metric = "accuracy"
    chance = 0.25
    averaged = (
        *SPLITS,
        "extracted_share",
    )  # the accuracy of each split, and the letters that could be read

    prompt: str = "0shot"
    reasoning: str | None = None
    lengths: Sequence[str] = LENGTHS
    samples: int | None = None
    max_prompt_tokens: int | None = None
    revision: str = "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"

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
        says = "leaves nothing: give {} or more, or null"
        self._refuse_below(says, samples=1, max_prompt_tokens=2)

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
            thought = reasoning.get(str(row["_id"]))
            if thought is None and self.reasoning is not None:
                raise TaskError(
                    f"{self.reasoning} has no output for {row['_id']}: finish that run first"
                )
            yield self._example(row, thought, env)

    def score(self, example: Example, output: str) -> Score:
        letter = extract(output)
        value = float(letter in example.references)
        parts = {example.data["difficulty"]: value, example.data["length"]: value}
        return Score(
            value, parts | {"extracted_share": float(letter is not None), "answer": letter or ""}
        )

    @property
    def _source(self) -> Source:
        return Source(
            name="longbench_v2",
            local=PLACES,
            hub_repo=HUB_REPO,
            hub_file="data.json",
            hub_revision=self.revision,
        )

    def _reasoning(self) -> dict[str, str]:
        """Return the outputs of the run in `reasoning` by the ids of its examples; none without one."""
        if self.reasoning is None:
            return {}
        path = Path(self.reasoning).expanduser() / "examples.jsonl"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TaskError(
                f"task.reasoning={self.reasoning} is no folder of a run ({error}): name one"
            ) from error
        self._opened["reasoning"] = Content(
            data, str(path), hashlib.sha256(data).hexdigest()
        ).provenance
        outputs = {}
        for line in filter(bytes.strip, data.split(b"\n")):
            record = value_of(line, {"id": "text"}, f"{path}")
            check(record, {"output": "text"}, f"{path}: {record['id']}")
            outputs[record["id"]] = record["output"].strip()
        return outputs

    def _example(self, row: Row, reasoning: str | None, env: TaskEnv) -> Example:
        head, document, tail = PROMPTS[self.prompt].partition("$DOC$")
        if not document:  # nothing stands before the question
            head, tail = head + tail, ""
        context = _filled(head + document, row)
        answer_tokens = 1024 if self.prompt == "0shot_cot" else 128
        says = (
            f"the model's window of {env.window} tokens is too small for LongBench v2: take another"
        )
        rest = answer_tokens + env.text.count("")
        limit = prompt_limit(env, self.max_prompt_tokens, rest, says)
        if self.max_prompt_tokens is None:
            limit = min(limit or MOST_TOKENS, MOST_TOKENS)
        return Example(
            id=str(row["_id"]),
            group="longbench_v2",
            context=context if reasoning is None else context.replace("$COT$", reasoning),
            question=_filled(tail, row),
            references=(row["answer"],),
            max_new_tokens=answer_tokens,
            max_prompt_tokens=limit,
            data={
                key: row[key]
                for key in ("difficulty", "length", "domain")
                if row.get(key) is not None
            },
        )


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
