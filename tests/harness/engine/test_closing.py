"""A prompt goes layer by layer, and each layer seals as soon as it is through where rows leave the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine.attach import Attachment
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.engine import Engine
from tests.methods.test_contract import QUICK, attach, in_places, small
from tests.tiny import prompt

CHUNK, CAPACITY = 23, 160


def attach_small(name: str, placement: str) -> Any:
    method = small(name)
    return attach(method, 0.5 if method.uses_budget else None, placement=placement)


def test_layers_close_one_after_the_other_where_rows_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(placement: str, whole: bool) -> list[str]:
        seen: list[str] = []
        with attach_small("pqcache", placement) as kv:
            engine, cache = Engine(kv, prefill_chunk=40), kv.start(KVCache, capacity=CAPACITY)
            attend, close = cache.attend, cache.close
            monkeypatch.setattr(cache, "attend", lambda layer, x: (seen.append(f"chunk {layer}"), attend(layer, x))[1])
            monkeypatch.setattr(cache, "close", lambda layer: (seen.append(f"close {layer}"), close(layer)))
            engine.prefill(cache, prompt(70), whole=whole)
        return seen

    closing = [step for n in range(3) for step in (f"chunk {n}", f"chunk {n}", f"close {n}")]
    assert order("host", True) == closing
    assert order("host", False) == order("device", True) == [step for step in closing if step.startswith("chunk")]


def test_a_prompt_that_was_whole_takes_no_more_before_a_further_turn() -> None:
    with attach_small("pqcache", "host") as kv:
        engine, cache = Engine(kv), kv.start(KVCache, capacity=CAPACITY)
        engine.prefill(cache, prompt(40), whole=True)
        with pytest.raises(UnsupportedError):
            engine.prefill(cache, prompt(5))
        cache.seal()
        cache.open_turn()
        engine.prefill(cache, prompt(5))


@pytest.mark.parametrize("placement", ["device", "host"])
def test_an_answer_of_one_token_is_sealed_only_if_its_layers_closed(placement: str) -> None:
    with attach_small("sparq", placement) as kv:
        made = Engine(kv).generate(prompt(40), max_new_tokens=1)
    assert made.sealed == (placement == "host")
    assert (made.seal_s is not None) == made.sealed


def by_layer(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
    return engine.prefill(cache, ids)


def closing_early(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
    logits = engine.prefill(cache, ids, whole=True)
    assert cache.has_closed == cache.closes_early
    return logits


def by_chunk(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
    """Compute all layers for one chunk, then all for the next: the order in which a foreign loop runs."""
    for chunk in ids.split(CHUNK, dim=1):
        logits = engine.run(chunk, cache)
    return logits


@torch.inference_mode()
def answered(kv: Attachment, prefill: Callable[[Engine, KVCache, Tensor], Tensor]) -> list[Tensor]:
    """Return the logits of a prompt, its seal, steps, a further turn and its steps."""
    engine, cache = Engine(kv, prefill_chunk=CHUNK), kv.start(KVCache, capacity=CAPACITY, batch=2)
    logits = []
    for seed, length in enumerate((70, 41)):
        cache.open_turn()
        logits.append(prefill(engine, cache, prompt(length, 2, seed)))
        cache.seal()
        logits += [engine.run(token, cache) for token in prompt(4, 2, seed + 2).split(1, dim=1)]
    return logits


@pytest.mark.parametrize(
    ("name", "placement"),
    [(name, place) for name, place in in_places("device", "host") if place == "host" or name in QUICK],
)
def test_logits_are_those_of_chunk_after_chunk(name: str, placement: str) -> None:
    with attach_small(name, placement) as kv:
        wanted = answered(kv, by_chunk)
        for prefill in (by_layer, closing_early):
            assert all(map(torch.equal, answered(kv, prefill), wanted))
