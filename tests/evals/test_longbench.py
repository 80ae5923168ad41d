"""LongBench: official prompts, rules and averages; the predictions of a published run scored end to end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evals.base import TaskEnv, TaskError
from evals.longbench import DATASETS, ENGLISH, PRESETS, LongBench
from tests.evals.counting import CountedText

# of all 21 templates of LongBench's dataset2prompt.json
PROMPTS_SHA256 = "e7d865d712fe45e2455f5e864ac474001d7758d68d349e76ffbcdd382483358f"


class Templated(CountedText):
    """A template costs three."""

    def count(self, user: str, prefix: str = "", *, system: str = "", chat: bool = True) -> int:
        return super().count(user, prefix, system=system) + 3 * chat


def task(**changes: Any) -> LongBench:
    fields = {"datasets": "english", "subset": "longbench", "samples": None, "max_prompt_tokens": None}
    return LongBench(**{**fields, "code_sim": "levenshtein", "revision": "main", **changes})


def env(root: Path | None, window: int | None = None) -> TaskEnv:
    return TaskEnv(text=Templated(), seed=0, data_root=root, window=window)


def row(name: str, **changes: Any) -> dict[str, Any]:
    fields = {"context": f"{{input}} of {name}", "input": "Q {context}?", "answers": ["Paragraph 3 段落3"], "length": 5}
    return {**fields, "all_classes": ["Date", "City"], "_id": f"{name}-id", **changes}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A data root with one row of every data set, or the rows given."""

    def put(subset: str = "longbench", suffix: str = "", **rows: list[dict[str, Any]]) -> Path:
        (tmp_path / subset).mkdir(exist_ok=True)
        for name in DATASETS:
            lines = rows.get(name, [row(name)])
            text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
            (tmp_path / subset / f"{name}{suffix}.jsonl").write_text(text, encoding="utf-8")
        return tmp_path

    return put


@pytest.mark.parametrize(("held", "suffix"), [("minilongbench", ""), ("longbench", "_e")])
def test_the_subset_that_the_data_root_holds_is_named(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, held: str, suffix: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TaskError, match=f"set task.subset={held}{suffix}, or name"):
        task().require(write(held, suffix))


def test_prompts_are_the_published_ones() -> None:
    prompts = {name: data_set.prompt for name, data_set in DATASETS.items()}
    assert prompts["narrativeqa"].count("asconcisely") == 2
    assert prompts["passage_count"].endswith("The final answer is: ")
    text = json.dumps(prompts, sort_keys=True, ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == PROMPTS_SHA256


class TestExamples:
    def test_window_leaves_room_for_template_and_answer(self, write: Callable[..., Path]) -> None:
        root = write()
        qasper, trec = task(datasets=["qasper", "trec"]).examples(env(root, window=4096))
        assert qasper.max_prompt_tokens == 4096 - 128 - 3 - 16
        assert trec.max_prompt_tokens == 4096 - 64 - 16
        (fixed,) = task(datasets="qasper", max_prompt_tokens=3500).examples(env(root, window=4096))
        assert (fixed.max_prompt_tokens, fixed.halves_apart) == (3500, True)  # as pred.py of LongBench v1 decodes them
        with pytest.raises(TaskError, match="window of 140 tokens is too small"):
            list(task(datasets="qasper").examples(env(root, window=140)))


class TestAverages:
    def test_leaderboard_of_llama_2_chat(self) -> None:
        published = [18.7, 19.2, 36.8, 25.4, 32.8, 9.4, 27.3, 20.8, 25.8, 61.5, 77.8, 40.7, 2.1, 9.8, 52.4, 43.8]
        named = task().averages(dict(zip(ENGLISH, published, strict=True)))
        assert round(named["avg_leaderboard"], 1) == 31.0
        assert [named["mean"], named["mean_english"]] == pytest.approx([sum(published) / 16] * 2)
        assert named["mean_pqcache14"] == pytest.approx(sum(published[:14]) / 14)
        assert (round(named["single_doc_qa"], 1), round(named["code"], 1)) == (24.9, 48.1)

    def test_no_average_over_sets_that_were_not_run(self) -> None:
        assert task().averages({"lcc": 0.5, "qasper": 0.3}) == {"mean": 0.4}
        assert task().averages({"lcc": 0.5, "repobench-p": 0.3})["code"] == 0.4
        even = task(subset="longbench_e").averages({"qasper/0-4k": 0.5, "multifieldqa_en/8k+": 0.3})
        assert even["single_doc_qa"] == 0.4  # NarrativeQA is not in LongBench-E
        assert task().averages({}) == {}
        assert [len(PRESETS[name]) for name in ("english", "pqcache14", "chinese", "all")] == [16, 14, 5, 21]


@pytest.mark.parametrize("backend", ["levenshtein", "difflib"])
def test_scores_of_a_published_run(shared_data: Path, backend: str) -> None:
    golden = json.loads((shared_data / "golden" / "minilongbench_example_scores.json").read_text())
    wanted = task(datasets=list(golden["predictions"]), subset="minilongbench", code_sim=backend)
    scores: dict[str, list[float]] = {}
    for example in wanted.examples(env(shared_data)):
        ours = scores.setdefault(example.group, [])
        ours.append(wanted.score(example, golden["predictions"][example.group][len(ours)]).value)
    rounded = {name: round(100 * sum(values) / len(values), 2) for name, values in scores.items()}
    assert rounded == golden[f"scores_{backend}"]
    assert {name: len(values) for name, values in scores.items()} == {
        k: len(v) for k, v in golden["predictions"].items()
    }
