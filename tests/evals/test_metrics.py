"""LongBench's metrics by official vectors, and settings of tasks that cannot be."""

from __future__ import annotations

import doctest
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evals import metrics
from evals.base import Task
from evals.gsm8k import Gsm8k
from evals.lm_eval import LmEval
from evals.longbench import LongBench
from evals.metrics import answers, rouge
from evals.perplexity import WikiText2
from evals.ruler import Ruler
from evals.scbench import SCBench

CLASSES = ("Date", "Other location", "City", "人物", "")

words = st.sampled_from(["a", "b", "the", "cat", ".", ". ", "\n", "  ", "3.5", "é", "段落", "B"])
sentences = st.lists(words, max_size=40).map(" ".join) | st.lists(words, max_size=40).map("".join)


@pytest.mark.parametrize("module", [answers, rouge])
def test_doctests(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_official_vectors(shared_data: Path) -> None:
    vectors = json.loads((shared_data / "golden" / "longbench_metric_vectors.json").read_text())
    assert len(vectors) == 38
    for vector in vectors:
        arguments = (vector["prediction"], vector["reference"])
        if vector["metric"] == "classification":
            assert metrics.classification(*arguments, vector["all_classes"]) == vector["score"], vector
        else:
            assert getattr(metrics, vector["metric"])(*arguments) == vector["score"], vector


# official results, kept here for where the vectors are not
@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (metrics.qa_f1("it is 3.5 million", "3.5 million"), 2 / 3),
        (metrics.qa_f1("the", "the"), 0.0),
        (metrics.qa_f1("cat cat dog", "cat dog dog"), 2 / 3),
        (metrics.rouge_l("a b c. d e f", "a b c d e f"), 0.999999995),
        (metrics.rouge_l("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"), 0.6153846106508877),
        (metrics.rouge_l("...", "reference text"), 0.0),
        (metrics.classification("Other location, City", "City", CLASSES[:3]), 0.5),
        (metrics.retrieval("Paragraph 12 and Paragraph 3", "Paragraph 12"), 0.5),
        (metrics.retrieval_zh("段落12", "段落12"), 1.0),
        (metrics.count("012", "12"), 0.0),
        (metrics.code_sim("// c\n# d", "foo"), 0.0),
        (metrics.code_sim("  \nfoo", "foo"), 0.0),
        (metrics.code_sim("x = foo(1, 2, 3)", "y = foo(3, 2, 1)"), 0.81),
        (metrics.code_sim("return x + 1", "    return x + 1", "difflib"), 0.86),
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
        assert metrics.rouge_l(prediction, reference) == theirs

    @pytest.mark.parametrize(("length", "score"), [(990, 0.999999995), (991, 0.0)])
    def test_fails_where_the_package_runs_out_of_stack(self, length: int, score: float) -> None:
        text = " ".join(map(str, range(length)))
        assert metrics.rouge_l(text, text) == score


class TestChinese:
    def test_over_the_splitters_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        by_letter = SimpleNamespace(cut=lambda text, cut_all: iter(text), setLogLevel=lambda level: None)
        monkeypatch.setitem(sys.modules, "jieba", by_letter)
        assert metrics.qa_f1_zh("厦门大学。", "“厦门” 大学") == 1.0
        assert metrics.qa_f1_zh("A厦", "a门") == 0.5
        assert metrics.qa_f1_zh("。！", "。！") == 0.0
        assert metrics.rouge_zh("厦门大学", "厦门") == metrics.rouge_l("厦 门 大 学", "厦 门")


WRONG: list[tuple[type[Task], dict[str, Any]]] = [
    (Gsm8k, {"prompt": "zero"}),
    (Gsm8k, {"extraction": "strict", "prompt": "pqcache"}),
    (LongBench, {"datasets": ["musique"], "subset": "longbench_e"}),
    (LongBench, {"code_sim": "jaro"}),
    (LmEval, {"num_fewshot": -1}),
    (LmEval, {"include_path": "/nowhere/at/all"}),
    (Ruler, {"tasks": ["niah"]}),
    (Ruler, {"lengths": [4096, 4096]}),
    (Ruler, {"haystack": "novel"}),
    (SCBench, {"tasks": "scbench_repoqa"}),
    (SCBench, {"golden": False, "mode": "multi_request"}),
    (SCBench, {"turns": 0}),
    (WikiText2, {"scored": 2048, "window": 2048}),
    (WikiText2, {"stride": 7, "scored": 8, "window": 20}),
]


@pytest.mark.parametrize(("kind", "changes"), WRONG, ids=str)
def test_a_setting_that_cannot_be_is_named(kind: type[Task], changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(changes))}|part of a window|scores tokens twice"):
        kind(**changes)
