"""`model.generate` with our cache: its phases are told from the number of tokens in a forward, with no flag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.engine import Engine
from methods.abilities import ability
from methods.abilities.bounded_answer import CountedAnswer
from methods.abilities.repeat import Repeat
from methods.full import Full
from tests.methods.test_contract import attach, small, walked
from tests.tiny import prompt, tiny

NEW, CAPACITY = 6, 140
TURNS = (71, 23, 12)


def generate(model: PreTrainedModel, ids: Tensor, cache: Any, new: int = NEW, **more: Any) -> Tensor:
    """The whole text with `new` tokens more, by transformers' own loop. ids [B S] -> [B S+new]"""
    out: Tensor = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new,
        eos_token_id=-1,  # none, so that both loops may say any token
        do_sample=False,
        **more,
    )
    return out


def conversation(model: PreTrainedModel, cache: Any, **more: Any) -> list[list[list[int]]]:
    """Answers to several turns, each `generate` given all that was said before."""
    said, answers = torch.empty(1, 0, dtype=torch.long), []
    for seed, length in enumerate(TURNS):
        said = generate(model, torch.cat([said, prompt(length, seed=seed)], 1), cache, **more)
        answers.append(said[:, -NEW:].tolist())
    return answers


def by_engine(kv: Attachment) -> list[list[list[int]]]:
    """The same from our engine, which says its phases. The last token of an answer has not been fed: it comes first."""
    engine, answers = Engine(kv), []
    cache = engine.cache(prompt(CAPACITY), 0)
    pending = torch.empty(1, 0, dtype=torch.long)
    for seed, length in enumerate(TURNS):
        cache.open_turn()
        ids = torch.cat([pending, prompt(length, seed=seed)], 1)
        made = engine.complete(cache, engine.prefill(cache, ids), ids[:, :0], began=0.0, max_new_tokens=NEW)
        pending = torch.tensor(made.tokens)[:, -1:]
        answers.append(made.tokens)
    return answers


@pytest.mark.tokens
@walked
def test_turns_are_those_of_our_engine_and_sparse(name: str) -> None:
    with attach(small(name), 0.4) as kv:
        cache = kv.cache(capacity=CAPACITY)
        assert conversation(kv.model, cache) == by_engine(kv)
    assert cache.sealed
    whole = sum(TURNS) + 2 * NEW
    generated = [layer.attended.generated for layer in cache.layers]
    assert max(generated) == NEW - 1
    assert min(generated) == NEW - 1 or ability(kv.method, CountedAnswer)  # which may drop generated tokens
    if name == "kvpress" or ability(kv.method, Repeat):
        return  # it compresses the first prompt alone
    read = sum(layer.attended.prompt for layer in cache.layers)
    budgets = [layer.request.budget for layer in cache.layers]  # InfiniGen's is none in its first layer
    assert read <= sum(whole if budget is None else budget.tokens(whole, i) for i, budget in enumerate(budgets))
    assert not small(name).uses_budget or read < 0.65 * 3 * whole


def forwards(kv: Attachment, cache: KVCache, *lengths: int) -> list[bool]:
    """Whether the cache is sealed behind each forward of so many tokens."""
    states = []
    for length in lengths:
        with torch.inference_mode():
            kv.model(prompt(length), past_key_values=cache, use_cache=True)
        states.append(cache.sealed)
    return states


def test_what_a_forward_is() -> None:
    with attach(small("snapkv"), 0.4) as kv:
        cache = kv.cache(capacity=100)
        assert forwards(kv, cache, 30, 9, 1, 1, 2, 3, 1) == [False, False, True, True, False, False, True]
        assert forwards(kv, kv.cache(capacity=9), 1, 1) == [False, True]  # a prompt of one token
        cache = kv.cache(capacity=100)
        forwards(kv, cache, 30)
        cache.open_turn()  # a last chunk of one token
        assert forwards(kv, cache, 1, 1) == [False, True]
        cache = kv.cache(capacity=100)
        forwards(kv, cache, 60)
        cache.seal()
        assert cache.layers[0].attended.prompt == 24
        assert forwards(kv, cache, 1, 5, 1) == [True, False, True]
        cache = kv.start(KVCache, capacity=70)  # of our own engine, which says its phases
        Engine(kv, prefill_chunk=1).prefill(cache, prompt(60))
        assert not cache.sealed
        cache.seal()
        with pytest.raises(UnsupportedError):
            forwards(kv, cache, 2)


@pytest.mark.parametrize("how", ["assistant", "lookup", "crop"])
def test_assisted_generation_is_refused_by_name(how: str) -> None:
    model, ids = tiny("llama"), prompt(20)
    with attached(model, Full()) as kv, pytest.raises(UnsupportedError, match="assistant"):
        cache = kv.cache(capacity=60)
        if how == "crop":  # what transformers before 5.2x calls first
            cache.crop(1)
        more = {"assistant_model": tiny("mistral")} if how == "assistant" else {"prompt_lookup_num_tokens": 2}
        generate(model, ids, cache, **more)


@pytest.mark.tokens
@pytest.mark.parametrize("chunk", [9, 24])
def test_a_prefill_in_chunks_is_one_turn(chunk: int) -> None:
    with attach(small("snapkv"), 0.4) as kv:
        caches = [kv.cache(capacity=CAPACITY) for _ in range(2)]
        wanted = conversation(kv.model, caches[0])
        assert conversation(kv.model, caches[1], prefill_chunk_size=chunk) == wanted
