"""What is stored is used for nothing but what it was computed for: not by other calibrations, not as an uncut text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from harness.cachedattention.store.fingerprint import content_digest
from harness.cachedattention.turns.caches import CachesBetweenTurns
from harness.cachedattention.turns.opening import fingerprint
from harness.engine.attach import attached
from harness.models.random import Random
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from tests.harness.cachedattention.turns.test_caches import CAPACITY, MB, Talk, plain, stored
from tests.methods.test_contract import attach
from tests.tiny import prompt


def test_another_calibration_is_another_fingerprint() -> None:
    """InfiniGen's directions choose what is read, and what was read is in the rows of the answer.

    The model is one and the same, so what was prepared for another text must not be taken."""
    loaded = Random(shape="tiny", layers=2).load("fp32", "cpu")
    method, found = InfiniGen(calibration_tokens=64), []
    for seed in (1, 2, 1):
        with attached(loaded.model, method, budget=0.2, calibration=prompt(64, seed=seed)) as kv:
            found.append(fingerprint(kv, loaded).digest)
    assert found[0] == found[2] != found[1]


def adapters(model: PreTrainedModel) -> Iterator[None]:
    """Attaches an adapter, switches it off and on, and changes its strength."""
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    yield
    model.disable_adapters()
    yield
    model.enable_adapters()
    model.model.layers[0].self_attn.q_proj.scaling["default"] *= 3
    yield


def writes(model: PreTrainedModel) -> Iterator[None]:
    """Writes other numbers into weights, in ways of which torch counts only the first, and moves numbers."""
    other = {name: x + 0.01 for name, x in model.state_dict().items()}
    weight = model.model.layers[0].self_attn.q_proj.weight
    model.load_state_dict(other)
    yield
    weight.data = weight.data.clone() * 2
    yield
    weight.data.copy_(weight.data.roll(1, 0))
    yield
    weight.data[0, 0] += 1
    yield


def turns(model: PreTrainedModel) -> Iterator[None]:
    """Rotates and scales otherwise, by numbers that a checkpoint does not hold."""
    rotary: Any = model.model.rotary_emb
    rotary.inv_freq.mul_(0.5)
    yield
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
    yield


@pytest.mark.parametrize("change", [writes, adapters, turns])
def test_other_weights_are_prepared_for_again_and_have_another_fingerprint(
    change: Callable[[PreTrainedModel], Iterator[None]],
) -> None:
    loaded = Random(shape="tiny", layers=2).load("fp32", "cpu")
    method, text = InfiniGen(calibration_tokens=64), prompt(64)

    def prepared(model: PreTrainedModel) -> tuple[object, str, str]:
        with attached(model, method, budget=0.2, calibration=text) as kv:
            return kv.prepared, content_digest(kv.prepared), fingerprint(kv, loaded).digest

    before, *seen = prepared(loaded.model)
    assert prepared(loaded.model)[0] is before
    prints = set(seen[1:])
    for number, _ in enumerate(change(loaded.model), 2):
        _, digest, mark = prepared(loaded.model)
        assert (digest, mark) == prepared(deepcopy(loaded.model))[1:]  # of which nothing is remembered
        prints.add(mark)
        assert len(prints) == number


@pytest.mark.tokens
@pytest.mark.parametrize("method", [Full(), H2O()], ids=["full", "h2o"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_another_run_computes_a_text_that_was_cut_here(method: Any, sinks: int, tmp_path: Path) -> None:
    text, new = prompt(80)[0].tolist(), prompt(20, seed=1)[0].tolist()
    with attach(method, 0.8) as kv:
        first = stored(kv, tmp_path, disk=9 * MB)
        talk = Talk(kv, first)
        talk.turn(text)
        kept = first.shorten("alice", talk.fed, 40, CAPACITY, sinks=sinks)
        assert first.resume("alice", kept, CAPACITY).reused == len(kept)
        first.close()
        second = stored(kv, tmp_path, disk=9 * MB)
        with plain(kv, CachesBetweenTurns) as recompute:
            talks = [Talk(kv, histories) for histories in (second, recompute)]
            for one in talks:
                one.fed = list(kept)
                one.turn(new)
        assert talks[0].said == talks[1].said
        assert [one.found[0].reused for one in talks] == [0, 0]
        assert second.resume("alice", talks[0].fed, CAPACITY).reused == len(talks[0].fed)
        second.close()
