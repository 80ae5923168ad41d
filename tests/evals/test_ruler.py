"""RULER as a task: examples, protocol, cache, scores, and what is refused."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest

from evals import hub
from evals.base import Example, TaskEnv, TaskError
from evals.ruler import Ruler, qa, scoring
from evals.ruler.bench import CountedText
from evals.ruler.templates import FAMILIES, TEMPLATES


def ruler(**changes: Any) -> Ruler:
    fields = {"tasks": ["niah_single_2", "vt"], "lengths": [600], "samples": 2, "haystack": "auto", "source": None}
    return Ruler(**{**fields, **changes})


def env(text: CountedText | None = None, **changes: Any) -> TaskEnv:
    return TaskEnv(**{"text": text or CountedText(), "seed": 42, **changes})


def example(task: str, *references: str) -> Example:
    return Example(id="", group="", context="", references=references, max_new_tokens=1, data={"task": task})


def test_examples_come_by_length_task_and_sample() -> None:
    ids = [example.id for example in ruler(lengths=[600, 1024]).examples(env())]
    assert ids == [f"{t}/{n}/{i}" for n in (600, 1024) for t in ("niah_single_2", "vt") for i in (0, 1)]


def test_an_example_is_split_where_the_context_ends() -> None:
    task = ruler(tasks=["niah_single_2", "niah_multiquery", "vt", "cwe", "fwe"], lengths=[1024], samples=1)
    for found in task.examples(env()):
        template = TEMPLATES[FAMILIES[found.data["task"]]]
        assert found.context.lstrip().startswith((template.head[:12], "A special"))
        assert found.question.startswith("\nWhat " if "niah" in found.id else "\nQuestion: ")
        assert found.prefix.startswith((" The special magic", " Answer: "))
        assert len((found.context + found.question + found.prefix).split()) + found.max_new_tokens <= 1024
        assert found.data["length"] == 1024


def test_wording_follows_the_number_of_answers_and_leaves_the_context_alone() -> None:
    single, several = ruler(tasks=["niah_single_2", "niah_multivalue"], lengths=[2000], samples=1).examples(env())
    assert single.context.startswith("A special magic number is hidden")
    assert single.question.startswith("\nWhat is the special magic number for")
    assert single.prefix.endswith("text is")
    assert several.context.startswith("Some special magic numbers are hidden")
    assert several.prefix.endswith("text are")
    assert " are " in single.context


def test_generators_and_haystacks_are_stamped() -> None:
    task = ruler(tasks=["niah_single_1", "niah_single_2", "cwe"], lengths=[1000, 1024], samples=1)
    stamps = {found.group: (found.data["generator"], found.data["haystack"]) for found in task.examples(env())}
    assert stamps == {
        "niah_single_1/1000": ("fine-1", "noise"),
        "niah_single_2/1000": ("fine-1", "pydoc"),
        "cwe/1000": ("fine-1", "words"),
        "niah_single_1/1024": ("official", "noise"),
        "niah_single_2/1024": ("official", "pydoc"),
        "cwe/1024": ("official", "words"),
    }
    record = task.provenance()
    assert set(record["sha256"]) == set(stamps)
    assert record["haystack"] == "pydoc"
    assert "splitter" in record


def test_cached_prompts_need_no_tokenizer(tmp_path: Path) -> None:
    task = ruler(lengths=[600, 5000])
    made = list(task.examples(env(cache_dir=tmp_path)))
    text = CountedText()
    assert list(ruler(lengths=[600, 5000]).examples(env(text, cache_dir=tmp_path))) == made
    assert text.calls == 0


@pytest.mark.parametrize("change", [{"seed": 43}, {"fingerprint": "other"}, {"samples": 3}, {"essay": "Other. Text."}])
def test_what_shapes_prompts_is_not_taken_from_the_cache(tmp_path: Path, change: dict[str, Any]) -> None:
    root = tmp_path / "data"
    root.mkdir()
    essays = root / "PaulGrahamEssays.json"
    essays.write_text(json.dumps({"text": "Some words. " * 50}))
    list(ruler().examples(env(cache_dir=tmp_path, data_root=root)))
    text = CountedText()
    text.fingerprint = change.get("fingerprint", text.fingerprint)
    essays.write_text(json.dumps({"text": change.get("essay", "Some words. " * 50)}))
    changed = env(text, cache_dir=tmp_path, data_root=root, seed=change.get("seed", 42))
    list(ruler(samples=change.get("samples", 2)).examples(changed))
    assert text.calls > 0


def test_scores() -> None:
    task = ruler()
    assert task.score(example("niah_multivalue", "1234567", "7654321"), "It is 1234567").value == 0.5
    assert task.score(example("vt", "ABCDE"), "\x00abcde\x1f").value == 1
    assert task.score(example("qa_1", "Paris", "the city of Paris"), "in paris.").value == 1
    assert task.score(example("qa_2", "Paris"), "London").value == 0
    silent = task.score(example("cwe", "word"), " \n")
    assert (silent.value, silent.details["null"]) == (0, 1)


def test_needles_that_are_numbers_say_how_far_they_came() -> None:
    task = ruler()
    score = task.score(example("niah_multivalue", "1234567", "7654321"), "They are 1234999, 7 and 12345.")
    assert (score.value, score.details["leading_digits"]) == (0, (5 + 1) / 2)
    assert score.details["leading_digits_share"] == pytest.approx(3 / 7)
    assert task.score(example("niah_single_2", "1234567"), "It is 91234567.").details["leading_digits"] == 0
    for kind, reference in (("niah_single_3", "ab-12"), ("vt", "ABCDE"), ("qa_1", "1999")):
        assert "leading_digits" not in task.score(example(kind, reference), "1999").details
    averages = task.averages({"niah_single_2/1024": 0.0}, {"leading_digits": 3.0, "leading_digits_share": 3 / 7})
    assert averages["leading_digits_share"] == 3 / 7
    assert "leading_digits_share" not in task.averages({"vt/1024": 0.0}, {"null": 0.0})


def test_doctests() -> None:
    results = doctest.testmod(scoring)
    assert results.failed == 0
    assert results.attempted >= 6


def test_averages() -> None:
    groups = {"vt/4096": 1.0, "cwe/4096": 0.5, "vt/8192": 0.5, "cwe/8192": 0.0}
    averages = ruler().averages(groups)
    assert averages["mean"] == 0.5
    assert (averages["4096"], averages["8192"], averages["vt"], averages["cwe"]) == (0.75, 0.25, 0.75, 0.25)
    assert averages["weighted_rising"] == pytest.approx((0.75 + 2 * 0.25) / 3)
    assert averages["weighted_falling"] == pytest.approx((2 * 0.75 + 0.25) / 3)
    assert "effective_length" not in averages
    assert ruler().averages({"vt/4096": 1.0}) == {"mean": 1.0, "4096": 1.0, "vt": 1.0}
    assert ruler().averages({}) == {}
    full = {f"{task}/{length}": score for task in FAMILIES for length, score in ((4096, 0.9), (8192, 0.8))}
    assert ruler().averages(full)["effective_length"] == 4096


def test_published_weighted_averages_of_llama_3_1_8b() -> None:
    scores = dict(zip([4096 << i for i in range(6)], [95.5, 93.8, 91.6, 87.4, 84.7, 77.0], strict=True))
    assert scoring.weighted_averages(scores) == pytest.approx((85.4, 91.3), abs=0.05)
    assert scoring.effective_length(scores, 85.6) == 32768


def test_lengths_that_cannot_be_are_refused_before_anything_is_made() -> None:
    text = CountedText()
    with pytest.raises(TaskError, match="starts at 512"):
        ruler(lengths=[256]).examples(env(text))
    with pytest.raises(TaskError, match="the model takes 2048 tokens"):
        ruler(lengths=[1024, 4096]).examples(env(text, window=2048))
    with pytest.raises(TaskError, match=r"seed=-1"):
        ruler().examples(env(text, seed=-1))
    assert text.calls == 0


class Costly(CountedText):
    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        return 2 * super().count(user, prefix, system=system, chat=chat)


@pytest.mark.parametrize("task", ["vt", "cwe"])
def test_a_task_that_does_not_fit_names_a_length_that_works(task: str) -> None:
    with pytest.raises(TaskError, match=rf"^{task} does not fit 512 tokens \(from \d+ on") as caught:
        ruler(tasks=["niah_single_1", task], lengths=[512]).examples(env(Costly()))
    length = int(re.findall(r"\d+", str(caught.value))[1])
    assert len(list(ruler(tasks=[task], lengths=[length]).examples(env(Costly())))) == 2


def test_long_word_lists_need_the_official_file(tmp_path: Path) -> None:
    task = ruler(tasks=["cwe"], lengths=[131072], samples=1)
    with pytest.raises(
        TaskError, match=r"wonderwords has 8166: put RULER's english_words\.json .* lengths up to \d+$"
    ) as e:
        list(task.examples(env()))
    works = int(str(e.value).split()[-1])
    assert works > 16384
    assert list(ruler(tasks=["cwe"], lengths=[works], samples=1).examples(env()))
    (tmp_path / "english_words.json").write_text(json.dumps({str(i): f"word{i}" for i in range(60_000)}))
    (found,) = task.examples(env(data_root=tmp_path))
    assert found.references[0].startswith("word")
    (tmp_path / "english_words.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(TaskError, match="git-lfs"):
        list(task.examples(env(data_root=tmp_path)))


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Article {a}, paragraph {p}. " + "More words follow here. " * 6,
                    "qas": [
                        {
                            "question": f"which {a}-{p}?",
                            "is_impossible": False,
                            "answers": [{"text": f"paragraph {p}"}],
                        },
                        {"question": "nothing?", "is_impossible": True, "answers": []},
                    ],
                }
                for p in range(8)
            ]
        }
        for a in range(5)
    ]
}
HOTPOT = [
    {
        "question": f"who is {i}?",
        "answer": f"person {i}",
        "supporting_facts": [["T1", 0], ["T2", 1]],
        "context": [[f"T{t}", [f"Sentence {i}-{t}. ", f"It is person {i}."]] for t in range(10)],
    }
    for i in range(12)
]


@pytest.mark.parametrize("length", [600, 2000])
def test_questions_of_squad_and_hotpotqa(tmp_path: Path, length: int) -> None:
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "dev-v2.0.json").write_text(json.dumps(SQUAD))
    (tmp_path / "hotpotqa.json").write_text(json.dumps(HOTPOT))
    task = ruler(tasks=["qa_1", "qa_2"], lengths=[length], samples=10)
    examples = list(task.examples(env(data_root=tmp_path)))
    assert [found.references for found in examples[:9:8]] == [("paragraph 0",), ("paragraph 0",)]
    assert "Article 1, paragraph 0." in examples[8].context
    assert examples[8].question.endswith("Question: which 1-0?")
    assert all(f"T1\nSentence {i}-1. It is person {i}." in found.context for i, found in enumerate(examples[10:]))
    assert task.provenance()["qa_1"]["origin"] == "local:squad/dev-v2.0.json"
    with pytest.raises(TaskError, match=r"hotpotqa\.json holds 12 questions .*: set task\.samples=12"):
        ruler(tasks=["qa_2"], samples=13).examples(env(data_root=tmp_path))


@pytest.mark.parametrize("real", [False, True], ids=["made here", "SQuAD"])
def test_the_hubs_rows_of_squad_are_the_original_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, real: bool
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    layout: dict[str, Any] = SQUAD
    if real:
        (file,) = (request.getfixturevalue("shared_data") / "squad").glob("*.json")
        layout = json.loads(file.read_text())
    rows = [
        {"title": str(a), "context": p["context"], "question": q["question"],
         "answers": {"text": [answer["text"] for answer in q["answers"]]}}
        for a, article in enumerate(layout["data"]) for p in article["paragraphs"] for q in p["qas"]
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "hub.parquet")
    monkeypatch.setattr(hub, "fetch", lambda *_: (tmp_path / "hub.parquet", "c" * 40))
    (tmp_path / "squad.json").write_text(json.dumps(layout))
    original, rebuilt = qa.load("qa_1", env(data_root=tmp_path)), qa.load("qa_1", env())
    assert (rebuilt.questions, rebuilt.documents) == (original.questions, original.documents)
    assert rebuilt.origin == f"hub:rajpurkar/squad_v2@{'c' * 40}:squad_v2/validation-00000-of-00001.parquet"


def test_a_question_file_of_another_layout_is_named(tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(HOTPOT))
    with pytest.raises(TaskError, match=r"SQuAD 2\.0 dev .*squad\.json is .*, which should be an object"):
        ruler(tasks=["qa_1"]).examples(env(data_root=tmp_path))


@pytest.mark.parametrize(
    ("task", "file", "row", "message"),
    [
        (
            "qa_1",
            "squad.json",
            {"paragraphs": [{"context": "C", "qas": [{"question": "why?", "is_impossible": False, "answers": []}]}]},
            "SQuAD 2.0 dev .*the question 'why\\?' of local:squad.json has no right answer",
        ),
        (
            "qa_1",
            "squad/squad_v2/validation-0.parquet",
            {"title": "T", "context": "C", "question": "why?", "answers": {"text": [" "]}},
            "SQuAD 2.0 dev .*row 2 of local:squad/.*parquet has no right answer",
        ),
        ("qa_2", "hotpotqa.json", HOTPOT[0] | {"answer": " "}, "row 2 of local:hotpotqa.json has \" \" as 'answer'"),
    ],
)
def test_a_question_without_a_right_answer_is_named(
    tmp_path: Path, task: str, file: str, row: dict[str, Any], message: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [row | {"question": "answered?", "answers": {"text": ["yes"]}}, row]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps({"data": [*SQUAD["data"], row]} if task == "qa_1" else [HOTPOT[1], row]))
    with pytest.raises(TaskError, match=message):
        qa.load(task, env(data_root=tmp_path))


NIAH = [task for task, family in FAMILIES.items() if family == "niah"]


@pytest.mark.parametrize("length", [900, 2048])
def test_several_questions_are_asked_of_one_haystack(tmp_path: Path, length: int) -> None:
    task = ruler(tasks=NIAH, lengths=[length], samples=2, questions=3)
    found = list(task.examples(env(cache_dir=tmp_path)))
    assert len(found) == len(NIAH) * 2 * 3
    for start in range(0, len(found), 3):
        asked = found[start : start + 3]
        assert len({one.context for one in asked}) == 1
        assert len({one.question for one in asked}) == 3
        assert {one.unit for one in asked} == {asked[0].id.removesuffix(".0")}
        assert len({answer for one in asked for answer in one.references}) == sum(len(one.references) for one in asked)
        for number, one in enumerate(asked):
            assert one.id.endswith(f".{number}")
            assert all(answer in one.context for answer in one.references)
            assert len((one.context + one.question + one.prefix).split()) + one.max_new_tokens <= length
    again = list(ruler(tasks=NIAH, lengths=[length], samples=2, questions=3).examples(env(cache_dir=tmp_path)))
    assert again == found


def test_questions_of_a_haystack_may_be_turns_of_a_conversation() -> None:
    fields: dict[str, Any] = {"tasks": ["niah_multiquery"], "lengths": [2048], "samples": 2, "questions": 3}
    asked = list(ruler(**fields).examples(env()))
    talks = list(ruler(**fields, conversation=True).examples(env()))
    assert [talk.id for talk in talks] == ["niah_multiquery/2048/0", "niah_multiquery/2048/1"]
    for number, talk in enumerate(talks):
        own = asked[3 * number : 3 * number + 3]
        told = [(turn.question, turn.prefix, turn.references, turn.data) for turn in talk.turns]
        assert told == [(one.question, one.prefix, one.references, one.data) for one in own]
        assert [turn.context for turn in talk.turns] == [own[0].context, "", ""]


def test_tasks_with_one_question_refuse_several(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="vt do not have: name tasks of niah_"):
        ruler(questions=2)
    with pytest.raises(TaskError, match=r"set task\.questions=2 or more"):
        ruler(conversation=True)
    with pytest.raises(TaskError, match="niah_single_2 and niah_multikey_1 the same"):
        ruler(tasks=NIAH, questions=4)
    with pytest.raises(TaskError, match=r"set task\.questions=1"):
        ruler(tasks=["niah_single_1"], questions=2, source=str(tmp_path))
