"""Prompts and scores of every task are those that are stored: what a change of structure must leave as they are.

`python -m tests.evals.test_stored_prompts` makes stored_prompts.json again, where a task's version was raised.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from evals.base import Task, TaskEnv
from evals.longbench import DATASETS, PRESETS
from harness.config import plugins
from harness.config.catalogue import entries
from tests.evals.counting import Chat, Words

HERE = Path(__file__).parent
FILE = HERE / "stored_prompts.json"
SCBENCH: dict[str, Any] = json.loads((HERE / "scbench_prompts.json").read_text(encoding="utf-8"))
NIAH = ["niah_single_3", "niah_multikey_1", "niah_multikey_3", "niah_multivalue", "niah_multiquery"]
RULER = ["niah_single_1", "niah_single_2", "niah_multikey_2", *NIAH, "vt", "cwe", "fwe", "qa_1", "qa_2"]
WORDS = [name for name in DATASETS if name not in PRESETS["chinese"] or name == "lsht"]  # need no jieba
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gsm8k", {"prompt": "lm_eval", "extraction": "strict"}),
    ("longbench", {"datasets": WORDS}),
    ("longbench", {"datasets": ["qasper", "lcc"], "subset": "longbench_e", "code_sim": "difflib"}),
    ("niah", {"lengths": [300, 900], "rounds": 2}),
    ("niah", {"lengths": [400], "needle": "passkey", "prefix": "The {topic} is", "system": "Be short."}),
    ("niah_pqcache", {"lengths": [600], "depths": 3}),
    ("niah_shadowkv", {"lengths": [700], "depths": [0, 44, 100]}),
    ("multiturn", {"conversations": 4, "longest": 1500}),
    ("overflow", {"conversations": 3, "window": 700, "facts": 300}),
    ("ruler", {"lengths": [600, 1100, 4096], "samples": 2, "tasks": RULER}),
    ("ruler", {"lengths": [900, 2048], "samples": 2, "questions": 3, "tasks": NIAH[1:]}),
    ("ruler", {"lengths": [2048], "samples": 2, "questions": 2, "conversation": True, "tasks": NIAH[1:]}),
    ("ruler", {"lengths": [600, 700], "samples": 1}),
    ("scbench", {"tasks": "all"}),
    ("scbench", {"tasks": "all", "mode": "multi_request"}),
    ("wikitext2", {"window": 200, "scored": 50}),
    ("wikitext2", {"window": 200, "scored": 50, "stride": 70, "samples": 5}),
    ("multiturn", {"conversations": 3, "turns": 4, "replies": "given", "longest": 2500}),
    ("multiturn", {"conversations": 2, "turns": 3, "replies": "forced", "longest": 2500}),
    ("multiturn", {"conversations": 2, "turns": 6, "about": "first"}),
    *(
        ("multiturn", {"source": "talks.json", "conversations": 1, "replies": who})
        for who in ("own", "given", "forced")
    ),
    ("multiturn", {"source": "talks.json", "conversations": 1, "longest": 70, "max_new_tokens": 3}),
    ("multiturn", {"source": "talks.jsonl", "conversations": 2}),
    ("multiturn", {"source": "talks.jsonl", "conversations": 1, "turns": 2}),
    ("overflow", {"conversations": 1, "window": 5000, "questions": 5}),
]
LATER = ("apart", "earlier", "long_question", "halves_apart")  # fields that came after the prompts were stored
OUTPUTS = [
    "", "The answer is 18.\nQ: 5?", "#### 1,234", "It is 1234567 and 12345", "in paris\nLondon", "Paragraph 3 段落3",
    "b (B) A", "Eat a sandwich in the park.", "City, Date", "x = y + 1", "张三",
    "\x00\x1f -1e999 NaN", "7" * 5000, "(" * 900 + "\\", "`//\n#", "The cat sat. A dog ran", "0.5",
]  # fmt: skip


def write(root: Path) -> None:
    """Write data of every task, the same on every machine."""
    draw = Random(5)
    words = ["the", "a", "cat", "river", "green", "went", "home", "early", "Paris", "seven"]

    def text(count: int) -> str:
        return " ".join(
            "".join((word, draw.choice(["", "", "", ".", "?", ","]))) for word in draw.choices(words, k=count)
        )

    def put(name: str, *rows: Any, whole: bool = False) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (root / name).write_text(lines[0] if whole else "\n".join(lines), encoding="utf-8")

    said = ["Hello", "Who is Ada?", "A mathematician of her century.", "And Bo?", "Nobody knows.", "Bye"]
    turns = [{"from": ("gpt", "human")[number % 2], "value": value} for number, value in enumerate(said)]
    talks = {"none": turns[:1], "two": turns[1:]}
    put("talks.json", [{"id": name, "conversations": talk} for name, talk in talks.items()], whole=True)
    put("talks.jsonl", *({"question_id": n, "turns": said[n:]} for n in (4, 5)))
    put("PaulGrahamEssays.json", {"text": text(9000)}, whole=True)
    put("gsm8k/test.jsonl", *({"question": text(9), "answer": f"<<1>>\n#### {n}"} for n in ("18", "1,234", "-7")))
    for name in WORDS:
        answers = ["Paragraph 3 段落3"] if "retrieval" in name else ["City", "3"]
        row = {"context": text(90), "input": text(5), "answers": answers, "all_classes": ["City", "Date", "Cit"]}
        put(f"longbench/{name}.jsonl", row, row | {"context": text(900)})
        put(f"longbench/{name}_e.jsonl", row | {"length": 3999}, row | {"length": 8000, "_id": 5})
    for name, known in SCBENCH.items():
        put(f"scbench/{name}.jsonl", known["row"])
    paragraphs = [
        {
            "context": text(30 + n),
            "qas": [{"question": text(5), "is_impossible": n % 3 == 0, "answers": [{"text": "cat"}]}],
        }
        for n in range(40)
    ]
    put("squad.json", {"data": [{"paragraphs": paragraphs[i : i + 8]} for i in range(0, 40, 8)]}, whole=True)
    facts = [[f"Title {t}", [text(9), text(9)]] for t in range(10)]
    hotpot = [{"question": text(6), "answer": "Paris", "context": facts, "supporting_facts": [["Title 2", 0]]}] * 3
    put("hotpotqa.json", hotpot, whole=True)
    (root / "wikitext-2-raw").mkdir()
    (root / "wikitext-2-raw" / "wiki.test.raw").write_text(text(900))


def digests(root: Path, name: str, changes: dict[str, Any]) -> dict[str, str]:
    """Return a hash of a task's first examples, and one of what they score for OUTPUTS and for the right answers."""
    entry = entries("task")[name]
    values = {key: value for key, value, _ in entry.parameters()}
    task: Task = plugins.build({"_target_": entry.target} | values | changes, "task")
    env = TaskEnv(text=Chat() if "turns" in changes else Words(), seed=42, data_root=root, window=6000)
    prompts, scores = hashlib.sha256(), hashlib.sha256()
    groups, details = dict[str, list[float]](), dict[str, list[float]]()
    for example in islice(task.examples(env), 90):
        fields = {name: value for name, value in asdict(example).items() if name not in LATER or value}
        prompts.update(json.dumps(fields, sort_keys=True).encode())
        for turn in example.turns:
            for output in ["0.5", "2"] if turn.teacher_forced else [*OUTPUTS, *turn.references]:
                score = task.score(turn, output)
                scores.update(repr((score.value, sorted(score.details.items()))).encode())
                groups.setdefault(example.group, []).append(score.value)
                for detail, value in score.details.items():
                    details.setdefault(detail, []).extend([value] if isinstance(value, float) else [])
    means = [{key: fmean(values) for key, values in kept.items() if values} for kept in (groups, details)]
    scores.update(repr(sorted(task.averages(*means).items())).encode())
    return {"prompts": prompts.hexdigest()[:16], "scores": scores.hexdigest()[:16]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write(folder)
    return folder


@pytest.mark.parametrize(
    ("number", "case"), enumerate(CASES), ids=lambda value: value[0] if isinstance(value, tuple) else None
)
def test_prompts_and_scores_are_those_stored(root: Path, number: int, case: tuple[str, dict[str, Any]]) -> None:
    assert digests(root, *case) == json.loads(FILE.read_text())[number], case


def main() -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder))
        FILE.write_text(json.dumps([digests(Path(folder), *case) for case in CASES], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
