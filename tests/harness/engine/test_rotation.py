"""Rotations that depend on the length of the text give the tokens of `model.generate` on the whole prompt."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.engine.attach import Attachment, attached
from harness.engine.batch.running import RunningBatch
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.engine import Engine
from harness.engine.rotation import text_rotary
from methods.full import Full
from tests.methods.test_contract import small
from tests.tiny import BORDER, by_length, prompt, tiny

NEW = 16
LENGTHS = (40, 60, BORDER - 1, BORDER, BORDER + 1, 100)  # below the border, across it while decoding, and above it
CASES = [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic"), ("qwen3", "dynamic")]
each_model = pytest.mark.parametrize(("architecture", "kind"), CASES)
each_length = pytest.mark.parametrize("length", LENGTHS)


def text(length: int) -> Tensor:
    return prompt(length, seed=length)


@cache
def wanted(architecture: str, kind: str, length: int) -> list[int]:
    """What `generate` of a model that has seen no other text answers."""
    return by_loop(by_length(architecture, kind), text(length))[0]


def by_loop(model, ids: Tensor, **more) -> list[list[int]]:  # type: ignore[no-untyped-def]
    made = model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **more)
    answers: list[list[int]] = made[:, ids.shape[1] :].tolist()
    return answers


@each_model
@pytest.mark.parametrize("chunk", [None, 32])
def test_answers_are_those_of_generate_one_after_the_other(architecture: str, kind: str, chunk: int | None) -> None:
    """Whole or in chunks, sealed before the question or behind it, whatever ran before."""
    with attached(by_length(architecture, kind), Full()) as kv:
        engine = Engine(kv, prefill_chunk=chunk)
        for length in (100, *LENGTHS, 40):
            for context in (None, length - 10):
                made = engine.generate(text(length), max_new_tokens=NEW, context_tokens=context)
                assert made.tokens[0] == wanted(architecture, kind, length), (length, context)
                crosses = length <= BORDER < length + NEW - 1
                assert made.recomputed == (architecture == "phi3" and crosses)


@each_model
def test_a_batch_of_other_lengths_changes_no_answer(architecture: str, kind: str) -> None:
    with attached(by_length(architecture, kind), Full()) as kv:
        engine, slots = Engine(kv), []
        batch = RunningBatch(engine)
        for length in LENGTHS:
            slots.append(engine.join(batch, text(length), max_new_tokens=NEW))
            batch.step()
        while batch.sequences:
            batch.step()
    assert [slot.out.tokens[0] for slot in slots] == [wanted(architecture, kind, length) for length in LENGTHS]


@each_model
@pytest.mark.parametrize("chunk", [None, 32])
def test_transformers_own_loop_gives_the_same(architecture: str, kind: str, chunk: int | None) -> None:
    model = by_length(architecture, kind)
    with attached(model, Full()):
        for length in LENGTHS:
            assert by_loop(model, text(length), prefill_chunk_size=chunk) == [wanted(architecture, kind, length)]


@each_model
@pytest.mark.parametrize("lengths", [LENGTHS, (40, 60, BORDER - 1), (40, 55, 55)])
@pytest.mark.parametrize("chunk", [None, 32])
def test_rows_that_a_loop_pads_are_rotated_each_by_itself(
    architecture: str, kind: str, lengths: tuple[int, ...], chunk: int | None
) -> None:
    width, model = max(lengths), by_length(architecture, kind)
    ids = torch.cat([pad(text(length), (width - length, 0)) for length in lengths])
    mask = torch.cat([pad(torch.ones_like(text(length)), (width - length, 0)) for length in lengths])
    with attached(model, Full()):
        made = by_loop(model, ids, attention_mask=mask, prefill_chunk_size=chunk)
    assert made == [wanted(architecture, kind, length) for length in lengths]


@pytest.mark.parametrize("name", ["snapkv", "streaming", "shadowkv", "lm_infinite", "infllm", "pqcache"])
@each_length
def test_methods_compute_and_seal_the_whole_text_again(name: str, length: int) -> None:
    """In our loop as in transformers', which drops the cache of a LongRoPE text once, alone as in a padded batch."""
    model, method = by_length("phi3", "longrope"), small(name)
    budget = 0.5 if method.uses_budget else None
    ids = torch.cat([pad(text(length), (5, 0)), prompt(length + 5, seed=1)])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with attached(model, method, budget=budget) as kv:
        ours = Engine(kv).generate(text(length), max_new_tokens=NEW)
        assert by_loop(model, text(length)) == ours.tokens
        assert by_loop(model, ids, attention_mask=mask)[:1] == ours.tokens


@each_model
def test_nothing_of_a_text_is_left_in_the_models_own_module(architecture: str, kind: str) -> None:
    model, fresh = by_length(architecture, kind), by_length(architecture, kind)
    with attached(model, Full()) as kv:
        Engine(kv).generate(text(100), max_new_tokens=NEW)
        by_loop(model, text(100))
    assert by_loop(model, text(BORDER)) == by_loop(fresh, text(BORDER))
    assert "_prefill" not in vars(model)
    assert type(model.model.rotary_emb) is type(fresh.model.rotary_emb)


def test_a_rotation_that_is_the_same_for_all_lengths_is_left_alone() -> None:
    assert text_rotary(tiny("llama")) is None
    model = tiny("llama")
    rotary = model.model.rotary_emb
    with attached(model, Full()):
        assert model.model.rotary_emb is rotary


def test_angles_of_the_prompts_keys_stay_while_a_dynamic_text_grows() -> None:
    """As in `generate`: each new token is rotated for the text that it ends."""
    with attached(by_length("llama", "dynamic"), Full()) as kv:
        assert [kv.rotary.stage(tokens) for tokens in (1, BORDER, BORDER + 1, 100)] == [0, 0, BORDER + 1, 100]
        like, places = torch.empty(0), torch.arange(100)[None]
        cos, _ = kv.rotary.of_texts(like, places, [100])
        fresh = by_length("llama", "dynamic").model.rotary_emb
        assert torch.equal(cos, fresh(like, places)[0])
        parts = [kv.rotary.of_texts(like, part, [100])[0] for part in places.split(30, 1)]
        assert torch.equal(torch.cat(parts, 1), cos)


def test_a_cache_that_was_not_told_the_text_says_so() -> None:
    with attached(by_length("phi3", "longrope"), Full()) as kv:
        engine, cache = Engine(kv), kv.start(KVCache, capacity=BORDER + 4)
        cache.num_tokens = BORDER
        with pytest.raises(UnsupportedError, match=r"outgrows 64 tokens.*cache.expect_text"):
            engine.decode(text(1), cache, None)


def sealed_steps(kv: Attachment, length: int) -> int:
    made = Engine(kv, fidelity=1).generate(text(length), max_new_tokens=NEW)
    assert made.fidelity[0]["first_difference"] is None
    assert made.fidelity[0]["kl"] < 1e-5
    return int(made.fidelity[0]["steps"])


@each_model
def test_fidelity_compares_with_full_under_the_same_rotation(architecture: str, kind: str) -> None:
    """Of a text that is computed anew, the steps behind that."""
    with attached(by_length(architecture, kind), Full()) as kv:
        assert sealed_steps(kv, 100) == NEW - 1
        assert sealed_steps(kv, 60) == (NEW - 1 - 5 if architecture == "phi3" else NEW - 1)
