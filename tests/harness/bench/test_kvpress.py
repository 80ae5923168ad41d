"""Beside kvpress: the same prompts go to both, what each keeps is compared, the other environment may be missing.

A stand-in takes kvpress's place: a StreamingLLMPress that works by slices, with kvpress's own signatures. Held against
it is a method of ours, which needs no kvpress either.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from harness.bench import kvpress
from harness.bench.kvpress import PRESSES, differing, row_of, scores_of, ties
from harness.bridges.kvpress.kvpress import KVPress
from harness.config.settings import GenerationSettings, Settings
from harness.engine.attach import attached
from harness.jobs.job import Job
from methods.full import Full
from methods.streaming import Streaming
from tests.fast import MODEL, niah

STAND_IN = """
from contextlib import contextmanager
from dataclasses import dataclass
import torch

@dataclass
class StreamingLLMPress:
    compression_ratio: float = 0.0
    n_sink: int = 4
    shift: int = 0

    def cut(self, rows):
        kept = int(rows.shape[2] * (1 - self.compression_ratio))
        end = rows.shape[2] - self.shift
        return torch.cat([rows[:, :, : self.n_sink], rows[:, :, end - kept + self.n_sink : end]], 2)

class KVPressTextGenerationPipeline:
    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer

    def _forward(self, inputs, max_new_tokens, press, cache):
        print("noise on the standard output")
        context, [question] = inputs["context_ids"], inputs["questions_ids"]
        self.model.model(context, past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = press.cut(layer.keys), press.cut(layer.values)
        rows, new, ids = cache.layers[0].keys.shape[2], question, []
        while len(ids) < max_new_tokens and not (ids and ids[-1] in self.model.generation_config.eos_token_id):
            places = torch.tensor([[context.shape[1] + len(ids)]])
            ids.append(int(self.model(new, past_key_values=cache, position_ids=places).logits[0, -1].argmax()))
            new = torch.tensor([ids[-1:]])
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :rows], layer.values[:, :, :rows]
        return [self.tokenizer.decode(ids, skip_special_tokens=True)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kvpress")
    loaded = MODEL.load("fp32", "cpu")
    loaded.model.save_pretrained(place / "model")
    loaded.tokenizer.save_pretrained(place / "model")
    (place / "kvpress.py").write_text(STAND_IN)
    return place


@pytest.mark.tokens
@pytest.mark.slow
def test_both_sides_keep_and_answer_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    settings = Settings(baseline="off", generation=GenerationSettings(max_new_tokens=5))
    loaded = MODEL.load("fp32", "cpu")
    job = Job.plan(Full(), niah(), MODEL, settings)
    item, method = job.items[0], Streaming(sinks=4, positions="original")
    with (
        kvpress.peer(sys.executable, folder / "model", loaded.eos_ids) as there,
        attached(loaded.model, method, budget=0.2) as kv,
    ):
        assert kv.budget is not None
        kept = kv.budget.tokens(len(item.prompt.ids) - 1, 0)
        here, chunked = kvpress.ours(kv, item, loaded), kvpress.ours(kv, item, loaded, 150)
        same, other = (there.run(PRESSES["StreamingLLM"] | more, item, kept) for more in ({}, {"shift": 1}))
    assert there.process.returncode == 0
    row = row_of("StreamingLLM", [kvpress.compared(job.task, item, here, chunked, same)] * 2)
    heads = 2 * MODEL.describe().num_layers * MODEL.describe().num_kv_heads
    assert (row["positions"], row["differ"], row["differ_in_chunks"]) == (heads * kept, 0, 0)
    assert (row["equal_answers"], row["n"]) == (2, 2)
    assert kvpress.compared(job.task, item, here, chunked, other)["differ"] == heads // 2
    assert [column.cells for column in kvpress.TABLE([row])][5] == ["2 of 2"]


def test_a_position_in_the_place_of_another_counts_once() -> None:
    assert differing([[[0, 1, 2], [4]]], [[[0, 1, 3], [4]]]) == 1
    assert differing([[[0, 1]], [[2]]], [[[0, 1, 2, 3]], [[2]]]) == 2
    assert differing([[[0, 1]]], [[[1, 0]]]) == 0


def test_positions_with_scores_as_good_as_equal_are_ties() -> None:
    scores = [torch.tensor([[[9, 1e-3, 1e-3 * (1 + 5e-6), 1e-3 * (1 - 5e-5)], [1, 2, 3, 4]]])]
    assert ties([[[0, 1], [3]]], [[[0, 2], [3]]], scores) == 1
    assert ties([[[0, 1], [3]]], [[[0, 3], [2]]], scores) == 0
    assert ties([[[0, 1]]], [[[0, 2]]], []) == 0


def test_scores_are_those_of_the_press(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kvpress", reason="needs kvpress: docs/presses.md")
    loaded = MODEL.load("fp32", "cpu")
    item = Job.plan(Full(), niah(), MODEL, Settings(baseline="off")).items[0]
    method = KVPress(press={"name": "KeyDiffPress"})
    with attached(loaded.model, method, budget=0.2) as kv, scores_of(method) as scores:
        kept = kvpress.ours(kv, item, loaded).kept
    assert len(scores) == len(kept) == MODEL.describe().num_layers
    for layer, scored in zip(kept, scores, strict=True):
        assert [
            sorted(head.topk(len(places)).indices.tolist()) for head, places in zip(scored[0], layer, strict=True)
        ] == layer
    with scores_of(Full()) as none:
        assert none == []


def test_without_kvpress_the_reason_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(kvpress, "WORKER", folder / "worker.py")
    (folder / "worker.py").write_text("import a_package_that_is_nowhere")
    job = Job.plan(Full(), niah(), MODEL, Settings(baseline="off"))
    with (
        kvpress.peer(sys.executable, folder / "model", ()) as there,
        pytest.raises(RuntimeError, match="Is it installed"),
    ):
        there.run(PRESSES["SnapKV"], job.items[0], 20)


def test_an_environment_that_is_not_there_is_said(folder: Path) -> None:
    with pytest.raises(ValueError, match="cannot be started"), kvpress.peer("/nowhere/python", folder, ()):
        pass


def test_our_methods_take_the_parameters_of_their_presses() -> None:
    """Those of kvpress 0.5.5: a window of 64, votes averaged over 5, 4 sinks."""
    assert {name: spec for spec, name in kvpress.OURS.items()} == {
        "SnapKV": "snapkv:window=64,kernel=5,pooling=avg",
        "SnapKV(16, 31)": "snapkv:window=16,kernel=31,pooling=avg",
        "StreamingLLM": "streaming:sinks=4,positions=original",
    }
    for spec in kvpress.OURS:
        kvpress.methods.parsed(spec)
