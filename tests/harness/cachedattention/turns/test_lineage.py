"""What is stored is used for nothing but what it was computed for: not by other calibrations, not as an uncut text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
