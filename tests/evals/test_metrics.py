"""LongBench's metrics by official vectors, and settings of tasks that cannot be."""

from __future__ import annotations

import doctest
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import evals
from evals.base import Task
from evals.gsm8k import Gsm8k
from evals.lm_eval import LmEval
from evals.longbench import LongBench
from evals.longbench_v2 import LongBenchV2
from evals.mathematics import Mathematics
from evals.metrics import answers, rouge
from evals.mrcr import Mrcr
from evals.multiturn import Multiturn
from evals.multiturn.overflow import NeedlesBehindOverflow
from evals.niah import Niah
from evals.perplexity import WikiText2
from evals.ruler import Ruler
from evals.scbench import SCBench

CLASSES = ("Date", "Other location", "City", "人物", "")

words = st.sampled_from(["a", "b", "the", "cat", ".", ". ", "\n", "  ", "3.5", "é", "段落", "B"])
sentences = st.lists(words, max_size=40).map(" ".join) | st.lists(words, max_size=40).map("".join)


def test_doctests() -> None:
    modules = [import_module(found.name) for found in walk_packages(evals.__path__, "evals.")]
    results = [doctest.testmod(module, optionflags=doctest.ELLIPSIS) for module in modules]
    assert not sum(result.failed for result in results)
    assert sum(result.attempted for result in results) >= 34


def test_official_vectors(shared_data: Path) -> None:
    vectors = json.loads((shared_data / "golden" / "longbench_metric_vectors.json").read_text())
    assert len(vectors) == 38
    for vector in vectors:
        arguments = (vector["prediction"], vector["reference"])
        if vector["metric"] == "classification":
            assert answers.classification(*arguments, vector["all_classes"]) == vector["score"], vector
        else:
            score = getattr(rouge if "rouge" in vector["metric"] else answers, vector["metric"])
            assert score(*arguments) == vector["score"], vector


# official results, kept here for where the vectors are not
@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (answers.qa_f1("it is 3.5 million", "3.5 million"), 2 / 3),
        (answers.qa_f1("the", "the"), 0.0),
        (answers.qa_f1("cat cat dog", "cat dog dog"), 2 / 3),
        (rouge.rouge_l("a b c. d e f", "a b c d e f"), 0.999999995),
        (rouge.rouge_l("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"), 0.6153846106508877),
        (rouge.rouge_l("...", "reference text"), 0.0),
        (answers.classification("Other location, City", "City", CLASSES[:3]), 0.5),
        (answers.retrieval("Paragraph 12 and Paragraph 3", "Paragraph 12"), 0.5),
        (answers.retrieval_zh("段落12", "段落12"), 1.0),
        (answers.count("012", "12"), 0.0),
        (answers.code_sim("// c\n# d", "foo"), 0.0),
        (answers.code_sim("  \nfoo", "foo"), 0.0),
        (answers.code_sim("x = foo(1, 2, 3)", "y = foo(3, 2, 1)"), 0.81),
        (answers.code_sim("return x + 1", "    return x + 1", "difflib"), 0.86),
    ],
)
def test_official_results(score: float, expected: float) -> None:
    assert score == expected


class TestRouge:
    @given(sentences, sentences)
    @example("x . y. ", "y . x .")
    def test_is_the_package(self, prediction: str, reference: str) -> None:
        package = pytest.importorskip("rouge", reason="the official package serves as the oracle: pip install rouge")
        try:
            theirs = package.Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
        except ValueError:
            theirs = 0.0
        assert rouge.rouge_l(prediction, reference) == theirs

    @pytest.mark.parametrize(("length", "score"), [(990, 0.999999995), (991, 0.0)])
    def test_fails_where_the_package_runs_out_of_stack(self, length: int, score: float) -> None:
        text = " ".join(map(str, range(length)))
        assert rouge.rouge_l(text, text) == score


class TestChinese:
    def test_over_the_splitters_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        by_letter = SimpleNamespace(cut=lambda text, cut_all: iter(text), setLogLevel=lambda level: None)
        monkeypatch.setitem(sys.modules, "jieba", by_letter)
        assert answers.qa_f1_zh("厦门大学。", "“厦门” 大学") == 1.0
        assert answers.qa_f1_zh("A厦", "a门") == 0.5
        assert answers.qa_f1_zh("。！", "。！") == 0.0
        assert rouge.rouge_zh("厦门大学", "厦门") == rouge.rouge_l("厦 门 大 学", "厦 门")


WRONG: list[tuple[type[Task], dict[str, Any], str]] = [
    (Gsm8k, {"prompt": "zero"}, "prompt='zero' is unknown"),
    (Gsm8k, {"extraction": "strict", "prompt": "pqcache"}, "extraction=strict needs a full stop"),
    (Gsm8k, {"samples": 0}, "task.samples=0 leaves nothing"),
    (Gsm8k, {"max_new_tokens": 0}, "task.max_new_tokens=0 leaves no room"),
    (LongBench, {"datasets": ["musique"], "subset": "longbench_e"}, "datasets="),
    (LongBench, {"code_sim": "jaro"}, "code_sim='jaro' is unknown"),
    (LongBench, {"max_prompt_tokens": 1}, "max_prompt_tokens=1 is too small: give 2 or more"),
    *((LongBenchV2, {"lengths": names}, "task.lengths=") for names in (["tiny"], [])),
    (LongBenchV2, {"prompt": "1shot"}, "task.prompt=1shot is unknown"),
    (LongBenchV2, {"prompt": "0shot_cot_ans"}, "task.prompt=0shot_cot_ans does not fit task.reasoning=None"),
    (LongBenchV2, {"reasoning": "run"}, "task.prompt=0shot does not fit task.reasoning=run"),
    (LongBenchV2, {"samples": 0}, "task.samples=0 leaves nothing"),
    (LongBenchV2, {"max_prompt_tokens": 1}, "task.max_prompt_tokens=1 leaves nothing: give 2 or more"),
    *((Mathematics, {"sets": names}, "task.sets") for names in ("aime23", [])),
    (Mathematics, {"prompt": "cot"}, "task.prompt=cot"),
    *((Mathematics, {key: 0}, f"task.{key}=0 leaves nothing") for key in ("samples", "max_new_tokens")),
    *((Mrcr, {"needles": needles}, "task.needles") for needles in ([3], [])),
    *((Mrcr, {key: 0}, f"task.{key}=0 leaves nothing") for key in ("longest", "samples", "max_new_tokens")),
    *((Multiturn, {key: "mine"}, f"task.{key}='mine' is unknown") for key in ("replies", "about", "haystack")),
    *((Multiturn, {key: 0}, f"task.{key}=0 must be at least 1") for key in ("conversations", "turns", "opening")),
    (Multiturn, {"turns": 41}, "task.turns=41 is too many"),
    (Multiturn, {"template": "{text}"}, "{question}"),
    *((Multiturn, {key: 1.0}, f"task.{key} ") for key in ("question_share", "correlation")),
    *((NeedlesBehindOverflow, {"questions": number}, "task.questions") for number in (1, 99)),
    (NeedlesBehindOverflow, {"template": "What?"}, "{question}"),
    *((Niah, {"depths": depths}, f"depths={depths} may be shares or percents: give percents of 1 or more, such as 50")
      for depths in ([0.5], [0, 0.25, 1], [0, 1], [0.5, 50])),
    (LmEval, {"num_fewshot": -1}, "num_fewshot=-1 makes no sense: give 0 or more"),
    (LmEval, {"include_path": "/nowhere/at/all"}, "include_path=/nowhere/at/all is not a folder"),
    (Ruler, {"tasks": ["niah"]}, "tasks: niah unknown"),
    (Ruler, {"lengths": [4096, 4096]}, "lengths="),
    (Ruler, {"haystack": "novel"}, "haystack='novel' is unknown"),
    (Ruler, {"tasks": ["niah_single_2", "vt"], "questions": 2}, "vt do not have: name tasks of niah_"),
    (Ruler, {"conversation": True}, "set task.questions=2 or more"),
    (Ruler, {"tasks": ["niah_single_1"], "questions": 2, "source": "files"}, "set task.questions=1"),
    (SCBench, {"tasks": "scbench_repoqa"}, "task.tasks: scbench_repoqa"),
    (SCBench, {"golden": False, "mode": "multi_request"}, "task.golden=false"),
    (SCBench, {"turns": 0}, "task.turns=0 must be at least 1"),
    (WikiText2, {"scored": 2048, "window": 2048}, "part of a window"),
    (WikiText2, {"stride": 7, "scored": 8, "window": 20}, "scores tokens twice"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "says"), WRONG, ids=str)
def test_a_setting_that_cannot_be_is_named(kind: type[Task], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        kind(**changes)
