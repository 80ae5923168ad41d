"""A prompt goes layer by layer, and each layer seals as soon as it is through where rows leave the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache as once
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harness.config.settings import Settings, recorded_defaults
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from harness.jobs.resolve import resolve
from harness.models.random import Random
from methods.base import AttnInput, KVLayer, Method
from methods.full import Full
from methods.tiers.tier import DEVICE
from tests.methods.test_contract import NAMES, attach, in_each_place, small
from tests.quick import slow_if
from tests.tiny import SHAPE, prompt, tiny

CHUNK, CAPACITY = 23, 160
OFFLOADING = [name for name in NAMES if small(name).offloads]
SHRINKING = {"full_offloaded", "infinigen", "infllm", "pqcache", "quest", "rocketkv", "shadowkv", "sparq"}
PLACES = [(name, place) for name in OFFLOADING for place in ("host", "disk")]
offloading = pytest.mark.parametrize("name", OFFLOADING)
off_the_device = pytest.mark.parametrize(
    "place", slow_if(lambda place: place[1] == "disk" and place[0] != "pqcache", PLACES), ids="-".join
)


def attach_small(name: str, placement: str) -> Any:
    method = small(name)
    return attach(method, 0.5 if method.uses_budget else None, placement=placement)


@torch.inference_mode()
def answered(kv: Attachment, whole: bool, chunk: int | None = CHUNK) -> list[Tensor]:
    """Logits of a prompt, its steps, a further turn and its steps."""
    engine, cache = Engine(kv, prefill_chunk=chunk), kv.start(KVCache, capacity=CAPACITY, batch=2)
    logits = []
    for seed, length in enumerate((70, 41)):
        cache.open_turn()
        logits.append(engine.prefill(cache, prompt(length, 2, seed), whole=whole))
        assert cache.has_closed == whole
        cache.seal()
        logits += [engine.run(token, cache) for token in prompt(4, 2, seed + 2).split(1, dim=1)]
    return logits


@off_the_device
def test_closing_early_changes_no_bit(place: tuple[str, str]) -> None:
    with attach_small(*place) as kv:
        assert all(map(torch.equal, answered(kv, whole=True), answered(kv, whole=False)))


@pytest.mark.tokens
def test_a_limited_pool_closes_behind_the_layer_that_guesses_for_it() -> None:
    """Its queries come with the layer before, and the seal lets the prompt pass through the pool by them."""
    made = []
    with attach(replace(small("infinigen"), pool_capacity=60), 0.3, placement="host") as kv:  # type: ignore[type-var]
        for whole in (True, False):
            engine, cache = Engine(kv, prefill_chunk=CHUNK), kv.start(KVCache, capacity=76)
            logits = engine.prefill(cache, prompt(70), whole=whole)
            made.append(engine.complete(cache, logits, prompt(0), began=0.0, max_new_tokens=6))
    assert made[0].tokens == made[1].tokens


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
        with pytest.raises(UnsupportedError, match="whole"):
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


@once
@torch.inference_mode(mode=False)
def deep() -> PreTrainedModel:
    """Six layers, so that two of them are few."""
    torch.manual_seed(7)
    config = AutoConfig.for_model("llama", **SHAPE | {"num_hidden_layers": 6}, initializer_range=0.15)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def held(layers: Sequence[KVLayer]) -> list[int]:
    """Bytes on the device by layer; what two share, or what one reaches through the one before, counts once."""
    behind = [footprint(layers[number:])[DEVICE] for number in range(len(layers))] + [0]
    return [one - other for one, other in pairwise(behind)]


@off_the_device
@pytest.mark.parametrize("turns", [1, 2])
@torch.inference_mode()
def test_at_most_two_layers_hold_more_than_sealed_ones_do(
    place: tuple[str, str], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at behind every chunk of every layer, and around every close; in a further turn as well, where the layers
    that it has not reached are sealed as in the turn before."""
    method = small(place[0])
    budget, text = 0.5 if method.uses_budget else None, prompt(64, seed=9)
    with attached(deep(), method, budget=budget, placement=place[1], calibration=text) as kv:
        engine, cache = Engine(kv, prefill_chunk=CHUNK), kv.start(KVCache, capacity=CAPACITY)
        for seed in range(turns - 1):
            engine.prefill(cache, prompt(50, seed=seed), whole=True)
            cache.seal()
            engine.run(prompt(1), cache)
            cache.open_turn()
        seen: list[list[int]] = [held(cache.layers)]
        attend, close = cache.attend, cache.close
        note = lambda: seen.append(held(cache.layers))  # noqa: E731
        monkeypatch.setattr(cache, "attend", lambda layer, x: (attend(layer, x), note())[0])
        monkeypatch.setattr(cache, "close", lambda layer: (note(), close(layer), note()))
        engine.prefill(cache, prompt(70, seed=5), whole=True)
    sealed = list(map(max, seen[0], seen[-1]))
    more = [sum(now > later for now, later in zip(sizes, sealed, strict=True)) for sizes in seen]
    assert len(seen) == 1 + len(cache.layers) * (4 + 2)
    assert max(more) <= 2
    if place[0] in SHRINKING:
        assert max(more) >= 1


def by_layer(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
    return engine.prefill(cache, ids)


@torch.inference_mode()
def by_chunk(engine: Engine, cache: KVCache, ids: Tensor) -> Tensor:
    """All layers for one chunk, then all for the next: the order in which a foreign loop runs."""
    for chunk in ids.split(CHUNK, dim=1):
        logits = engine.run(chunk, cache)
    return logits


@torch.inference_mode()
def order_answered(kv: Attachment, prefill: Any, batch: int = 1) -> list[Tensor]:
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
        ways = [order_answered(kv, prefill, batch=2) for prefill in (by_layer, by_chunk)]
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


def test_a_prompt_that_finds_no_room_is_refused_before_it_is_computed() -> None:
    with attached(tiny("llama"), Full()) as kv:
        cache = kv.start(KVCache, capacity=60)
        with pytest.raises(ValueError, match="capacity=60 and 70"):
            Engine(kv, prefill_chunk=30).prefill(cache, prompt(70))
        assert cache.num_tokens == 0


def test_prompts_come_in_chunks_on_a_gpu_unless_that_changes_what_is_read() -> None:
    info = Random(shape="tiny").describe()

    def chunk(device: str, method: Method, asked: int | None = None) -> int | None:
        return resolve(Settings(device=device, prefill_chunk=asked), method, info).settings.prefill_chunk

    assert [chunk(device, Full()) for device in ("cpu", "cuda", "cuda:1")] == [None, 8192, 8192]
    assert (chunk("cuda", small("infllm")), chunk("cuda", small("infllm"), 512)) == (None, 512)
    assert (chunk("cpu", Full(), 512), chunk("cuda", Full(), 100_000)) == (512, 100_000)
    unasked = recorded_defaults("cuda")
    assert asdict(resolve(Settings(device="cuda"), Full(), info).settings)["prefill_chunk"] == unasked["prefill_chunk"]
