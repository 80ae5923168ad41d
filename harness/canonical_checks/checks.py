"""The canonical checks: short runs of the embedded model whose results are known, each with what to do where it fails.

Scores must lie in the 95 % interval of the scores that were recorded, for prompts differ between versions of Python.
Likelihoods and tokens do not: they must agree within rounding. `expected.json` is written by
`python -m harness.canonical --record` on a machine that is trusted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.config.compose import built, composed
from harness.engine.attach import Attachment
from harness.engine.batch.generation import after
from harness.engine.engine import Engine
from harness.engine.hf import routed
from harness.jobs.evaluate import evaluate
from harness.jobs.loading import load
from harness.models.base import LoadedModel, ModelSource
from harness.prompts.teacher import Forced
from harness.results import bands, files
from harness.results.records import Record
from harness.terminal.tables import percent
from methods.full import Full

EXPECTED = Path(__file__).with_name("expected.json")
TEXT = Path(__file__).with_name("fixed_text.md")
CheckResult = dict[str, Any]  # what a check found, as expected.json holds it

ALONE = ("baseline=off", "progress=false", "dtype=fp32", "device=cpu")
VERSIONS = "hold the versions in `python -m harness.doctor` against constraints.txt, and install those"


class Verdict(NamedTuple):
    name: str
    passed: bool
    expected: str
    found: str
    advice: str  # what to do where it failed


class CheckedModel(NamedTuple):
    """What is checked. `root` takes the runs."""

    model: ModelSource
    root: Path

    def run(self, words: Sequence[str]) -> list[Record]:
        """Records of `python -m harness WORDS`, with this model."""
        method, task, _, settings = built(composed([*words, *ALONE]))
        settings.results.root, settings.results.save_prompts = str(self.root), True
        with redirect_stderr(StringIO()):  # which folder is made and continued concerns nobody here
            return evaluate(method, task, self.model, settings).records

    def load(self, dtype: str) -> LoadedModel:
        return load(self.model, dtype, "cpu")


class CanonicalCheck(ABC):
    name: str
    advice: str

    @abstractmethod
    def measure(self, subject: CheckedModel) -> CheckResult: ...

    @abstractmethod
    def passes(self, found: CheckResult, expected: CheckResult) -> bool: ...

    @abstractmethod
    def told(self, plain: CheckResult) -> str:
        """A result in a few words."""

    def bound(self, expected: CheckResult) -> str:
        """What is expected, with its limits."""
        return self.told(expected)

    def verdict(self, subject: CheckedModel, expected: CheckResult) -> Verdict:
        try:
            found = self.measure(subject)
        except Exception as error:  # a check that cannot run has failed, and the others go on
            return Verdict(self.name, False, self.bound(expected), f"{type(error).__name__}: {error}", self.advice)
        return Verdict(self.name, self.passes(found, expected), self.bound(expected), self.told(found), self.advice)


@dataclass(frozen=True)
class ScoreCheck(CanonicalCheck):
    """A run whose score must lie in the interval of the recorded one."""

    name: str
    words: tuple[str, ...]
    advice: str

    def measure(self, subject: CheckedModel) -> CheckResult:
        scores: dict[str, list[float]] = {}
        for record in subject.run(self.words):
            scores.setdefault(record.group, []).append(round(record.score, 6))
        return {"scores": scores}

    def passes(self, found: CheckResult, expected: CheckResult) -> bool:
        ends = bands.interval(expected["scores"])
        is_complete = found["scores"].keys() == expected["scores"].keys()
        return is_complete and ends.low <= bands.mean(found["scores"]) <= ends.high

    def told(self, plain: CheckResult) -> str:
        return percent(bands.mean(plain["scores"]))

    def bound(self, expected: CheckResult) -> str:
        ends = bands.interval(expected["scores"])
        return f"{self.told(expected)} [{percent(ends.low, 0)}, {percent(ends.high, 0)}]"


@dataclass(frozen=True)
class Perplexity(CanonicalCheck):
    """Of the fixed text behind its first tokens, fed token by token through Full's decode steps. `within`: relative."""

    name: str
    dtype: str
    advice: str
    within: float
    prompt: int = 384
    scored: int = 192

    def measure(self, subject: CheckedModel) -> CheckResult:
        loaded = subject.load(self.dtype)
        text = torch.tensor([loaded.tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]])
        head, tail = text[:, : self.prompt], text[:, self.prompt : self.prompt + self.scored]
        with routed(loaded.model):
            made = Engine(Attachment(loaded.model, Full())).generate(
                head, max_new_tokens=self.scored, stops=[after(self.scored)], sampler=Forced(tail)
            )
        assert made.nll is not None
        return {"perplexity": exp(made.nll[0])}

    def passes(self, found: CheckResult, expected: CheckResult) -> bool:
        return abs(found["perplexity"] / expected["perplexity"] - 1) <= self.within

    def told(self, plain: CheckResult) -> str:
        return f"{plain['perplexity']:.4f}"

    def bound(self, expected: CheckResult) -> str:
        return f"{self.told(expected)} ± {percent(self.within)} %"


@dataclass(frozen=True)
class SameTokens(CanonicalCheck):
    """Full against transformers' own `generate`: the same tokens, prompt by prompt."""

    name: str
    words: tuple[str, ...]
    advice: str
    prompts: int = 3

    def measure(self, subject: CheckedModel) -> CheckResult:
        records = subject.run(self.words)[: self.prompts]
        loaded = subject.load("fp32")
        return {"same": sum(_generated(loaded, record) == record.tokens for record in records), "of": len(records)}

    def passes(self, found: CheckResult, expected: CheckResult) -> bool:
        return found["of"] == found["same"] == expected["same"]

    def told(self, plain: CheckResult) -> str:
        return f"{plain['same']} of {plain['of']} answers the same"


def _generated(loaded: LoadedModel, record: Record) -> list[int]:
    prompt, model = torch.tensor([record.prompt_ids]), loaded.model
    wanted: Any = {"max_new_tokens": len(record.tokens), "do_sample": False, "eos_token_id": list(loaded.eos_ids)}
    with torch.inference_mode():
        out: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt), **wanted)  # type: ignore[operator]
    return list(out[0, prompt.shape[1] :].tolist())


NEEDLES = ("task=niah", "task.lengths=[512,1024]", "task.depths=5")
RULER = ("task=ruler", "task.tasks=[niah_single_2,niah_multivalue]", "task.lengths=[1024]", "task.samples=5")
CHECKS: tuple[CanonicalCheck, ...] = (
    ScoreCheck("Full on needles", ("method=full", *NEEDLES), f"model or chat template differ: {VERSIONS}"),
    ScoreCheck("Full on RULER", ("method=full", *RULER), f"prompts or scorer differ: {VERSIONS}; "
          "`python -m harness.lint task=ruler --show 1` shows a prompt"),
    ScoreCheck("PQCache on needles", ("method=pqcache", "budget=0.2", *NEEDLES), "if Full is right above, a kernel "
          "is wrong here: run `python -m pytest tests/kernels tests/methods`, and report what fails"),
    SameTokens("Full is generate", ("method=full", *NEEDLES), f"this engine and transformers part: {VERSIONS}"),
    Perplexity("perplexity, fp32", "fp32", f"the model's numbers differ: {VERSIONS}", within=0.002),
    Perplexity("perplexity, bf16", "bf16", "bf16 rounds otherwise here than where it was recorded: use dtype=fp32, and "
               "compare no bf16 run with one from another machine", within=0.01),
)  # fmt: skip


def verdicts(
    subject: CheckedModel, expected: Mapping[str, CheckResult], checks: Sequence[CanonicalCheck] = CHECKS
) -> Iterator[Verdict]:
    for check in checks:
        yield check.verdict(subject, expected[check.name])


def measured(subject: CheckedModel, checks: Sequence[CanonicalCheck] = CHECKS) -> dict[str, CheckResult]:
    """What expected.json is to hold."""
    return {check.name: check.measure(subject) for check in checks}


def expected(file: Path = EXPECTED) -> dict[str, CheckResult]:
    return files.read_json(file)
