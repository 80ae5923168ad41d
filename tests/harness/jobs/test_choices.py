"""Texts that are fed one by one behind the same prompt: a question with choices, on one cache that goes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from evals.base import Example, Score, Task, TaskEnv, read_choices
from harness import Engine, attached
from harness.jobs.job import Job
from harness.prompts.prompt import ExampleError
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from tests.fast import MODEL, PQ, STREAMING, run, settings

FACTS = "The cup is red and the door is blue, as everybody in the house knows very well. " * 4
CHOICES = (" red", " bluer than the sea", " no", " red")


@dataclass(frozen=True)
class Colours(Task):
    """Two questions with choices behind one text, and one that the model answers freely."""

    version: ClassVar[str] = "1"
    metric: ClassVar[str] = "accuracy"
    choices: tuple[str, ...] = CHOICES

    def examples(self, env: TaskEnv) -> Iterator[Example]:
        for number, thing in enumerate(("cup", "door")):
            yield Example(
                id=f"colour-{number}", group="colours", context=FACTS, question=f"The {thing} is", references=("red",),
                max_new_tokens=1, choices=self.choices, chat=False,
            )  # fmt: skip
        yield Example(id="free", group="free", context=FACTS, references=("x",), max_new_tokens=5, chat=False)

    def score(self, example: Example, output: str) -> Score:
        if not example.choices:
            return Score(0.0)
        likelihoods = [choice.log_likelihood for choice in read_choices(output)]
        return Score(float(likelihoods[0] == max(likelihoods)))


def likelihoods(method: Method, budget: float | None, prompt: list[int], texts: list[list[int]]) -> list[float]:
    """Each text by itself: the prompt but for its last token sealed, the rest read by steps."""
    loaded, found = MODEL.load("fp32", "cpu"), []
    with attached(loaded.model, method, budget=budget) as kv, torch.inference_mode():
        for told in texts:
            engine, ids = Engine(kv), torch.tensor([prompt])
            cache, total = engine.cache(ids, len(told)), 0.0
            engine.prefill(cache, ids[:, :-1])
            cache.seal()
            for fed, token in zip([prompt[-1], *told], told, strict=False):
                logits = engine.decode(torch.tensor([[fed]]), cache, None)
                total += float(logits.log_softmax(-1)[0, token])
            found.append(total)
    return found


@pytest.mark.parametrize(("method", "budget"), [(PQ, 0.2), (H2O(), 0.2), (STREAMING, 0.2), (Full(), None)])
@pytest.mark.parametrize("batch", [1, 2])
def test_each_choice_costs_what_it_costs_alone(
    tmp_path: Path, method: Method, budget: float | None, batch: int
) -> None:
    stored = run(tmp_path, method, Colours(), batch=batch, budget=budget)
    items = Job.plan(method, Colours(), MODEL, settings(tmp_path, budget=budget)).items
    assert [record.id for record in sorted(stored.records, key=lambda record: record.id)] == [
        "colour-0", "colour-1", "free",
    ]  # fmt: skip
    for item in items[:2]:
        (record,) = (record for record in stored.records if record.id == item.example.id)
        told = [choice.log_likelihood for choice in read_choices(record.output)]
        texts = [list(choice) for choice in item.choices]
        assert told == pytest.approx(likelihoods(method, budget, list(item.prompt.ids), texts), abs=1e-3)
        assert told[0] == pytest.approx(told[3], abs=1e-6)  # asked again behind two others
        assert (record.stop, record.context_tokens) == ("forced", len(item.prompt.ids) - 1)
        assert record["attended_prompt"] is not None


def outputs(stored: Any) -> dict[str, list[float]]:
    return {
        record.id: [choice.log_likelihood for choice in read_choices(record.output)]
        for record in stored.records
        if record.id.startswith("colour")
    }


@pytest.mark.parametrize(
    "changes",
    [{"shared_prefill": True}, {"warmup": 2}, {"protocol": "context", "questions": "shared"}, {"prefill_chunk": 32}],
)
def test_however_it_is_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Under protocol=context the question is read behind the seal of what it is about, so that costs differ."""
    stored = run(tmp_path / "a", PQ, Colours(), budget=0.3, **changes)
    beside = {key: value for key, value in changes.items() if key == "protocol"}
    alone = run(tmp_path / "b", PQ, Colours(), budget=0.3, **beside)
    for name, costs in outputs(stored).items():
        assert costs == pytest.approx(outputs(alone)[name], abs=1e-3)


def test_a_choice_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExampleError, match="colour-0 has"):
        run(tmp_path, PQ, Colours(choices=("red", "")), budget=0.3)
