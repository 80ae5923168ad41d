"""Asks competition mathematics, whose answers are long: MATH-500 (arXiv:2305.20050) and the AIME of 2024 to
2026. The final answer is judged by math-verify, which compares values, not texts.

Some verdicts are math-verify's own. It leaves out the base of a number, so that 4210_6 is 4210_5, and what differs only
after six decimals, so that 2^-98 is 2^-99. It takes "million" for a unit, does not read `5{:}30`, `1 234`, `\\pmod`,
`\\approx` and other scripts, and without a box only numbers and formulas after English words.

R-KV's released run_math.py asks without a chat template (`task.prompt=rkv chat=none`), later versions with it where
--use_chat_template says so, and weighs attention by 0.1; the default of its class is 0.07."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from evals.base import Example, Score, Task, TaskEnv, TaskError, each_once
from evals.data import Source, open_rows, require

FIELDS = {"problem": "text that is not blank", "answer": "text that is not blank or a whole number"}
PROMPTS = {
    # as the model cards of DeepSeek-R1 and Qwen3 ask for it
    "boxed": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    # of R-KV's released script, HuggingFace/run_math.py of github.com/Zefan-Cai/R-KV
    "rkv": "You are given a math problem.\n\nProblem: {problem}\n\n You need to solve the problem step by step. "
    "First, you need to provide the chain-of-thought, then provide the final answer.\n\n Provide the final answer in "
    "the format: Final answer:  \\boxed{}",
}

BOX = re.compile(r"\\(boxed|fbox|bo?x?e?\Z)(?![A-Za-z])\s*")  # also one that is cut in its name
# also what is none: \{, and the line break before a brace in \\{
BRACE = re.compile(r"\\[\\{}]|[{}]")
BARE = re.compile(r"[^$\n]*?(?=\$|\\[)\]])|\S*")  # the rest of a formula, or a word
IDLE = re.compile(r"\\?[%°]|(?<=\d)\\,(?=\d{3})|(?<!\\right)\\?[.,;。]\s*$")  # as in 10\,000\%.
# Markdown's
EMPHASIS = re.compile(r"(?<![^\s(:=])[*_`]+(?=\S)|(?<=[^\s^*_`])[*_`]+(?![^\s.,:;!?)])")
NOT = r"(?:\b(?:(?:can)?not|neither|nor|no longer)|n['’]t)\s+(?:be\s+|equal\s+(?:to\s+)?)?"
NUMBER = r"(?:\$[^$]{1,99}\$|\\\(.{1,99}?\\\)|-?\d\S*)"
DENIED = re.compile(rf"{NOT}{NUMBER}(?:\s+n?or\s+{NUMBER})*")  # also "not 72 or 74"


class ProblemSet(NamedTuple):
    """Hold where a set of problems lies on the hub, and how many tokens an answer may have, with the thought
    before it: those that R-KV's released script gives to prompt and answer together."""

    repo: str
    file: str
    revision: str
    max_new_tokens: int


SETS = {
    "math500": ProblemSet(
        "HuggingFaceH4/MATH-500", "test.jsonl", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", 16384
    ),
    "aime24": ProblemSet(
        "HuggingFaceH4/aime_2024",
        "data/train-00000-of-00001.parquet",
        "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        32768,
    ),
    "aime25": ProblemSet(
        "math-ai/aime25", "test.jsonl", "563bb8404243c5f09de6ec262f2db674fe5bce9b", 32768
    ),
    "aime26": ProblemSet(
        "math-ai/aime26", "aime2026.jsonl", "79037aebdb6580008fb960d17cb21fd3099083e3", 32768
    ),
}


@dataclass(frozen=True)
class Mathematics(Task):
    """Ask the problems of one or several sets (SETS), each with the words of `prompt` around it. An answer is
    right if its last box holds the value of the set's answer (`judge`)."""

    version = "2"
    seeded = False
    metric = "accuracy"
    averaged = ("boxed_share",)

    sets: str | Sequence[str] = "math500"
    prompt: str = "boxed"
    samples: int | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in self.names():
            if name not in SETS:
                raise TaskError(f"task.sets={name} is unknown: choose from {', '.join(SETS)}")
        if not self.names():
            raise TaskError(f"task.sets is empty: choose from {', '.join(SETS)}")
        if self.prompt not in PROMPTS:
            raise TaskError(
                f"task.prompt={self.prompt} is unknown: choose one of {', '.join(PROMPTS)}"
            )
        says = "leaves nothing: give {} or more, or null"
        self._refuse_below(says, samples=1, max_new_tokens=1)

    def names(self) -> tuple[str, ...]:
        """Return the names of the chosen sets, each once."""
        return each_once(self.sets)

    def require(self, data_root: Path | None) -> None:
        _require_math_verify()
        require(map(_source, self.names()), data_root)

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for name in self.names():
            opened = open_rows(_source(name), env, FIELDS)
            self._opened[name] = opened.provenance
            for index, row in enumerate(opened.rows[: self.samples]):
                yield Example(
                    id=f"{name}-{index}",
                    group=name,
                    context=PROMPTS[self.prompt].replace("{problem}", row["problem"]),
                    references=(str(row["answer"]),),
                    max_new_tokens=self.max_new_tokens or SETS[name].max_new_tokens,
                    data={
                        key: row[key] for key in ("subject", "level") if row.get(key) is not None
                    },
                )

    def score(self, example: Example, output: str) -> Score:
        right, answer = judge(example.references[0], output)
        return Score(
            float(right), {"boxed_share": float(last_box(output) is not None), "answer": answer}
        )

    def provenance(self) -> dict[str, Any]:
        judge = {"math_verify": version("math-verify")} if has_math_verify() else {}
        return super().provenance() | judge


def judge(right: str, output: str) -> tuple[bool, str]:
    """Return whether an output gives the answer `right`, and the text that was taken for its answer.

    The answer is what the last `\\boxed{}` holds, and there is none if that is cut off. Without a box it is what
    follows words such as "the answer is", unless "not" stands before it; another number at the end of an output that
    was cut off is no answer. Values are compared by math-verify, with intervals and the inequalities that say the same
    taken as equal; percent and degree signs are left out on both sides, as MATH's own grader does. math-verify ends a
    comparison that takes too long by an alarm, which only a main thread hears: in any other thread a process of its
    own judges, about two seconds for each answer."""
    _require_math_verify()
    if threading.current_thread() is not threading.main_thread():
        code = "import json, sys; from evals.mathematics import judge; print(json.dumps(judge(*json.load(sys.stdin))))"
        asked, paths = json.dumps([right, output]), {"PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", code]
        told = subprocess.check_output(words, input=asked, env=os.environ | paths, text=True)
        is_right, answer = json.loads(told)
        return is_right, answer
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # a comparison that takes too long is no message
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    in_words = (
        LatexExtractionConfig(try_extract_without_anchor=False),
        ExprExtractionConfig(False),
    )
    box, latex = last_box(output), (LatexExtractionConfig(),)
    wanted, given = parse(_boxed(right), latex), parse(_boxed(box or ""), latex)
    if not BOX.search(output):
        said = DENIED.sub("", EMPHASIS.sub("", output))
        given = parse(said, in_words)
    answer = (
        box
        if box is not None
        else next((part for part in reversed(given) if isinstance(part, str)), "")
    )
    return bool(verify(wanted, given, allow_set_relation_comp=True)), answer


def last_box(output: str) -> str | None:
    """Return what the last `\\boxed` of an output holds, or, if there is none, its last `\\fbox`; None without a
    box, and if the last one does not close. A box without braces holds the rest of its formula, or a word.

    >>> last_box(r"\\boxed{4}, no: $\\boxed{\\frac{1}{2}}$")
    '\\\\frac{1}{2}'
    """
    boxes = [*BOX.finditer(output)]
    last = [box for box in boxes if box[1] != "fbox"] or boxes
    if not last:
        return None
    held, depth = output[last[-1].end() :], 0
    if not held.startswith("{"):
        return next(BARE.finditer(held))[0] or None
    for brace in BRACE.finditer(held):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return held[1 : brace.start()]
    return None


def _boxed(answer: str) -> str:
    return "\\boxed{" + IDLE.sub("", answer) + "}"


def has_math_verify() -> bool:
    """Return True if math-verify, which judges answers, is installed."""
    return importlib.util.find_spec("math_verify") is not None


def _require_math_verify() -> None:
    """Raise `TaskError`, which says how to install it, if math-verify is missing."""
    if not has_math_verify():
        raise TaskError(
            "task=math judges answers with math-verify, which is missing: pip install 'kv-harness[math]'"
        )


def _source(name: str) -> Source:
    repo, file, revision, _ = SETS[name]
    folder = repo.rpartition("/")[2]
    return Source(
        name=f"math/{name}",
        local=(f"{folder}/{file}", f"math/{name}.jsonl", f"math/{name}.parquet"),
        hub_repo=repo,
        hub_file=file,
        hub_revision=revision,
    )
