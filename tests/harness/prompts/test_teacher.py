"""Teacher forcing and least lengths: the likelihood is the model's, and a text never ends before it may."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from evals.base import Example, Score, Task, TaskEnv
from evals.perplexity import WikiText2
from harness import Engine, attached, evaluate
from harness.config.settings import Data, Results, Settings
from harness.engine.batch.running_sequence import After
from harness.engine.sampling import Greedy, MinLength
from harness.jobs import job
from harness.prompts.prompt import ExampleError, render
from harness.prompts.stops import StopRule
from harness.prompts.teacher import Forced, forced_ids
from harness.results.run_folder import StoredRun
from methods.full import Full
from tests.fast import MODEL, PQ, STREAMING
from tests.tiny import prompt, tiny

TEXT = "Plain words stand here, then more of them; a café, and at last the end of the line.\n" * 12
TASK = WikiText2(window=300, scored=40, stride=40, samples=3, revision="main")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ppl").mkdir()
    (tmp_path / "ppl" / "wikitext2_test_raw.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def run(root: Path, method: Any, **changes: Any) -> StoredRun:
    settings = Settings(data=Data(str(root)), results=Results(str(root / "runs")), baseline="off")
    return evaluate(method, TASK, MODEL, settings, **changes)


def dense_nll(model: Any, ids: torch.Tensor, context: int) -> float:
    """One forward over everything."""
    logits = model(ids).logits[0, context - 1 : -1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, context:]).item()


@pytest.mark.tokens
@pytest.mark.parametrize("chunk", [None, 32])
def test_fulls_likelihood_is_that_of_one_forward(chunk: int | None) -> None:
    ids = prompt(100)
    expected = dense_nll(tiny("llama"), ids, 70)
    with attached(tiny("llama"), Full()) as kv:
        made = Engine(kv, prefill_chunk=chunk).generate(
            ids[:, :70], max_new_tokens=30, stops=[After(30)], sampler=Forced(ids[:, 70:])
        )
    assert made.nll == [pytest.approx(expected, abs=1e-4)]
    assert (made.tokens, made.stops, made.sealed) == (ids[:, 70:].tolist(), ["forced"], True)


def test_a_budget_of_everything_is_full_and_a_small_one_is_not(root: Path) -> None:
    full = run(root, Full())
    for method in (PQ, STREAMING):
        assert [float(r.output) for r in run(root, method, budget=1.0).records] == pytest.approx(
            [float(r.output) for r in full.records], abs=1e-4
        )
        small = run(root, method, budget=0.1)
        pairs = zip(small.records, full.records, strict=True)
        assert all(abs(float(a.output) - float(b.output)) > 1e-4 for a, b in pairs)
        assert {(r["attended_prompt"], r.stop) for r in small.records} == {(int(0.1 * 260), "forced")}
    assert not [warning for warning in small.summary["warnings"] if "token limit" in warning or "Full is" in warning]


def test_the_reference_is_tokenised_as_it_follows_the_prompt() -> None:
    tokenizer = MODEL.tokenizer()
    example = Example(
        id="e", group="g", context="one two", references=(" three",), max_new_tokens=9, teacher_forced=True, chat=False
    )
    ids = forced_ids(example, render(example, tokenizer, chat="template"), tokenizer)
    assert tokenizer.decode(ids) == " three"
    empty = Example(id="e", group="g", context="x", references=(), max_new_tokens=9, teacher_forced=True)
    with pytest.raises(ExampleError, match="exactly one reference"):
        forced_ids(empty, render(example, tokenizer, chat="template"), tokenizer)


def test_nothing_ends_before_the_least_length() -> None:
    tokenizer = MODEL.tokenizer()
    newline, letter = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in "\na")
    rule = StopRule(tokenizer, [2], ["\n"], min_new_tokens=1)
    assert rule.ends == sorted([2, newline])
    logits = torch.zeros(2, 259)
    logits[:, 2], logits[:, newline], logits[:, letter] = 3, 2, 1
    sampler = MinLength(Greedy(), [rule.ends, [2]], count=1)
    assert sampler.pick(logits).tolist() == [letter, newline]
    assert sampler.pick(logits).tolist() == [2, 2]
    assert logits[0, 2] == 3


@dataclass(frozen=True)
class Line(Task):
    """One example whose answer has at least `least` tokens."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "none"
    least: int

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        yield Example(
            id="e", group="g", context="Once upon", references=(), max_new_tokens=5, min_new_tokens=self.least
        )

    def score(self, example: Example, output: str) -> Score:
        return Score(0.0)


@pytest.mark.tokens
def test_a_run_never_picks_an_end_before_the_least_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(results=Results(str(tmp_path)), baseline="off")
    (free,) = evaluate(Full(), Line(0), MODEL, replace(settings, seed=1)).records
    loaded = replace(MODEL.load("fp32", "cpu"), eos_ids=(free.tokens[0],))
    monkeypatch.setattr(job, "load", lambda *_: loaded)
    (at_once,) = evaluate(Full(), Line(0), MODEL, settings).records
    (later,) = evaluate(Full(), Line(1), MODEL, settings).records
    assert (at_once.tokens, at_once.stop) == (free.tokens[:1], "eos")
    assert later.tokens[0] != free.tokens[0]
