"""Rows of prompt and answer, ranked anew while the answer grows, and what stays of an answer with its own budget."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from harness import Engine, attached
from harness.engine.footprint import footprint
from harness.engine.saved_state import Snapshot
from harness.prompts.teacher import Forced
from kernels.dispatch import use_backend
from methods.abilities import refuse
from methods.abilities.evict_every import EvictEvery
from methods.abilities.keep_generated import NEWEST, KeepGenerated, KeepRandom, KeepScored
from methods.abilities.mass import Mass
from methods.adakv import AdaKV
from methods.base import AttnInput, Budget, LayerWorkload, Method
from methods.full import Full
from methods.h2o import H2O
from methods.layers import Layer
from methods.oracle import Oracle
from methods.snapkv import SnapKV
from methods.streaming import Streaming
from tests.batches import together
from tests.methods.synthetic import SHAPES, Sequences, attention
from tests.methods.test_contract import NAMES, small
from tests.quick import mostly_slow
from tests.tape import Tape
from tests.tiny import prompt, tiny

needs_kvpress = pytest.mark.skipif(
    find_spec("kvpress") is None, reason="kvpress is not installed: `make setup` does it"
)
PROMPT, BUDGET, EVERY, STEPS = 70, 40, 12, 50
RANKED = (EvictEvery(EVERY),)
EVICTING = [name for name in NAMES if EvictEvery.refusal(small(name)) is None and not small(name).abilities]
SNAP = SnapKV(window=4, kernel=5, pooling="avg")
METHODS: dict[str, Method] = {"snapkv": SNAP, "streaming": Streaming(positions="original")}


def press(name: str) -> Any:
    import kvpress

    snap = kvpress.SnapKVPress(window_size=SNAP.window, kernel_size=5)
    return snap if name == "snapkv" else kvpress.StreamingLLMPress(n_sink=4)


@needs_kvpress
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("start", [20, BUDGET + 1], ids=["room is left", "evicted at the seal"])
def test_rows_are_those_of_kvpress_on_random_layers(name: str, shape: Any, start: int) -> None:
    """It leaves them in the order of their scores, and its next ranking would pool over that, so they are sorted."""
    from kvpress import DecodingPress, PrefillDecodingPress

    s, window = Sequences(shape, start + STEPS), SNAP.window
    (layer,) = s.start(METHODS[name], BUDGET, abilities=RANKED)
    first, then = press(name), DecodingPress(press(name), compression_interval=EVERY, target_size=BUDGET)
    first.compression_ratio = 0.0 if start < BUDGET else 1 - BUDGET / start - 1e-9
    both = PrefillDecodingPress(first, then)
    module = SimpleNamespace(
        layer_idx=0, head_dim=shape.dim, q_proj=lambda hidden: hidden @ s.weight[0],
        config=SimpleNamespace(num_attention_heads=shape.heads, num_key_value_heads=shape.groups),
    )  # fmt: skip
    kept: Any = DynamicCache()

    def at(keys: Tensor) -> Tensor:
        return (keys.unsqueeze(3) == s.k(0).unsqueeze(2)).all(4).int().argmax(3)

    def feed(x: AttnInput, end: int) -> None:
        kept.update(x.k, x.v, 0)
        begin = max(0, end - max(window, x.q.shape[2]))
        angles = s.cos[:, begin:end], s.sin[:, begin:end]  # of its whole window, and not of the last token alone
        call = {
            "hidden_states": x.hidden,
            "past_key_values": kept,
            "cache_position": torch.arange(end)[-x.q.shape[2] :],
        }
        both.forward_hook(module, [], {**call, "position_embeddings": angles}, [None, None])
        rows = kept.layers[0]
        order = at(rows.keys).argsort(2).unsqueeze(3).expand(rows.keys.shape)
        rows.keys, rows.values = rows.keys.gather(2, order), rows.values.gather(2, order)

    feed(s.at(0, 0, start), start)
    s.seal([layer], 0, start)
    rankings = 0
    for position in range(start, s.length):
        places = layer.stored_positions()  # type: ignore[attr-defined]
        (out,) = s.decode([layer], position)
        now = layer.stored_positions()  # type: ignore[attr-defined]
        ranked = now.shape[2] <= places.shape[2]
        rankings += ranked
        assert torch.equal(at(kept.layers[0].keys), now[..., :-1])
        wanted = attention(s.q(0)[:, :, position, None], s.k(0), s.v[0], now.tolist(), shape.dim**-0.5)
        assert_close(out, wanted)
        assert sum(layer.attended) == now.shape[2]
        feed(s.at(0, position, position + 1), position + 1)
    assert rankings == STEPS // EVERY - (start == 20)


@needs_kvpress
def test_rows_are_those_of_kvpress_on_the_layers_of_a_model() -> None:
    """One query votes, because kvpress rotates all that it has held to where the last one stands; nothing is pooled,
    because it leaves rows in the order of their scores."""
    from kvpress import DecodingPress, SnapKVPress

    model, forced = tiny("llama"), prompt(STEPS, seed=5)
    start = 30
    press = SnapKVPress(window_size=1, kernel_size=1)
    then, fed = DecodingPress(press, compression_interval=EVERY, target_size=BUDGET), [0, start]

    def with_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "cache_position": torch.arange(*fed)}

    layers: Any = model.model.layers
    hooks = [layer.self_attn.register_forward_pre_hook(with_positions, with_kwargs=True) for layer in layers]
    try:
        kept, counts = cast(Any, DynamicCache()), set[int]()
        with torch.inference_mode(), then(model):
            model.model(prompt(start), past_key_values=kept)
            for token in forced[0]:
                fed = [fed[1], fed[1] + 1]
                model.model(token.view(1, 1), past_key_values=kept, position_ids=torch.tensor([[fed[0]]]))
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            del layer.self_attn.rotary_emb
    with attached(model, SnapKV(window=1, kernel=1), budget=BUDGET, abilities=RANKED) as kv:
        engine, cache = Engine(kv), kv.cache(capacity=start + STEPS)
        engine.prefill(cache, prompt(start), whole=True)
        cache.seal()
        for token in forced[0]:
            engine.decode(token.view(1, 1), cache, None)
        layers = zip(cache.method_layers, kept.layers, strict=True)
        for own, one in layers:
            mine, theirs = own.store.k[0], one.keys[0]
            counts.add(mine.shape[1])
            nearest = torch.cdist(theirs, mine, compute_mode="donot_use_mm_for_euclid_dist").min(2)
            assert nearest.values.max() < 1e-4
            assert torch.equal(nearest.indices.sort().values, torch.arange(mine.shape[1]).expand(len(mine), -1))
    assert counts == {BUDGET + STEPS % EVERY}


@pytest.mark.parametrize("name", mostly_slow(EVICTING, "snapkv", "h2o", "adakv", "pyramidkv", "streaming"))
def test_the_budget_holds_after_each_ranking_and_so_many_more_in_between(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a KV head on average, and in a layer of PyramidKV too."""
    decode, counts, room = Layer.decode, list[list[int]](), list[int]()

    def counting(layer: Layer, x: AttnInput) -> Tensor:
        out = decode(layer, x)
        if layer.spec.index == 0:
            counts.append([])
        counts[-1].append(layer.store.length)
        room.append(layer.store.length + layer.store.free)
        assert sum(torch.as_tensor(n).double().mean().item() for n in layer.attended) == layer.store.length
        return out

    monkeypatch.setattr(Layer, "decode", counting)
    forced = prompt(131, seed=5)
    with attached(tiny("llama"), small(name), budget=BUDGET, abilities=RANKED) as kv:
        made = Engine(kv).generate(prompt(PROMPT), max_new_tokens=131, sampler=Forced(forced))
    assert made.tokens == forced.tolist()
    means = [sum(layers) / len(layers) for layers in counts]
    assert means == pytest.approx([BUDGET + step % EVERY + 1 for step in range(130)])
    assert max(room) == max(counts[0]) + EVERY - 1


EACH: dict[str, tuple[Method, float | Budget, Any]] = {
    "snapkv": (SNAP, BUDGET, RANKED),
    "h2o": (H2O(), BUDGET, RANKED),
    "adakv": (AdaKV(window=4, kernel=3), BUDGET, RANKED),
    "streaming": (Streaming(sinks=2), BUDGET, RANKED),
    "query heads": (SnapKV(window=4, kernel=3, select_per="query_head"), 100, RANKED),
    "random": (SNAP, Budget(1.0, generated=16), (KeepRandom(7),)),
    "scored": (AdaKV(window=4, kernel=3), Budget(BUDGET, generated=16), (KeepScored(),)),
    "random, offloaded": (Oracle(sinks=2), Budget(BUDGET, generated=16), (KeepRandom(7),)),
}
each = pytest.mark.parametrize("name", mostly_slow([*EACH], "adakv", "streaming", "random, offloaded", "scored"))


@pytest.mark.tokens
@each
def test_tokens_are_those_of_alone(name: str) -> None:
    """In slots, in chunks, from a cache that went back, with captured steps, and with rows on the host."""
    method, budget, abilities = EACH[name]
    asked, counts = [prompt(length, seed=length) for length in (33, 90, 61)], (4, 30, 17)

    def alone(engine: Engine) -> list[list[list[int]]]:
        pairs = zip(asked, counts, strict=True)
        return [engine.generate(ids, max_new_tokens=new).tokens for ids, new in pairs]

    with attached(tiny("llama"), method, budget=budget, abilities=abilities) as kv, use_backend("torch"):
        wanted = alone(engine := Engine(kv))
        assert [answer.tokens for answer in together(engine, asked, counts)] == wanted
        assert alone(Engine(kv, prefill_chunk=17)) == alone(Engine(kv, graphs=Tape())) == wanted
        cache = engine.cache(asked[1], 40)
        logits = engine.prefill(cache, asked[1], whole=True)
        cache.seal()
        sealed, answers = Snapshot(cache), []
        for seed in (1, 2, 1):
            answers.append(engine.complete(cache, logits, prompt(5, seed=seed), began=0.0, max_new_tokens=30).tokens)
            sealed.restore()
        assert answers[0] == answers[2] != answers[1]
    if method.offloads:
        with attached(tiny("llama"), method, budget=budget, abilities=abilities, placement="host") as kv:
            assert alone(Engine(kv)) == wanted


@pytest.mark.tokens
@each
def test_a_budget_for_all_gives_fulls_tokens(name: str) -> None:
    method, _, abilities = EACH[name]
    ranked = abilities is RANKED
    with attached(tiny("llama"), Full()) as kv:
        wanted = Engine(kv).generate(prompt(PROMPT), max_new_tokens=STEPS).tokens
    for budget in (1.0, PROMPT + STEPS):
        given = budget if ranked else Budget(budget, generated=STEPS)
        with attached(tiny("llama"), method, budget=given, abilities=abilities) as kv:
            assert Engine(kv).generate(prompt(PROMPT), max_new_tokens=STEPS).tokens == wanted


@pytest.mark.parametrize("method", [SNAP, H2O(), AdaKV(window=4, kernel=3)], ids=["snapkv", "h2o", "adakv"])
def test_a_further_turn_reads_what_was_left_and_is_ranked_too(method: Method) -> None:
    s = Sequences(SHAPES[1], 200)
    (layer,) = s.start(method, BUDGET, abilities=RANKED)
    for begin in (0, 100):
        s.seal([layer], begin, begin + 60)
        for position in range(begin + 60, begin + 100):
            (out,) = s.decode([layer], position)
            stored = [[[p for p in head if p >= 0] for head in heads] for heads in layer.stored_positions().tolist()]  # type: ignore[attr-defined]
            rows = [sum(map(len, heads)) / len(heads) for heads in stored]
            assert rows == [BUDGET + (position - begin - 60) % EVERY + 1] * 2
            assert_close(out, attention(s.q(0)[:, :, position, None], s.k(0), s.v[0], stored, s.shape.dim**-0.5))
            of_prompt = [sum(p < begin + 60 for head in heads for p in head) / len(heads) for heads in stored]
            assert torch.as_tensor(layer.attended.prompt).tolist() == pytest.approx(sum(of_prompt) / 2)
    assert min(p for heads in stored for head in heads for p in head) < 100


def test_a_random_sample_stays_of_an_answer_another_in_each_head_and_the_newest() -> None:
    most, steps = 3 * NEWEST, 4 * NEWEST
    s = Sequences(SHAPES[1], PROMPT + steps)
    places = dict[tuple[int, str], Tensor]()
    for seed, example in ((1, "a"), (2, "a"), (1, "b"), (1, "a")):
        (layer,) = s.start(SNAP, Budget(1.0, generated=most), abilities=(KeepRandom(seed),))
        layer.cache.draw_for(example)  # type: ignore[attr-defined]
        s.seal([layer], 0, PROMPT)
        for position in range(PROMPT, PROMPT + steps):
            s.decode([layer], position)
        stored = layer.stored_positions()  # type: ignore[attr-defined]
        assert torch.equal(places.setdefault((seed, example), stored), stored)
    assert not any(torch.equal(one, two) for one, two in combinations(places.values(), 2))
    assert torch.equal(stored[0], stored[1])  # of a batch, what each draws alone
    assert not torch.equal(stored[:, 0], stored[:, 1])
    assert stored.shape[2] <= PROMPT + most
    ends = torch.cat([torch.arange(PROMPT), torch.arange(PROMPT + steps - NEWEST, PROMPT + steps)])
    assert all(torch.isin(ends, head).all() for heads in stored for head in heads)
    counts, trials = torch.zeros(90), 200
    for seed in range(trials):
        layer.seen = seed  # type: ignore[attr-defined]
        counts[KeepRandom(3).choose(layer, 90, 40)[0, 0]] += 1  # type: ignore[arg-type]
    assert counts[70:].tolist() == [trials] * 20  # half, which is less than NEWEST
    expected = trials * 20 / 70
    assert ((counts[:70] - expected).abs() < 5 * (expected * 50 / 70) ** 0.5).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_last_queries_look_at_stays_of_an_answer(shape: Any) -> None:
    """Their weights are those among all rows, but the prompt's stay whatever they are."""
    most, window = 16, SNAP.window
    s = Sequences(shape, PROMPT + STEPS).sharpened(6)
    (layer,) = s.start(SNAP, Budget(BUDGET, generated=most), abilities=(KeepScored(),))
    s.seal([layer], 0, PROMPT)
    dropped = 0
    for position in range(PROMPT, PROMPT + STEPS):
        held = layer.stored_positions()  # type: ignore[attr-defined]
        s.decode([layer], position)
        left = layer.stored_positions()[..., :-1]  # type: ignore[attr-defined]
        if left.shape == held.shape:
            continue
        dropped += 1
        q = s.q(0)[:, :, position - window : position].unflatten(1, (shape.groups, -1))
        k = s.k(0).gather(2, held.unsqueeze(-1).expand(-1, -1, -1, shape.dim))
        logits = (q @ k.unsqueeze(2).mT * shape.dim**-0.5).flatten(1, 2)
        own = torch.ones(window, window, dtype=torch.bool).triu(1)
        logits[..., -window:].masked_fill_(own, float("-inf"))
        votes = logits.softmax(-1).sum(2)[..., :-window].unflatten(1, (shape.groups, -1)).mean(2)
        votes = torch.nn.functional.avg_pool1d(votes, 5, stride=1, padding=2)[..., BUDGET:]
        best = votes.topk(left.shape[2] - BUDGET - window).indices.sort().values + BUDGET
        rows = torch.arange(held.shape[2]).expand_as(held)
        wanted = torch.cat([rows[..., :BUDGET], best, rows[..., -window:]], -1)
        assert torch.equal(left, held.gather(2, wanted))
    assert dropped > 5


def test_the_newest_stay_under_h2o_if_that_is_said() -> None:
    s = Sequences(SHAPES[0], PROMPT + STEPS)
    (layer,) = s.start(H2O(), Budget(BUDGET, generated=16), abilities=(KeepGenerated(),))
    s.seal([layer], 0, PROMPT)
    for position in range(PROMPT, PROMPT + STEPS):
        s.decode([layer], position)
        answer = layer.stored_positions()[..., BUDGET:]  # type: ignore[attr-defined]
        assert torch.equal(answer, torch.arange(position + 1)[-answer.shape[2] :].expand_as(answer))


@pytest.mark.parametrize("name", mostly_slow(EVICTING, "snapkv", "h2o", "adakv"))
@pytest.mark.parametrize("tokens", [PROMPT, 30], ids=["evicted at the seal", "room is left"])
def test_the_formula_says_what_is_held(name: str, tokens: int) -> None:
    method, reserve = small(name), 90
    said, budget = 0, Budget(BUDGET)
    with attached(tiny("llama"), method, budget=budget, abilities=RANKED) as kv:
        cache = kv.cache(capacity=tokens + reserve)
        Engine(kv).prefill(cache, prompt(tokens), whole=True)
        cache.seal()
        for spec in kv.specs:
            case = LayerWorkload(spec, tokens, budget.tokens(tokens, spec.index), "device", 4, reserve)
            case = replace(case, rows=budget.rows(tokens, spec.index), every=EVERY)
            said += method.cost(case).device_bytes
        assert footprint(cache.layers)["device"] == pytest.approx(said, rel=0.02)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*EVICTING}))
def test_methods_that_do_not_evict_by_a_rule_of_their_own_refuse_by_name(name: str) -> None:
    method, why = small(name), "it drops rows at times of its own" if name == "tova" else ""
    with pytest.raises(ValueError, match=f"^{type(method).__name__} takes no evict_every={EVERY}, for {why}"):
        refuse(method, (Mass(0.9), *RANKED) if Mass.refusal(method) is None else RANKED)


@pytest.mark.parametrize("method", [Oracle(), Streaming(), Full()])
def test_scores_are_refused_of_methods_that_give_no_generated_token_any(method: Method) -> None:
    with pytest.raises(ValueError, match=f"^{type(method).__name__} takes no keep_generated, for it does not score"):
        refuse(method, (KeepScored(),))
    refuse(method, (KeepRandom(1),))
