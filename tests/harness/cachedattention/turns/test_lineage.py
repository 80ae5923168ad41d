"""What is stored is used for nothing but what it was computed for: not by other calibrations, not as an uncut text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cachedattention.turns.caches import CachesBetweenTurns, DevicePrefix
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
    """InfiniGen's directions choose what is read, and what was read is in the rows of the answer."""
    loaded = Random(shape="tiny", layers=2).load("fp32", "cpu")
    found = []
    for seed in (1, 2, 1):
        model = Random(shape="tiny", layers=2).load("fp32", "cpu").model
        with attached(model, InfiniGen(calibration_tokens=64), budget=0.2, calibration=prompt(64, seed=seed)) as kv:
            found.append(fingerprint(kv, loaded).digest)
    assert found[0] == found[2] != found[1]


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


def test_rows_of_a_repetitive_text_are_those_behind_the_cut() -> None:
    """Blocks of before the cut hold the same tokens as those behind it, and other rows."""
    with attach(Full(), None) as kv, plain(kv, DevicePrefix) as device, torch.inference_mode():
        rows = []
        for histories in (stored(kv, host=9 * MB), device):
            talk = Talk(kv, histories)
            talk.turn([7] * 90)
            kept = histories.shorten("alice", talk.fed, 60, CAPACITY, sinks=20)
            found = histories.resume("alice", kept, CAPACITY)
            assert found.reused == len(kept)
            found.cache.await_layers()
            rows.append([state["v0"] for state in found.cache.contents()])
        assert all(torch.equal(one, other) for one, other in zip(*rows, strict=True))
