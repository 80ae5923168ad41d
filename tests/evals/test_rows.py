"""Rows of one's own: every kind of file gives the same examples, and each wrong row is named."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evals.base import Example, Score, TaskEnv, TaskError
from evals.rows import Rows
from harness.models.random import byte_tokenizer
from harness.prompts.prompt import Tools, render

LONG = 'She said "hi",\nand left. ' * 6000  # more than a cell of csv may have at first
ROWS: list[dict[str, Any]] = [
    {"doc": LONG, "query": "Who?", "gold": ["Ada Lind", "Lind"], "kind": "name"},
    {"doc": LONG, "query": "When {context}?", "gold": "1987", "kind": "year"},
    {"doc": "Grüße, 日本!", "query": "Wo?", "gold": "Kyoto", "kind": "name"},
]
NAMES = {"context": "doc", "question": "query", "answers": "gold"}


def write(file: Path, rows: list[Any]) -> str:
    if file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows), encoding="utf-8")
    elif file.suffix == ".parquet":
        gold = [row["gold"] if isinstance(row["gold"], list) else [row["gold"]] for row in rows]
        pq.write_table(pa.Table.from_pylist([row | {"gold": one} for row, one in zip(rows, gold, strict=True)]), file)
    else:
        with open(file, "w", newline="", encoding="utf-8-sig") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            lists = {name for row in rows for name, value in row.items() if isinstance(value, list)}
            for row in rows:
                cells = {n: json.dumps(v) if n in lists and not isinstance(v, str) else v for n, v in row.items()}
                writer.writerow(cells)
    return str(file)


def examples(source: str, **changes: Any) -> list[Example]:
    return list(Rows(source, **changes).examples(TaskEnv(text=Tools(byte_tokenizer(), "template"), seed=0)))


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_examples(tmp_path: Path, suffix: str) -> None:
    source = write(tmp_path / f"mine.{suffix}", ROWS)
    first, second, third = examples(
        source, **NAMES, group="kind", template=r"Read \box{a}:\n{context}\nQ: {question} A:"
    )
    assert (first.id, first.group, first.references) == ("mine-1", "name", ("Ada Lind", "Lind"))
    assert (first.context, first.question) == (f"Read \\box{{a}}:\n{LONG}", "\nQ: Who? A:")
    assert (second.question, second.references, second.group) == ("\nQ: When {context}? A:", ("1987",), "year")
    assert (third.context, third.id) == ("Read \\box{a}:\nGrüße, 日本!", "mine-3")
    assert [example.unit for example in (first, second, third)] == ["mine-1", "mine-1", "mine-3"]
    (whole,) = examples(source, **NAMES, template="{question}?", samples=1)
    assert (whole.context, whole.question, whole.group) == ("Who??", "", "mine")


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_the_last_user_turn_of_a_chat_is_the_question(tmp_path: Path, suffix: str) -> None:
    said = [("system", "Be brief."), ("user", "I am Bo."), ("assistant", "Hello."), ("user", "Who am I?")]
    talk = [{"role": role, "content": content} for role, content in said]
    rows = [{"messages": talk, "answers": "Bo"}, {"messages": talk[1:2], "answers": "hi"}]
    first, second = examples(write(tmp_path / f"chats.{suffix}", rows))
    tokenizer = byte_tokenizer()
    prompt = render(first, tokenizer, chat="template")
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert prompt.ids == tuple(tokenizer(text)["input_ids"])
    assert tokenizer.decode(prompt.ids[prompt.split :]).startswith("Who am I?")
    assert (first.references, second.question, second.unit) == (("Bo",), "I am Bo.", None)
    replied = [*talk, {"role": "assistant", "content": "Bo."}]
    (answered,) = examples(write(tmp_path / f"replies.{suffix}", [{"messages": replied}]))
    assert (answered.question, answered.references) == ("Who am I?", ("Bo.",))


@pytest.mark.parametrize(
    ("scorer", "answers", "scores"),
    [
        ("exact", ["3.5", "4"], {" 3.5\n": 1.0, "35": 0.0, "The 4": 0.0}),
        ("contains", ["Ada Lind"], {"it is ada lind.": 1.0, "Ada": 0.0}),
        ("f1", ["New York City", "the city"], {"City": 1.0, "a New-York City": pytest.approx(2 / 3)}),
        ("rouge", ["the cat sat", "no"], {"The cat sat": pytest.approx(2 / 3)}),
        ("choice", ["C", "Paris"], {"C) Rome": 1.0, "The answer is Paris": 1.0, "Rome": 0.0, "Paris": 1.0, "B": 0.0}),
        ("tests.evals.test_rows:halved", ["x"], {"x": 0.5, "y": 0.0}),
    ],
)
def test_scorers_are_named(tmp_path: Path, scorer: str, answers: list[str], scores: dict[str, Any]) -> None:
    source = write(tmp_path / "mine.jsonl", [{"context": "c", "question": "?", "answers": answers}])
    task, (example,) = Rows(source, scorer=scorer), examples(source, scorer=scorer)
    assert {output: task.score(example, output) for output in scores} == {o: Score(v) for o, v in scores.items()}


def halved(output: str, answers: tuple[str, ...]) -> float:
    return (output in answers) / (2 if output != "wrong" else 0.1)


def test_a_scorer_of_ones_own_gives_a_number_from_0_to_1(tmp_path: Path) -> None:
    scorer = "tests.evals.test_rows:halved"
    source = write(tmp_path / "mine.jsonl", [{"context": "c", "question": "?", "answers": "wrong"}])
    (example,) = examples(source, scorer=scorer)
    with pytest.raises(TaskError, match=r"gave 10\.0 for mine-1"):
        Rows(source, scorer=scorer).score(example, "wrong")
    with pytest.raises(TaskError, match=r"ended with TypeError.* for mine-1: correct it, and rescore the run"):
        Rows(source, scorer="builtins:divmod").score(example, "text")
    for function, says in (("nowhere", "cannot be imported"), ("__name__", "is no function")):
        with pytest.raises(TaskError, match=says):
            Rows(source, scorer=f"tests.evals.test_rows:{function}").require(None)


def test_all_wrong_rows_are_named_before_the_first_is_asked(tmp_path: Path) -> None:
    good = {"context": "c", "question": "q", "answers": "a", "kind": 3}
    wrong: list[dict[str, Any]] = [
        {"context": ""}, {"question": " "}, {"answers": [" "]}, {"answers": 1.5}, {"kind": None}
    ]  # fmt: skip
    source = write(tmp_path / "mine.jsonl", [good, *(good | change for change in wrong)])
    says = (
        r"mine\.jsonl: row 2 has \"\" as 'context', .* blank; row 3 .*'question'.*; row 4 has \" \" as 'answers\[0\]'"
    )
    with pytest.raises(TaskError, match=rf"{says}.*; 2 more rows are wrong: correct"):
        examples(source, samples=1, group="kind")
    source = write(tmp_path / "mine.jsonl", [{"context": "c", "Why?": None, "answers": "a"}])
    with pytest.raises(TaskError, match=r"row 1 has null as 'Why\?'"):
        examples(source, question="Why?")
    talks: list[list[dict[str, str]]] = [
        [{"role": "user", "content": "?"}] * 2, [{"role": "system", "content": "?"}], [], [{"role": "user"}]
    ]  # fmt: skip
    for talk in talks:
        source = write(tmp_path / "mine.jsonl", [{"messages": talk, "answers": "a"}])
        with pytest.raises(TaskError, match=r"row 1 (has|lacks) .*messages"):
            examples(source)


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        (
            '{"context": "c", "question": "q"}',
            {},
            "task.answers=answers is no column of .*: choose one of context",
        ),
        ('{"context": "c", "question": "q", "answers": "a"}', {"group": "kind"}, "task.group=kind is no column"),
        ('{"context": "c", "question": "q", "answers": "a"}', {"scorer": "choice"}, "row 1 has no letter A to D"),
        (
            '{"context": "c"}\n{"question\n' + "x\n" * 4,
            {},
            r"line 2, line 3, line 4 and 2 more: no JSON\): correct the",
        ),
        ('{"context": "c", "question": "q", "answers": null}', {}, "null as 'answers', .* text .* or a list of texts"),
        ('{"context": "\udce9t\udce9"}', {}, "is not UTF-8 .*: save it as UTF-8"),
        ("", {}, "holds no rows: correct"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, changes: dict[str, Any], says: str) -> None:
    (tmp_path / "mine.jsonl").write_text(text, errors="surrogateescape")
    with pytest.raises(TaskError, match=says):
        examples(str(tmp_path / "mine.jsonl"), **changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b,a\n1,2,3\n", "two columns"),
        ("a,b\n1,2\n1\n", "row 2 has not"),
        ('a,b\n1,2\n1,"2\n', "row 2: unexpected end"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(TaskError, match=says):
        examples(str(tmp_path / "mine.csv"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "mine.txt"}, r"should end in one of \.jsonl"),
        ({"source": "nowhere.jsonl"}, "is not there"),
        ({"scorer": "bleu"}, "choose one of exact, contains"),
        ({"template": "{question} {context}"}, "{context} only before it"),
        ({"template": "{context}"}, "must hold {question}"),
        ({"template": "{ctx} {question}"}, "holds {ctx}, which no text replaces: write {context} and {question}"),
        ({"template": "{context} {context} {question}"}, "{context} only before it and once"),
        ({"samples": 0}, "give 1 or more"),
    ],
)
def test_a_wrong_parameter_is_refused_before_a_model_loads(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        Rows(**{"source": "mine.jsonl"} | changes).require(None)


def test_any_byte_of_the_file_is_part_of_the_version(tmp_path: Path) -> None:
    row = {"context": "c", "question": "q", "answers": "a", "note": "x"}
    source = write(tmp_path / "mine.jsonl", [row])
    task, before = Rows(source), Rows(source).version
    list(task.examples(TaskEnv(text=Tools(byte_tokenizer(), "template"), seed=0)))
    write(tmp_path / "mine.jsonl", [row | {"note": "y"}])
    assert task.version == before != Rows(source).version  # of what was asked
    assert task.provenance() == {"origin": f"local:{source}", "sha256": before[-64:], "rows": 1}


def test_the_rows_that_docs_print_can_be_asked(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    (tmp_path / "mine.jsonl").write_text("\n".join(re.findall('^{"context": .*', page, re.M)))
    first, second = examples(str(tmp_path / "mine.jsonl"))
    assert (first.references, second.references, second.unit) == (("Ada Lind", "Lind"), ("1987",), first.id)
