"""`make test-official KVPRESS=python`: presses keep here what they keep in NVIDIA's kvpress 0.5.5, and answer the same.

kvpress needs an older transformers, so it runs in an environment of its own. It loads the same weights and takes the
same token ids and ratio. It must be asked something after its compression, so all but the prompt's last token is
compressed on both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from harness.bridges.kvpress.building import build
from harness.bridges.kvpress.keep import ratio_for
from harness.bridges.kvpress.kvpress import KVPress
from harness.engine.attach import Attachment, attached
from harness.engine.engine import Engine
from methods.base import Method
from methods.snapkv import SnapKV
from methods.streaming import Streaming
from methods.tova import TOVA
from tests.fast import MODEL

VARIABLE = "KV_HARNESS_KVPRESS"
WORKER = Path(__file__).with_name("kvpress_worker.py")
NEW = 8  # tokens of an answer
BUDGET = 0.5
TIE = 1e-5  # of the lowest score that stays, within which other scores are as good as equal
SNAP, EXPECTED = {"name": "SnapKVPress"}, {"name": "ExpectedAttentionPress"}
PRESSES: dict[str, Mapping[str, Any]] = {
    "SnapKV": SNAP,
    "SnapKV(16, 31)": {"name": "SnapKVPress", "window_size": 16, "kernel_size": 31},
    "ExpectedAttention": EXPECTED,
    "TOVA": {"name": "TOVAPress"},
    "StreamingLLM": {"name": "StreamingLLMPress"},
    "KeyDiff": {"name": "KeyDiffPress"},
    "LagKV": {"name": "LagKVPress"},
    "PyramidKV": {"name": "PyramidKVPress"},
    "ChunkKV(SnapKV)": {"name": "ChunkKVPress", "press": SNAP},
    "AdaKV(ExpectedAttention)": {"name": "AdaKVPress", "press": EXPECTED},
    "CriticalKV(SnapKV)": {"name": "CriticalKVPress", "press": SNAP},
    "CriticalAdaKV(SnapKV)": {"name": "CriticalAdaKVPress", "press": SNAP},
    "CUR": {"name": "CURPress"},
    "NonCausalAttn": {"name": "NonCausalAttnPress"},
    "SimLayerKV": {"name": "SimLayerKVPress", "lazy_threshold": 0.9, "n_recent": 256},
}
OURS: dict[str, Method] = {  # our own methods with the parameters of a press; our H2O keeps recent tokens besides
    "SnapKV": SnapKV(window=64, kernel=5, pooling="avg"),
    "SnapKV(16, 31)": SnapKV(window=16, kernel=31, pooling="avg"),
    "StreamingLLM": Streaming(sinks=4, positions="original"),
    "TOVA": TOVA(),
}
SIDES = {name: (KVPress(press=dict(press)), press) for name, press in PRESSES.items()} | {
    f"our {name}": (method, PRESSES[name]) for name, method in OURS.items()
}
Kept = list[list[list[int]]]  # positions by layer and KV head, ascending


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """kvpress with our weights, in an empty folder: transformers would take ours, `kernels`, for a package of that
    name."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(
            f"no kvpress: run `make test-official KVPRESS=python`, of an environment that has it, or set {VARIABLE}"
        )
    folder, empty = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("empty")
    loaded = MODEL.load("fp32", "cpu")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    words = [python, "-c", WORKER.read_text(), str(folder), str(torch.get_num_threads())]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=empty, env=bare, **pipes) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def theirs(process: subprocess.Popen[str], press: Mapping[str, Any], ids: Sequence[int], kept: int) -> tuple[Kept, str]:
    """Return what kvpress keeps of a prompt, and its answer."""
    asked = {"press": press, "ratio": ratio_for(len(ids) - 1, kept), "new": NEW, "eos": []}
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asked | {"context": ids[:-1], "rest": ids[-1:]}) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, "kvpress has ended: its error stands above"
    answer = json.loads(line)
    return answer["kept"], answer["text"]


def ours(kv: Attachment, prompt: Tensor, chunk: int | None = None) -> tuple[Kept, list[int]]:
    """Return what we keep of `prompt` [1 S], which may come in chunks, and the tokens of the answer."""
    engine = Engine(kv, prefill_chunk=chunk)
    began, cache = perf_counter(), engine.cache(prompt, NEW)
    logits = engine.prefill(cache, prompt[:, :-1], whole=True)
    cache.seal()
    everything = list(range(prompt.shape[1] - 1))
    kept: Kept = []
    for layer in cache.layers:
        positions: Any = layer.kept_positions()  # type: ignore[attr-defined]
        heads = [everything] * layer.spec.num_kv_heads if positions is None else positions[0].tolist()
        kept.append([[place for place in head if place >= 0] for head in heads])
    answer = engine.complete(cache, logits, prompt[:, -1:], began=began, max_new_tokens=NEW)
    return kept, answer.tokens[0]


@contextmanager
def scores_of(method: Method) -> Iterator[list[Tensor]]:
    """Yield the scores [1 G S] that a press gives to the tokens of each layer, as they come."""
    scores: list[Tensor] = []
    press_class = type(build(method.press)) if isinstance(method, KVPress) else None
    if (score := getattr(press_class, "score", None)) is None:
        yield scores
        return

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        scores.append(score(*args, **kwargs))
        return scores[-1].clone()

    with mock.patch.object(press_class, "score", noted):
        yield scores


def differing(first: Kept, second: Kept, scores: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the layers and heads that keep other positions, but for ties with the lowest score that stays."""
    found = []
    for layer, (one_layer, other_layer) in enumerate(zip(first, second, strict=True)):
        for head, (one, other) in enumerate(zip(one_layer, other_layer, strict=True)):
            apart = [*{*one} ^ {*other}]
            if apart and scores:
                score = scores[layer][0, head]
                lowest = score[one].min()
                if bool(((score[apart] - lowest).abs() <= TIE * lowest.abs()).all()):
                    continue
            if apart:
                found.append((layer, head))
    return found


@pytest.mark.parametrize("name", SIDES)
def test_both_keep_and_answer_the_same(peer: subprocess.Popen[str], name: str) -> None:
    method, press = SIDES[name]
    loaded = MODEL.load("fp32", "cpu")
    prompt = torch.randint(0, 200, (1, 601), generator=torch.Generator().manual_seed(1))
    with attached(loaded.model, method, budget=BUDGET) as kv:
        assert kv.budget is not None
        with scores_of(method) as scores:
            here, tokens = ours(kv, prompt)
        in_chunks, _ = ours(kv, prompt, 300)
        kept = kv.budget.tokens(prompt.shape[1] - 1, 0) - isinstance(method, TOVA)  # has the next row in its budget
        there, text = theirs(peer, press, prompt[0].tolist(), kept)
    assert sum(len(head) for layer in there for head in layer) > 0
    assert differing(here, there, scores) == []
    assert differing(in_chunks, there, scores) == []
    assert loaded.tokenizer.decode(tokens, skip_special_tokens=True) == text
