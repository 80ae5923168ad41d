"""The engine: its clock, its phases, its stops, and further turns."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch

from harness.engine.attach import attached
from harness.engine.batch.running_sequence import UNION_EVERY, RunningSequence
from harness.engine.engine import Engine
from harness.engine.hf import KVCache
from harness.engine.sampling import Sampled
from methods.full import Full
from methods.quest import Quest
from tests.fast import PQ
from tests.tiny import prompt, tiny


def test_token_times_rise_and_seal_lies_before_the_second() -> None:
    with attached(tiny("llama"), PQ, budget=0.3) as kv:
        made = Engine(kv).generate(prompt(100), max_new_tokens=6)
    assert len(made.token_s) == len(made.tokens[0]) == 6
    assert made.token_s == sorted(made.token_s)
    assert made.sealed
    assert made.seal_s < made.token_s[1] - made.token_s[0]
    assert (made.measured["attended_prompt"], made.measured["attended_total"]) == (30, 30 + (1 + 2 + 3 + 4 + 5) / 5)


def test_a_single_token_needs_no_seal() -> None:
    with attached(tiny("llama"), PQ, budget=0.3) as kv:
        made = Engine(kv).generate(prompt(50), max_new_tokens=1)
    assert not made.sealed
    assert (made.stops, made.measured, len(made.token_s)) == (["length"], {}, 1)


@pytest.mark.parametrize(
    ("ids", "new", "says"),
    [
        ("a text", 4, "prompt should be token ids"),
        ([[1, 2, 3]], 4, "prompt should be token ids"),
        (torch.ones(3, dtype=torch.long), 4, "prompt should be token ids"),
        (torch.ones(1, 0, dtype=torch.long), 4, "with at least one token"),
        (torch.ones(1, 3), 4, "prompt should be token ids"),
        (torch.ones(1, 3, dtype=torch.long), 0, "max_new_tokens=0 should be at least 1"),
    ],
)
def test_what_is_no_prompt_is_refused_in_a_sentence(ids: Any, new: int, says: str) -> None:
    with attached(tiny("llama"), Full()) as kv, pytest.raises(ValueError, match=says):
        Engine(kv).generate(ids, max_new_tokens=new)


@pytest.mark.parametrize("context", [0, -1, 51])
def test_a_context_outside_its_prompt_is_refused(context: int) -> None:
    says = f"context_tokens={context} should be from 1 to the prompt's 50"
    with attached(tiny("llama"), Full()) as kv, pytest.raises(ValueError, match=says):
        Engine(kv).generate(prompt(50), max_new_tokens=2, context_tokens=context)


def unions(cache: KVCache) -> list[float]:
    """Distinct tokens per KV head in the last step, of every layer but the first."""
    rows = [layer.reads.rows.unflatten(1, (2, -1)).flatten(2).tolist() for layer in cache.layers[1:]]  # type: ignore[union-attr]
    return [fmean(len(set(head)) for sequence in one for head in sequence) for one in rows]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("select_per", ["query_head", "kv_head"])
def test_the_union_is_what_a_kv_head_reads_over_its_query_heads(
    batch: int, select_per: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = Quest(page_size=4, min_pages=1, dense_layers=(0,), select_per=select_per, last_page=True)
    with attached(tiny("llama"), method, budget=20) as kv:
        engine = Engine(kv)
        caches: list[KVCache] = []
        make = engine.cache
        engine.cache = lambda *given: caches.append(make(*given)) or caches[-1]  # type: ignore[method-assign, func-returns-value]
        counted: list[list[float]] = []  # per step, of the layers that choose
        note = RunningSequence.note_reads
        monkeypatch.setattr(
            RunningSequence, "note_reads", lambda slot, n: counted.append(unions(caches[0])) or note(slot, n)
        )
        made = engine.generate(prompt(100, batch=batch), max_new_tokens=UNION_EVERY + 3)
    counts = [fmean(one) for one in zip(*counted[::UNION_EVERY], strict=True)]
    assert made.measured["attended_prompt"] == pytest.approx((100 + 20 + 20) / 3)
    assert made.measured["union_prompt"] == pytest.approx((100 + sum(counts)) / 3)
    assert (made.measured["union_prompt"] > made.measured["attended_prompt"]) == (select_per == "query_head")


@pytest.mark.tokens
def test_each_sequence_of_a_batch_stops_for_itself() -> None:
    ids = prompt(30, batch=3)
    with attached(tiny("llama"), Full()) as kv:
        engine = Engine(kv)
        free = engine.generate(ids, max_new_tokens=8).tokens

        def at(count: int):  # type: ignore[no-untyped-def]
            return lambda tokens: "eos" if len(tokens) == count else None

        made = engine.generate(ids, max_new_tokens=8, stops=[at(2), at(99), at(5)])
    assert made.tokens == [free[0][:2], free[1], free[2][:5]]
    assert made.stops == ["eos", "length", "eos"]
    assert len(made.token_s) == 8


@pytest.mark.tokens
def test_protocol_context_with_a_full_budget_is_the_same_text() -> None:
    ids = prompt(64)
    with attached(tiny("qwen3"), PQ, budget=1.0) as kv:
        whole = Engine(kv).generate(ids, max_new_tokens=8)
        split = Engine(kv).generate(ids, max_new_tokens=8, context_tokens=50)
    assert split.tokens == whole.tokens
    assert split.question_s is not None
    assert split.measured["attended_prompt"] == 50


def test_sampling_follows_its_seed_and_its_limits() -> None:
    ids = prompt(20)

    def sample(seed: int, top_k: int = 0, top_p: float = 1.0) -> list[int]:
        sampler = Sampled(5.0, top_k, top_p, torch.Generator().manual_seed(seed))
        with attached(tiny("llama"), Full()) as kv:
            return Engine(kv).generate(ids, max_new_tokens=12, sampler=sampler).tokens[0]

    with attached(tiny("llama"), Full()) as kv:
        greedy = Engine(kv).generate(ids, max_new_tokens=12).tokens[0]
    assert sample(1) == sample(1) != sample(2)
    assert sample(3, top_k=1) == sample(4, top_p=1e-6) == greedy
