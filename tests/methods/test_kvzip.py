"""KVzip against a plain recomputation of the released scoring, and against kvpress's own press."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from harness import Engine, attached
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.models.layer_kinds import layer_kinds
from methods.abilities.repeat import RepeatPrompts
from methods.base import Budget
from methods.full import Full
from methods.kvzip import KVzip, ZipKeep
from tests.tiny import by_length, eager, fresh, prompt, tiny

LENGTH, BUDGET, SINKS = 90, 0.3, 3
HEAD = tuple(prompt(LENGTH)[0, :5].tolist())
ASKED = RepeatPrompts(HEAD, first=(11, 12, 13), later=(21, 22), answer=(31, 32))


def sealed(kv: Attachment, ids: Tensor, chunk: int | None = None) -> tuple[KVCache, list[Tensor]]:
    """Return a sealed cache, and the scores by which it was evicted, [B G S] by layer."""
    engine, scores, close = Engine(kv, prefill_chunk=chunk), list[Tensor](), ZipKeep.close

    def noted(policy: ZipKeep, evicted: int) -> None:
        assert policy.scores is not None
        scores.append(policy.scores)
        close(policy, evicted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZipKeep, "close", noted)
        cache = engine.cache(ids, 4)
        engine.prefill(cache, ids, whole=True)
        cache.seal()
    return cache, scores


def reference(ids: Tensor, chunk: int, asked: RepeatPrompts, sinks: int, architecture: str = "llama") -> list[Tensor]:
    """Return the scores [B G S] of each layer that does not slide, by the weights of transformers' own forward in fp64:
    those of the keys that count, divided by their sum, to which a sink logit adds what is missing from 1."""
    model: Any = eager(architecture).double()
    model.config._experts_implementation = "eager"  # others take no fp64
    layers = [layer for layer, window in enumerate(layer_kinds(model.config).windows) if window is None]
    head, length, cache = len(asked.head), ids.shape[1], DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        scores = [torch.zeros(cache.layers[layer].keys.shape[:3]) for layer in layers]
        for first in range(head, length, chunk):
            piece, words = ids[:, first : first + chunk], asked.first if first == head else asked.later
            before = ids[:, max(head, first - 8) : first]
            spoken = [torch.tensor([tokens]).long().expand(len(ids), -1) for tokens in (words, asked.answer)]
            fed = torch.cat([spoken[0], before, spoken[1], piece], 1)
            weights = model(fed, past_key_values=cache, output_attentions=True).attentions
            places = [*range(max(head, min(sinks, first))), *range(first, first + piece.shape[1])]
            for number, layer in enumerate(layers):
                near = weights[layer][..., [*places, *range(length, length + fed.shape[1])]]
                missing = 1 - weights[layer].sum(-1, keepdim=True) if architecture == "gpt_oss" else 0
                near = (near / (near.sum(-1, keepdim=True) + missing)).unflatten(1, (2, -1)).amax((2, 3))
                columns = slice(len(places) - piece.shape[1], len(places))
                scores[number][:, :, first : first + piece.shape[1]] = near[..., columns]
            for held in cache.layers:
                held.keys, held.values = held.keys[:, :, :length], held.values[:, :, :length]
    for of_layer in scores:
        of_layer[:, :, : max(head, sinks)] = float("inf")
    return scores


def kept_by(cache: KVCache, sequence: int = 0) -> list[list[list[int]]]:
    """Return the positions that stay, by layer and head."""
    layers: Any = cache.layers
    return [[[p for p in head if p >= 0] for head in layer.positions[sequence].tolist()] for layer in layers]


@pytest.mark.parametrize("chunk", [40, 2000])
@pytest.mark.parametrize("share", ["model", "layer", "head"])
def test_the_keys_with_the_largest_weights_stay(chunk: int, share: Any) -> None:
    ids = torch.cat([prompt(LENGTH), torch.cat([prompt(LENGTH)[:, :5], prompt(LENGTH - 5, seed=1)], 1)])
    wanted = reference(ids, chunk, ASKED, SINKS)
    with attached(
        tiny("llama"), KVzip(chunk=chunk, sinks=SINKS, share=share), budget=BUDGET, repeat_prompts=ASKED
    ) as kv:
        cache, scores = sealed(kv, ids, 33)
    size = int(BUDGET * LENGTH)
    for mine, plain in zip(scores, wanted, strict=True):
        assert_close(mine, plain, check_dtype=False)
    for sequence in range(2):
        ranked = sorted(
            (float(score), layer, head, place)
            for layer, of_layer in enumerate(scores)
            for head, row in enumerate(of_layer[sequence])
            for place, score in enumerate(row)
        )[::-1]
        best, kept = ranked[: size * 2 * 3], kept_by(cache, sequence)
        assert sum(len(head) for layer in kept for head in layer) == size * 2 * 3
        for layer, heads in enumerate(kept):
            of_layer = [(head, place) for _, where, head, place in ranked if where == layer]
            count = sum(where == layer for _, where, *_ in best) if share == "model" else 2 * size
            assert abs(sum(map(len, heads)) - count) < 2
            if share == "head":
                of_layer = [one for head in range(2) for one in [x for x in of_layer if x[0] == head][:size]]
            assert {(head, place) for head, row in enumerate(heads) for place in row} == {
                *of_layer[: sum(map(len, heads))]
            }


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss", "phi4", "smollm3"])
def test_every_family_is_scored_as_it_attends(architecture: str) -> None:
    """Norms of queries, another scale, sink logits, a partial rotation, none. A dense layer takes nothing of others."""
    ids, budget = prompt(LENGTH), Budget(BUDGET, dense_layers=(1,))
    with attached(tiny(architecture), KVzip(chunk=40), budget=budget, repeat_prompts=ASKED) as kv:
        cache, scores = sealed(kv, ids)
    for mine, plain in zip(scores, reference(ids, 40, ASKED, 4, architecture), strict=True):
        assert_close(mine, plain, atol=1e-5, rtol=1e-4, check_dtype=False)
    first, dense, *others = [layer.positions for layer in cache.method_layers]  # type: ignore[attr-defined]
    assert dense is None
    assert sum(int((places >= 0).sum()) for places in (first, *others)) == 27 * 2 * (1 + len(others))


@pytest.mark.skipif(find_spec("kvpress") is None, reason="kvpress is not installed: `make setup` does it")
@pytest.mark.parametrize("share", ["model", "layer"])
def test_kvpress_keeps_the_same(share: Any) -> None:
    """Its press, whose tokens per layer are no multiple of the heads, and so may be one more or fewer here."""
    from kvpress import KVzipPress

    ids, model = prompt(LENGTH), tiny("llama")
    words = {True: [11, 12, 13], False: [21, 22]}

    class Encoder:
        def encode(self, text: str, **_: object) -> Tensor:
            return torch.tensor([words["starting" not in text]])

    press: Any = KVzipPress(compression_ratio=1 - 27 / LENGTH + 1e-9, layerwise=share == "layer", chunk_size=40)
    press._context_ids, press._cache = ids, DynamicCache()
    press._suffix_ids = torch.tensor([[31, 32]])
    layers: Any = model.model.layers
    try:
        with torch.no_grad():
            model(ids, past_key_values=press._cache)
            press._perform_kvzip_compression(model, Encoder())
        masked = [layer.self_attn.masked_key_indices for layer in layers]
    finally:
        for layer in layers:
            layer.self_attn.masked_key_indices = None
    asked = replace(ASKED, head=())
    with attached(model, KVzip(chunk=40, share=share), budget=27, repeat_prompts=asked) as kv:
        cache, scores = sealed(kv, ids)
    assert_close(torch.stack(scores)[..., 4:], press.score_val[..., 4:].float())
    for (_, heads, places), ours in zip(masked, kept_by(cache), strict=True):
        gone = {*zip(heads.tolist(), places.tolist(), strict=True)}
        theirs = {(head, place) for head in range(2) for place in range(LENGTH)} - gone
        assert len(theirs ^ {(head, place) for head, row in enumerate(ours) for place in row}) <= (share == "model")


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "dynamic"])
def test_a_repetition_reads_the_prompt_and_leaves_nothing_behind(architecture: str) -> None:
    """It does not turn the angles of a text that is short enough: they stay those of the plain model."""
    plain, length = tiny("llama" if architecture == "dynamic" else architecture), 60
    ids, model = prompt(LENGTH)[:, :length], by_length("llama", "dynamic") if architecture == "dynamic" else plain
    with attached(model, KVzip(chunk=40), budget=BUDGET, repeat_prompts=ASKED) as kv:
        engine = Engine(kv)
        cache = engine.cache(ids, 4)
        engine.prefill(cache, ids, whole=True)
        before = [{name: x.clone() for name, x in state.items()} for state in cache.contents()]
        fed = list[tuple[Tensor, Tensor]]()
        kv.read_again(lambda piece, cache: fed.append((piece, engine.run(piece, cache))), cache, ids)
        after, tokens, count = cache.contents(), cache.num_tokens, len(fed)
        kv.budget = Budget(1.0)
        kv.read_again(lambda piece, cache: fed.append((piece, piece)), cache, ids)
    assert (tokens, len(fed)) == (length, count)
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(x, other[name]) for name, x in one.items())
    with attached(plain, Full()) as kv, torch.no_grad():
        for piece, logits in fed:
            whole = plain(torch.cat([ids, piece], 1), past_key_values=kv.cache(capacity=300), logits_to_keep=1).logits
            assert_close(logits, whole[:, -1], atol=1e-4, rtol=1e-3)
    assert [piece.shape[1] for piece, _ in fed] == [5 + 40, 4 + 8 + 15]


def test_a_further_turn_keeps_all_that_it_brings_and_says_so() -> None:
    with attached(tiny("llama"), KVzip(), budget=BUDGET) as kv:
        engine, (cache, _) = Engine(kv), sealed(kv, prompt(LENGTH))
        first, more = kept_by(cache), prompt(20, seed=2)
        cache.open_turn()
        engine.cache(more, 1)
        cache.grow(20)
        engine.prefill(cache, more, whole=True)
        cache.seal()
        assert kept_by(cache) == [[[*head, *range(LENGTH, LENGTH + 20)] for head in layer] for layer in first]
        assert str(cache.fallback).startswith("only the first prompt is repeated")


@pytest.mark.filterwarnings("ignore:.* was never sealed")
def test_loops_of_ones_own_are_served_if_they_show_all_tokens() -> None:
    ids, model = prompt(LENGTH), tiny("llama")
    with attached(model, KVzip(), budget=BUDGET, repeat_prompts=ASKED) as kv:
        tokens = Engine(kv).generate(ids, max_new_tokens=6).tokens[0]
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert generated[0, LENGTH:].tolist() == tokens
        cache, fed = kv.cache(capacity=LENGTH + 6), ids
        for token in tokens:
            assert int(model(fed, past_key_values=cache).logits[0, -1].argmax()) == token
            fed = torch.tensor([[token]])
        assert torch.is_grad_enabled()
        cache, embedded = kv.cache(capacity=LENGTH + 6), model.get_input_embeddings()(ids)
        model(ids[:, :50], past_key_values=cache)
        model(inputs_embeds=embedded[:, 50:], past_key_values=cache)
        with pytest.raises(ValueError, match="not told the token ids"):
            model(fed, past_key_values=cache)
        mask = torch.ones(2, LENGTH, dtype=torch.long).index_fill(1, torch.tensor([0]), 0)
        with pytest.raises(ValueError, match="without padding"):
            model.generate(ids.expand(2, -1), attention_mask=mask, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("head", [40, LENGTH])
def test_a_budget_that_the_template_takes_says_so(head: int) -> None:
    ids = prompt(LENGTH)
    asked = replace(ASKED, head=tuple(ids[0, :head].tolist()))
    with attached(tiny("llama"), KVzip(), budget=27, repeat_prompts=asked) as kv:
        cache, _ = sealed(kv, ids)
        assert kept_by(cache) == [[[*range(27)]] * 2] * 3
        assert str(cache.fallback) == f"27 first tokens stay: {min(head, 89)} are sinks or begin the chat template"


@pytest.mark.parametrize("window", [None, LENGTH + 50])
def test_what_cannot_be_repeated_rightly_is_refused(window: int | None) -> None:
    """Rows whose templates differ, and a repetition from which a model that slides would not see all."""
    rows, words = torch.cat([prompt(LENGTH), prompt(LENGTH, seed=3)]), r"begin with \[5, 0\] tokens"
    if window is not None:
        rows, words = rows[:1], f"slides over {window} tokens and this text takes {LENGTH + 5 + LENGTH - 5}"
    with attached(fresh("mistral", sliding_window=window), KVzip(), budget=0.3, repeat_prompts=ASKED) as kv:
        with pytest.raises(ValueError, match=words):
            Engine(kv).generate(rows, max_new_tokens=3)
        assert len(Engine(kv).generate(rows[:1, :40], max_new_tokens=3).tokens[0]) == 3


@pytest.mark.parametrize("context", [None, LENGTH - 9])
def test_the_second_reading_counts_in_the_seal(context: int | None) -> None:
    with attached(tiny("llama"), KVzip(), budget=BUDGET) as kv:
        repeat = ZipKeep.repeated
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ZipKeep, "repeated", lambda *given: (sleep(0.05), repeat(*given)))
            out = Engine(kv).generate(prompt(LENGTH), max_new_tokens=3, context_tokens=context)
    assert out.seal_s is not None
    assert out.seal_s > 0.15
    assert (out.token_s[0] < 0.15) == (context is None)
    assert out.token_s[1] > 0.15
