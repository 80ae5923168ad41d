"""Lists SCBench's tasks as published. Their prompts are in a JSON file in the same folder, word for
word."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from evals.data import Shape
from evals.scbench.scoring import OPTIONS

HUB_REPO = "microsoft/SCBench"
MAX_NEW_TOKENS = {
    "scbench_kv": 150,
    "scbench_prefix_suffix": 150,
    "scbench_vt": 30,
    "scbench_qa_eng": 40,
    "scbench_choice_eng": 40,
    "scbench_many_shot": 10,
    "scbench_mf": 5,
    "scbench_summary": 200,
    "scbench_qa_chn": 40,
}
ABSENT = {
    "scbench_repoqa": "is scored with tree-sitter's parsers",
    "scbench_repoqa_and_kv": "is scored with tree-sitter's parsers",
    "scbench_summary_with_needles": "mixes two scores",
}
PRESETS = {
    "english": tuple(name for name in MAX_NEW_TOKENS if name != "scbench_qa_chn"),
    "all": tuple(MAX_NEW_TOKENS),
}
SKILLS = {  # of the paper's four skills, those whose tasks are all here
    "string_retrieval": ("scbench_kv", "scbench_prefix_suffix", "scbench_vt"),
    "global_information": ("scbench_many_shot", "scbench_mf", "scbench_summary"),
}
OPENING = {"scbench_summary": "This paper"}  # begins answers after the first, in a chat template


class Prompts(NamedTuple):
    """Hold the prompt templates of one of SCBench's tasks: `first` opens a conversation; `context`
    is what several requests share; `later` is a request on it, or a later turn; `later_plain` is a
    later turn without a chat template."""

    first: str
    context: str
    later: str
    later_plain: str


PROMPTS = {
    name: Prompts(**{"later_plain": said["later"], **said})
    for name, said in json.loads(
        Path(__file__).with_name("prompts.json").read_text(encoding="utf-8")
    ).items()
}


ANSWERS = {
    "scbench_vt": ["text", ...],
    "scbench_mf": "a number or a list of numbers",
    **dict.fromkeys(
        ("scbench_qa_eng", "scbench_qa_chn", "scbench_many_shot"), "text or a list of texts"
    ),
}


def shape(name: str) -> Shape:
    """Return the fields that each row of task `name` must have, as a shape
    (`evals.data.misfit`)."""
    options = {"options": ("text",) * len(OPTIONS)} if name == "scbench_choice_eng" else {}
    turn = {"input": "text", "answer": ANSWERS.get(name, "text"), **options}
    context = "text or a list of numbers" if name == "scbench_mf" else "text"
    return {"context": context, "multi_turns": [turn, ...]}


def fields(name: str, row: Mapping[str, Any], turn: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that fill the braces of a task's templates for one question, `turn`, of a
    row. Raises ValueError if a right answer is not among the options, or the question of a
    math_find input cannot be recognised."""
    known = {"context": str(row["context"]), "input": turn["input"]}
    if name == "scbench_choice_eng":
        known |= zip(OPTIONS, turn["options"], strict=True)
        known["letter"] = OPTIONS[turn["options"].index(turn["answer"])]
    if name == "scbench_mf":
        known |= {"asked": _asked(turn["input"]), "first_input": row["multi_turns"][0]["input"]}
    return known


def _asked(text: str) -> str:
    """Return the question that SCBench puts before the input of its task math_find, made of the
    input's last sentence.

    >>> _asked("Answer with one number. The 2nd largest number is:")
    'What is the 2nd largest number?'
    """
    found = re.findall(r"The .+ is", text)
    if not found:
        raise ValueError(f"{text!r} does not end in 'The ... is'")
    return f"What is {found[0].lower()[:-3]}?"
