"""Beside kvpress: the same prompts go to both, each answers by itself, the other environment may be missing.

A stand-in takes kvpress's place: greedy decoding that ignores its press, with kvpress's own signatures.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.bench import kvpress
from harness.bench.common.load import MarkedSeconds
from harness.bench.kvpress import PRESSES, Peer, Sample
from harness.config.settings import GenerationSettings, Settings
from harness.jobs.job import Job
from methods.full import Full
from tests.fast import MODEL, niah

STAND_IN = """
from dataclasses import dataclass
import torch

@dataclass
class SnapKVPress:
    compression_ratio: float = 0.0
    window_size: int = 64

class KVPressTextGenerationPipeline:
    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer

    def _forward(self, inputs, max_new_tokens, press):
        assert press is None or abs(press.compression_ratio - 0.8) < 1e-9
        print("noise on the standard output")
        context, [question] = inputs["context_ids"], inputs["questions_ids"]
        cache = self.model.model(context).past_key_values
        new, ids = question, []
        while len(ids) < max_new_tokens and not (ids and ids[-1] in self.model.generation_config.eos_token_id):
            ids.append(int(self.model(new, past_key_values=cache).logits[0, -1].argmax()))
            new = torch.tensor([ids[-1:]])
        return [self.tokenizer.decode(ids, skip_special_tokens=True)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kvpress")
    loaded = MODEL.load("fp32", "cpu")
    loaded.model.save_pretrained(made / "model")
    loaded.tokenizer.save_pretrained(made / "model")
    (made / "kvpress.py").write_text(STAND_IN)
    return made


@pytest.mark.tokens
@pytest.mark.slow
def test_both_sides_answer_the_same_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    settings = Settings(budget=0.2, baseline="off", generation=GenerationSettings(max_new_tokens=5))
    loaded = MODEL.load("fp32", "cpu")
    job = Job.plan(Full(), niah(), MODEL, settings)
    with kvpress.peer(sys.executable, folder / "model") as process:
        other = Peer(process, job.task, 0.2, loaded.eos_ids)
        options = kvpress.parser().parse_args(["--python", "", "--presses", "full", "snapkv", "--budget", "0.2"])
        runs = kvpress.runs_of(options, {"fp32": loaded}, job, other)
        *_, (_, samples) = kvpress.interleaved(runs, job.items[:2])
    assert process.returncode == 0
    assert samples.keys() == {(side, (name, "fp32")) for side in kvpress.SIDES for name in ("full", "snapkv")}
    mine, theirs = (samples[side, ("full", "fp32")] for side in kvpress.SIDES)
    assert [(s.score, s.tokens) for s in mine] == [(s.score, s.tokens) for s in theirs]
    assert all(s.seconds > 0 and s.tokens == 5 for s in mine)
    rows = kvpress.rows_of(samples)
    assert [(row["press"], row["dtype"]) for row in rows] == [
        ("full", "fp32"), ("snapkv", "fp32"), ("full", "best"), ("snapkv", "best")
    ]  # fmt: skip
    assert [len(column.cells) for column in kvpress.TABLE(rows)] == [4] * 12


def test_the_best_dtype_of_each_side_is_held_against_the_other_s() -> None:
    def times(*seconds: float) -> list[Sample]:
        return [Sample(MarkedSeconds(one), 0.5, 3) for one in seconds]

    samples = {
        ("ours", ("h2o", "fp32")): times(2, 2),
        ("kvpress", ("h2o", "fp32")): times(3, 5),
        ("ours", ("h2o", "bf16")): times(1, 1),
        ("kvpress", ("h2o", "bf16")): times(6, 6),
    }
    fp32, bf16, best = kvpress.rows_of(samples)
    assert (fp32["ratio"].median, bf16["ratio"].median, best["ratio"].median) == (2, 6, 4)
    assert (best["ours"]["per_minute"], best["kvpress"]["per_minute"]) == (60, 15)
    assert best["ours"]["score"] == 0.5


def test_without_kvpress_the_reason_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    job = Job.plan(Full(), niah(), MODEL, Settings(baseline="off"))
    with (
        kvpress.peer(sys.executable, folder / "model") as process,
        pytest.raises(RuntimeError, match="Is it installed"),
    ):
        Peer(process, job.task, 0.2, ()).run(("full", "fp32"), replace(job.items[0]), 2)


def test_our_methods_take_the_parameters_of_their_presses() -> None:
    for press in PRESSES.values():
        method = kvpress.methods.parsed(press.method)[1]
        assert vars(method).get("window", 64) == press.options.get("window_size", 64)
        assert press.name != "StreamingLLMPress" or vars(method)["sinks"] == press.options["n_sink"]
