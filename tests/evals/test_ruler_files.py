"""RULER files of the official scripts: both layouts, three ways to lie in a folder, and what is said of bad ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evals.base import Example, TaskEnv, TaskError
from evals.ruler import Ruler
from evals.ruler.templates import TEMPLATES
from tests.evals.counting import CountedText

NIAH = {
    "index": 9,
    "input": "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the number afterwards.\nOne of the special magic numbers for old-fan is: 1234567.\nWhat is the "
    "special magic number for old-fan mentioned in the provided text?",
    "outputs": ["1234567"],
    "length": 190,
    "answer_prefix": " The special magic number for old-fan mentioned in the provided text is",
}


def write(path: Path, *records: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(source: Path, tasks: list[str], length: int = 4096, samples: int = 1) -> list[Example]:
    ruler = Ruler(tasks=tasks, lengths=[length], samples=samples, haystack="auto", source=str(source))
    return list(ruler.examples(TaskEnv(text=CountedText(), seed=1)))


@pytest.mark.parametrize(
    "place",
    [
        "4096/niah_single_1/validation.jsonl",
        "4096/niah_single_1.jsonl",
        "niah_single_1/validation.jsonl",
        "niah_single_1.jsonl",
    ],
)
def test_current_layout(tmp_path: Path, place: str) -> None:
    write(tmp_path / place, NIAH, {**NIAH, "outputs": ["7654321"]})
    first, second = read(tmp_path, ["niah_single_1"], samples=2)
    assert first.id == "niah_single_1/4096/0"
    assert first.group == second.group == "niah_single_1/4096"
    assert first.context + first.question == NIAH["input"]
    assert first.question.startswith("\nWhat is the special")
    assert first.prefix == NIAH["answer_prefix"]
    assert first.references == ("1234567",)
    assert first.max_new_tokens == 128
    assert str(first.data["generator"]).startswith("official file ")
    assert second.references == ("7654321",)


def test_older_layout_gives_the_prefix_back(tmp_path: Path) -> None:
    worked = TEMPLATES["vt"].fill("VAR ABC = 12345", (), query="12345", num_v="5").text
    tracked = TEMPLATES["vt"].fill("VAR Q = 5", (), before=f" {worked} ABC\n\n\n\n", query="5", num_v="5")
    asked = TEMPLATES["qa"].fill("Document 1:\nx Answer: y", (), query="why?")
    for task, user, prefix in (
        ("niah_single_1", NIAH["input"], NIAH["answer_prefix"]),
        ("vt", *(part.replace("variables are assigned", "variables are assgined") for part in
                 (tracked.user, tracked.prefix))),
        ("qa_1", asked.user, " Answer:"),
    ):  # fmt: skip
        write(tmp_path / "4096" / f"{task}.jsonl", {"input": user + prefix, "outputs": ["x"]})
        (found,) = read(tmp_path, [task])
        assert (found.context + found.question, found.prefix) == (user, prefix)
        assert found.question.startswith(("\nWhat is the", "\nQuestion: Find", "\n\nAnswer the question"))
        assert found.question.count("Question: Find") == (task == "vt")  # the worked example is context


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (json.dumps(NIAH)[:-30], "cut short"),
        (json.dumps({"input": NIAH["input"], "outputs": ["1"]}), "does not end with the answer prefix"),
        (json.dumps({**NIAH, "input": f"[INST] {NIAH['input']} [/INST]"}), "chat template"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "4096" / "niah_single_1.jsonl", NIAH)
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(TaskError, match=rf"niah_single_1\.jsonl, line 3:? .*{message}"):
        read(tmp_path, ["niah_single_1"], samples=2)


def test_shared_files_of_both_layouts(shared_data: Path, tmp_path: Path) -> None:
    tasks = ["niah_single_1", "niah_multikey_1", "niah_multivalue", "niah_multiquery"]
    examples = read(shared_data / "ruler" / "official_layout", tasks, length=1024, samples=5)
    assert len(examples) == 20
    assert all(example.references[0] in example.context for example in examples)
    write(tmp_path / "niah_multikey_3.jsonl").write_bytes(
        (shared_data / "ruler" / "niah_multikey_3_4096_head50.jsonl").read_bytes()
    )
    old = read(tmp_path, ["niah_multikey_3"], samples=50)
    assert len(old) == 50
    assert all(example.prefix.endswith(" mentioned in the provided text is") for example in old)
    assert all(example.question.endswith("provided text?") for example in old)
