"""A prompt goes layer by layer, and nothing that is computed differs by a bit from chunk after chunk."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config.settings import Settings, recorded_defaults
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.jobs.planning.effective import effective
from harness.models.random import Random
from methods.base import AttnInput, Method
from methods.full import Full
from tests.methods.test_contract import attach, in_each_place, small
from tests.tiny import prompt, tiny

CHUNK, CAPACITY = 23, 160


def by_layer(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
    return engine.prefill(cache, ids)


@torch.inference_mode()
def by_chunk(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
    """All layers for one chunk, then all for the next: the order in which a foreign loop runs."""
    for chunk in ids.split(CHUNK, dim=1):
        logits = engine.run(chunk, cache)
    return logits


@torch.inference_mode()
def answered(kv: Attachment, prefill: Any, batch: int = 1) -> list[Tensor]:
    """Logits of a prompt, its seal, a question token by token, a further turn and its steps."""
    engine, cache = Engine(kv, prefill_chunk=CHUNK), kv.start(KVCache, capacity=CAPACITY, batch=batch)
    logits = []
    for seed, length in enumerate((70, 41)):
        cache.open_turn()
        logits.append(prefill(engine, cache, prompt(length, batch, seed)))
        cache.seal()
        logits += [engine.run(token, cache) for token in prompt(4, batch, seed + 2).split(1, dim=1)]
    return logits


@in_each_place
def test_logits_are_those_of_chunk_after_chunk(name: str, placement: str) -> None:
    method = small(name)
    with attach(method, 0.5 if method.uses_budget else None, placement=placement) as kv:
        ways = [answered(kv, prefill, batch=2) for prefill in (by_layer, by_chunk)]
    assert all(map(torch.equal, *ways))


def order_of(kv: Attachment, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(layer, first position) of every attention call, while 70 tokens are prefilled."""
    engine, cache = Engine(kv, prefill_chunk=30), kv.start(KVCache, capacity=CAPACITY)
    seen, attend = [], cache.attend

    def noting(layer: int, x: AttnInput) -> Tensor:
        seen.append((layer, x.start))
        return attend(layer, x)

    monkeypatch.setattr(cache, "attend", noting)
    engine.prefill(cache, prompt(70))
    return seen


def test_only_a_model_that_runs_its_own_forward_keeps_the_order_of_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = (0, 30, 60)
    with attached(tiny("llama"), Full()) as kv:
        assert order_of(kv, monkeypatch) == [(layer, start) for layer in range(3) for start in starts]
    with attached(tiny("gpt_oss"), Full()) as kv:
        assert order_of(kv, monkeypatch) == [(layer, start) for start in starts for layer in range(4)]


def test_others_are_let_in_once_between_two_chunks_worth_of_work() -> None:
    for architecture in ("llama", "gpt_oss"):
        with attached(tiny(architecture), Full()) as kv:
            engine, let_in = Engine(kv, prefill_chunk=30), []
            cache = kv.start(KVCache, capacity=CAPACITY)
            engine.prefill(cache, prompt(70), between=lambda: let_in.append(1))  # noqa: B023
            assert len(let_in) == 2


def test_a_prompt_that_finds_no_room_is_refused_before_it_is_computed() -> None:
    with attached(tiny("llama"), Full()) as kv:
        cache = kv.start(KVCache, capacity=60)
        with pytest.raises(ValueError, match="capacity=60 and 70"):
            Engine(kv, prefill_chunk=30).prefill(cache, prompt(70))
        assert cache.num_tokens == 0


def test_prompts_come_in_chunks_on_a_gpu_unless_that_changes_what_is_read() -> None:
    info = Random(shape="tiny").describe()

    def chunk(device: str, method: Method, asked: int | None = None) -> int | None:
        return effective(Settings(device=device, prefill_chunk=asked), method, info).prefill_chunk

    assert [chunk(device, Full()) for device in ("cpu", "cuda", "cuda:1")] == [None, 8192, 8192]
    assert (chunk("cuda", small("infllm")), chunk("cuda", small("infllm"), 512)) == (None, 512)
    assert (chunk("cpu", Full(), 512), chunk("cuda", Full(), 100_000)) == (512, 100_000)
    unasked = recorded_defaults("cuda")
    assert asdict(effective(Settings(device="cuda"), Full(), info))["prefill_chunk"] == unasked["prefill_chunk"]
