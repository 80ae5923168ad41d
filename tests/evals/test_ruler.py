"""RULER as a task: examples, protocol, cache, scores, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evals import hub
from evals.base import Example, TaskEnv, TaskError
from evals.ruler import Ruler, effective_length, qa, weighted_averages
from tests.evals.counting import CountedText

NEEDLES = ["niah_single_2", "niah_single_3"]


def ruler(**changes: Any) -> Ruler:
    fields = {"tasks": ["niah_single_2", "vt"], "lengths": [600], "samples": 2, "haystack": "auto", "source": None}
    return Ruler(**{**fields, **changes})


def env(text: CountedText | None = None, **changes: Any) -> TaskEnv:
    return TaskEnv(**{"text": text or CountedText(), "seed": 42, **changes})


def test_cached_prompts_need_no_tokenizer_unless_their_file_is_cut_short(tmp_path: Path) -> None:
    made, texts = [], [CountedText() for _ in range(3)]
    several: dict[str, Any] = {"tasks": ["niah_multikey_2"], "questions": 2}
    for text in texts:
        made.append(list(ruler(**several).examples(env(text, cache_dir=tmp_path))))
        (file,) = (tmp_path / "ruler").iterdir()
        if text is texts[1]:
            file.write_bytes(file.read_bytes()[:-30])
    assert made[0] == made[1] == made[2]
    assert [text.calls > 0 for text in texts] == [True, False, True]
    (tmp_path / "file").touch()  # a folder that takes nothing costs no run
    assert list(ruler(**several).examples(env(cache_dir=tmp_path / "file"))) == made[0]


@pytest.mark.parametrize(
    "change", [{"seed": 43}, {"fingerprint": "other"}, {"samples": 3}, {"questions": 2}, {"essay": "Other. Text."}]
)
def test_what_shapes_prompts_is_recorded_and_not_taken_from_the_cache(tmp_path: Path, change: dict[str, Any]) -> None:
    root = tmp_path / "data"
    root.mkdir()
    essays = root / "PaulGrahamEssays.json"
    essays.write_text(json.dumps({"text": "Some words. " * 50}))
    list(ruler(tasks=NEEDLES).examples(env(cache_dir=tmp_path, data_root=root)))
    text = CountedText()
    text.fingerprint = change.get("fingerprint", text.fingerprint)
    essays.write_text(json.dumps({"text": change.get("essay", "Some words. " * 50)}))
    changed = env(text, cache_dir=tmp_path, data_root=root, seed=change.get("seed", 42))
    task = ruler(tasks=NEEDLES, samples=change.get("samples", 2), questions=change.get("questions", 1))
    list(task.examples(changed))
    assert text.calls > 0
    named = task.provenance()
    assert {*named} >= {"words_sha256", "haystack", "haystack_sha256", "splitter"}
    assert (named["seed"], named["tokenizer"]) == (changed.seed, text.fingerprint)


def test_one_spelling_answers_a_question_and_elsewhere_each_reference_counts() -> None:
    for name, value in (("qa_1", 1.0), ("vt", 0.5)):
        example = Example(
            id="1", group=name, context="", references=("Ada", "Bo"), max_new_tokens=9, data={"task": name}
        )
        assert ruler().score(example, "It is ada.").value == value


def test_published_weighted_averages_of_llama_3_1_8b() -> None:
    scores = dict(zip([4096 << i for i in range(6)], [95.5, 93.8, 91.6, 87.4, 84.7, 77.0], strict=True))
    assert weighted_averages(scores) == pytest.approx((85.4, 91.3), abs=0.05)
    assert effective_length({length: score / 100 for length, score in scores.items()}) == 32768


def test_lengths_that_cannot_be_are_refused_before_anything_is_made() -> None:
    text = CountedText()
    with pytest.raises(TaskError, match="starts at 512"):
        ruler(lengths=[256]).examples(env(text))
    with pytest.raises(TaskError, match="the model takes 2048 tokens"):
        ruler(lengths=[1024, 4096]).examples(env(text, window=2048))
    with pytest.raises(TaskError, match=r"seed=-1"):
        ruler().examples(env(text, seed=-1))
    assert text.calls == 0


def test_long_word_lists_need_the_official_file(tmp_path: Path) -> None:
    task = ruler(tasks=["cwe"], lengths=[131072], samples=1)
    with pytest.raises(TaskError, match="english_words"):
        list(task.examples(env()))
    (tmp_path / "english_words.json").write_text(json.dumps({str(i): f"word{i}" for i in range(60_000)}))
    (found,) = task.examples(env(data_root=tmp_path))
    assert found.references[0].startswith("word")


def test_a_task_that_does_not_fit_is_named() -> None:
    class Costly(CountedText):
        def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
            return 2 * super().count(user, prefix, system=system, chat=chat)

    with pytest.raises(TaskError, match=r"vt does not fit 512 tokens \(1024 would do\): raise task.lengths"):
        ruler(tasks=["niah_single_1", "vt"], lengths=[512]).examples(env(Costly()))


ARTICLES = [[f"Article {a}, paragraph {p}. " + "More words follow here. " * 6 for p in range(8)] for a in range(5)]
NOTHING = {"question": "nothing?", "is_impossible": True, "answers": []}


def entries(text: str) -> list[dict[str, Any]]:
    return [{"question": f"which {text[:22]}?", "is_impossible": False, "answers": [{"text": text[:22]}]}, NOTHING]


SQUAD = {"data": [{"paragraphs": [{"context": p, "qas": entries(p)} for p in texts]} for texts in ARTICLES]}


def test_the_hubs_rows_of_squad_are_the_original_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    layout: dict[str, Any] = SQUAD
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
