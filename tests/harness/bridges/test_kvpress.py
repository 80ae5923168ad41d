"""Presses of kvpress keep here what they keep behind a model's own attention, which runs beside it as the reference."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedModel

from harness import Engine, attached
from harness.bridges.kvpress.building import KVPressError, build, set_ratio
from harness.bridges.kvpress.keep import lent_module, ratio_for
from harness.bridges.kvpress.kvpress import KVPress
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.engine.footprint import footprint
from harness.engine.hf import Rotary
from harness.jobs.alignment import shapes
from harness.models.random import Random
from methods.base import Method
from methods.full import Full
from methods.pools import KVStore, PerHeadStore
from methods.snapkv import SnapKV
from methods.streaming import Streaming
from methods.tova import TOVA
from tests.harness.models.test_unlisted import FINISHED, UNLISTED
from tests.tiny import HYBRID, fresh, prompt, tiny

pytestmark = pytest.mark.skipif(
    find_spec("kvpress") is None, reason="kvpress is not installed: `make setup` does it, and its error says how"
)
LENGTH, BUDGET = 201, 0.3
IDS = prompt(LENGTH)
SNAP = {"name": "SnapKVPress", "window_size": 16}
EXPECTED = {"name": "ExpectedAttentionPress"}
CHOOSING = {
    "snapkv": SNAP, "expected_attention": EXPECTED, "tova": {"name": "TOVAPress"},
    "streaming": {"name": "StreamingLLMPress"}, "keydiff": {"name": "KeyDiffPress"}, "knorm": {"name": "KnormPress"},
    "lagkv": {"name": "LagKVPress", "lag_size": 16}, "pyramidkv": {"name": "PyramidKVPress", "window_size": 8},
    "chunkkv": {"name": "ChunkKVPress", "press": SNAP}, "adakv": {"name": "AdaKVPress", "press": EXPECTED},
    "criticalkv": {"name": "CriticalKVPress", "press": SNAP},
    "critical_adakv": {"name": "CriticalAdaKVPress", "press": SNAP}, "cur": {"name": "CURPress"},
    "non_causal": {"name": "NonCausalAttnPress"},
    "simlayer": {"name": "SimLayerKVPress", "lazy_threshold": 0.3, "n_recent": 40},
    "two": {"name": "ComposedPress", "presses": [SNAP]},
}  # fmt: skip
REWRITING = {
    "think_adakv": {
        "name": "ComposedPress",
        "presses": [
            {"name": "ThinKPress", "key_channel_compression_ratio": 0.5},
            {"name": "CriticalAdaKVPress", "press": SNAP},
        ],
    },
    "think": {"name": "ThinKPress", "key_channel_compression_ratio": 0.5},
    "merging": {"name": "MergingPress", "press": SNAP},
    "snapkv_think": {
        "name": "ComposedPress",
        "presses": [SNAP, {"name": "ThinKPress", "key_channel_compression_ratio": 0.5}],
    },
}


PRESSES: dict[str, dict[str, Any]] = CHOOSING | REWRITING | {"rerotated": {"name": "KeyRerotationPress", "press": SNAP}}


@cache
def theirs(name: str, ratio: float, architecture: str = "llama") -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and masked places in every layer, after a press has hooked into transformers' own forward."""
    press, model = build(PRESSES[name]), model_of(architecture)
    set_ratio(press, ratio)

    def with_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "cache_position": torch.arange(LENGTH)}  # transformers of today does not pass it

    layers: Any = model.model.layers
    hooks = [layer.self_attn.register_forward_pre_hook(with_positions, with_kwargs=True) for layer in layers]
    kept = DynamicCache()
    try:
        with torch.inference_mode(), press(model):
            model.model(IDS, past_key_values=kept)
        return [
            (stored.keys, stored.values, getattr(layer.self_attn, "masked_key_indices", None))
            for stored, layer in zip(kept.layers, layers, strict=True)
        ]
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            del layer.self_attn.rotary_emb
            vars(layer.self_attn).pop("masked_key_indices", None)


@cache
def model_of(architecture: str) -> PreTrainedModel:
    others = UNLISTED | FINISHED
    if architecture not in others:
        return tiny(architecture)
    model = fresh(architecture, **others[architecture])
    for name, weight in model.named_parameters():
        if name.endswith("key_layernorm.weight"):  # or all keys would have one norm, by which KnormPress ranks them
            weight.data = torch.linspace(0.3, 3.0, len(weight))
    return model


def sealed(kv: Attachment, *, chunk: int | None = None, ids: Tensor = IDS) -> KVCache:
    engine = Engine(kv, prefill_chunk=chunk)
    cache = engine.cache(ids, 16)
    engine.prefill(cache, ids, whole=True)
    cache.seal()
    return cache


def in_order(rows: Tensor) -> Tensor:
    """In an order of their own, by which two sets of rows can be compared."""
    return rows[rows[:, 0].argsort()]


def by_head(store: KVStore) -> list[tuple[Tensor, Tensor]]:
    return list(zip(store.k[0], store.v[0], strict=True))


def rows_of(keys: Tensor, values: Tensor, masked: Any) -> list[Tensor]:
    """Keys and values of each head that are not masked."""
    visible = torch.ones(keys.shape[:3], dtype=torch.bool)
    if masked is not None:
        visible[tuple(masked)] = False
    return [in_order(rows[seen]) for rows, seen in zip(torch.cat([keys, values], -1)[0], visible[0], strict=True)]


OURS: list[tuple[str, Method, int]] = [
    ("snapkv", SnapKV(window=16, kernel=5, pooling="avg"), 0),
    ("streaming", Streaming(sinks=4, positions="original"), 0),
    ("tova", TOVA(), 1),
]


@pytest.mark.parametrize(
    ("name", "method", "next_row"),
    [*((name, KVPress(press=PRESSES[name]), 0) for name in CHOOSING | REWRITING), *OURS],
)
def test_a_press_keeps_what_it_keeps_behind_the_models_own_attention(name: str, method: Method, next_row: int) -> None:
    """So do our methods with a press's parameters; TOVA a row less at the seal, for the next token's in its budget."""
    wanted = theirs(name, ratio_for(LENGTH, round(BUDGET * LENGTH) - next_row))
    with attached(tiny("llama"), method, budget=BUDGET) as kv:
        for ours in (sealed(kv), sealed(kv, chunk=64)):
            for layer, kept in zip(ours.layers, wanted, strict=True):
                held = layer.store.per_head() if isinstance(layer.store, PerHeadStore) else by_head(layer.store)
                for both, rows in zip(held, rows_of(*kept), strict=True):
                    assert_close(in_order(torch.cat(both, -1)), rows, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("architecture", FINISHED)
def test_a_press_that_looks_at_no_query_runs_where_queries_change_after_their_rotation(architecture: str) -> None:
    for name in ("keydiff", "knorm", "lagkv", "streaming"):
        wanted = theirs(name, ratio_for(LENGTH, round(BUDGET * LENGTH)), architecture)
        with attached(model_of(architecture), KVPress(press=PRESSES[name]), budget=BUDGET) as kv:
            for layer, kept in zip(sealed(kv).layers, wanted, strict=True):
                for both, rows in zip(by_head(layer.store), rows_of(*kept), strict=True):
                    apart = torch.cdist(torch.cat(both, -1), rows, compute_mode="donot_use_mm_for_euclid_dist")
                    assert apart.shape == (60, 60)
                    assert apart.min(0).values.max() < 1e-3
                    assert apart.min(1).values.max() < 1e-3


@pytest.mark.parametrize("architecture", ["llama", *HYBRID])
def test_a_press_finds_the_rotation_of_its_layer(architecture: str) -> None:
    """Whichever way a model gives it: with each press that asks for it, and to the angle."""
    positions = torch.tensor([[0, 1, 7, 90]])
    for name in ("expected_attention", "rerotated"):
        with attached(tiny(architecture), KVPress(press=PRESSES[name]), budget=BUDGET) as kv:
            sealed(kv)
    for spec in (spec for spec in kv.specs if isinstance(spec.rope, Rotary)):
        with lent_module(spec) as module:
            cos, sin = module.rotary_emb(torch.empty(1, dtype=torch.float64), positions)
            angles = (positions[..., None] * module.rotary_emb.inv_freq).repeat(1, 1, 2).double()
        assert cos.shape == sin.shape == (1, 4, spec.head_dim)
        assert_close(torch.atan2(sin, cos).cos(), angles.cos(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["glm", "phi4", "olmo2", "ministral3"])
def test_a_press_is_refused_where_it_would_compute_queries_otherwise_than_the_model(architecture: str) -> None:
    with (
        pytest.raises(KVPressError, match=r"rotates a part of each head, .* or norms the queries of all heads as one"),
        attached(model_of(architecture), KVPress(press=EXPECTED), budget=BUDGET),
    ):
        pass


def test_the_ratio_keeps_the_budget_to_the_token() -> None:
    for tokens in range(2, 400, 7):
        for kept in range(1, tokens):
            ratio = ratio_for(tokens, kept)
            assert int(tokens * (1 - ratio)) == kept
            assert ratio == pytest.approx(1 - kept / tokens, abs=1e-12)


def test_masked_keys_leave_and_free_memory() -> None:
    with attached(tiny("llama"), Full()) as kv:
        whole = footprint(sealed(kv).layers)["device"]
    with attached(tiny("llama"), KVPress(press=PRESSES["adakv"]), budget=BUDGET) as kv:
        layers = sealed(kv).layers
    counts = {tuple(len(k) for k, _ in layer.store.per_head()) for layer in layers}
    assert any(first != second for first, second in counts)
    assert {sum(count) for count in counts} == {2 * 60}
    assert footprint(layers)["device"] / whole == pytest.approx((60 + 16) / (LENGTH + 16))
    assert not any(hasattr(layer.self_attn, "masked_key_indices") for layer in tiny("llama").model.layers)
    assert not any(hasattr(layer.self_attn, "rotary_emb") for layer in tiny("llama").model.layers)


@pytest.mark.parametrize(
    ("name", "said", "positions"),
    [
        ("snapkv", None, "kept"),
        ("chunkkv", "ChunkKVPress keeps 41 prompt", "kept"),
        ("think", "ThinKPress puts other rows", "all"),
        ("merging", "MergingPress puts other rows", "none"),
        ("rerotated", "KeyRerotationPress puts other rows", "none"),
    ],
)
def test_what_a_press_does_otherwise_is_said(name: str, said: str | None, positions: str) -> None:
    with attached(tiny("llama"), KVPress(press=PRESSES[name]), budget=70) as kv:
        out = Engine(kv).generate(IDS, max_new_tokens=3)
        layer = sealed(kv).layers[0]
    assert out.fallback == said or (said and out.fallback.startswith(said))
    where = layer.kept_positions()
    shown = (
        "all" if where is None else "kept" if bool((where >= 0).all()) else "none" if bool((where < 0).all()) else ""
    )
    assert shown == positions


def test_later_turns_stay_whole_and_say_so() -> None:
    further = prompt(40, seed=3)
    with attached(tiny("llama"), KVPress(press=SNAP), budget=60) as kv:
        engine, cache = Engine(kv), kv.start(KVCache, capacity=400)
        for ids, stored, said in ((IDS, 60, False), (further, 100, True)):
            engine.prefill(cache, ids)
            cache.seal()
            assert cache.layers[0].store.length == stored
            assert bool(cache.layers[0].fallback) == said
            cache.open_turn()
        again = kv.start(KVCache, capacity=400)
        again.refill(cache.contents())
        engine.prefill(again, further)
        again.seal()
        assert again.layers[0].store.length == 140
        assert "later turns" in str(again.layers[0].fallback)


@pytest.mark.parametrize(
    ("press", "said"),
    [
        ({"name": "KVzipPress"}, "__call__"),
        ({"name": "DMSPress", "press": SNAP}, "no budget"),
        ({"name": "ObservedAttentionPress"}, "eager"),
        ({"name": "QFilterPress"}, "only a hub"),
        ({"name": "ExpectedAttentionStatsPress"}, "press.stats_folder"),
        ({"name": "SnapKVPres"}, "SnapKVPress?"),
        ({"name": "no_such_folder.Press"}, "PYTHONPATH"),
        ({"name": "torch.nn.Linear"}, "BasePress"),
        ({"name": "SnapKVPress", "window": 8}, "window_size?"),
        ({"name": "SnapKVPress", "compression_ratio": 0.5}, "set budget"),
        ({"name": "AdaKVPress"}, "needs press"),
        ({"name": "AdaKVPress", "press": {"name": "TOVAPres"}}, "press.press.name"),
        ({"name": "ChunkKVPress", "press": {"name": "AdaKVPress", "press": SNAP}}, "ScorerPress"),
        ({"name": "ComposedPress", "presses": [SNAP, EXPECTED]}, "one press"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(press: dict[str, Any], said: str) -> None:
    with pytest.raises(KVPressError) as raised:
        KVPress(press=press).check_model(shapes(Random(shape="tiny").describe())[0])
    assert said in str(raised.value)


def test_a_failing_press_is_named() -> None:
    chunked = {"name": "ChunkPress", "press": SNAP, "chunk_length": 10}  # no chunk is as long as its window
    with (
        attached(tiny("llama"), KVPress(press=chunked), budget=60) as kv,
        pytest.raises(KVPressError, match=r"ChunkPress.*layer 0"),
    ):
        sealed(kv)


@pytest.mark.parametrize("inside", [False, True])
def test_scores_that_are_nan_are_refused_by_name(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvpress.KnormPress.score", lambda self, module, hidden, keys, *_: keys.norm(dim=-1) * torch.nan
    )
    press: dict[str, Any] = (
        {"name": "ChunkKVPress", "press": {"name": "KnormPress"}} if inside else {"name": "KnormPress"}
    )
    with (
        attached(tiny("llama"), KVPress(press=press), budget=60) as kv,
        pytest.raises(KVPressError, match=r"^KnormPress.*layer 0.*NaN"),
    ):
        sealed(kv)


@pytest.mark.parametrize("press", [SNAP, EXPECTED, PRESSES["two"], PRESSES["adakv"], {"name": "CompactorPress"}])
def test_a_prompt_no_longer_than_a_presss_windows_is_read_whole(press: dict[str, Any]) -> None:
    method, model = KVPress(press=press), tiny("llama")
    assert method.windows == {"SnapKVPress": 16, "ComposedPress": 16, "CompactorPress": 12}.get(press["name"], 4)
    for length in range(1, method.windows + 3):
        with attached(model, method, budget=0.2) as kv:
            generation = Engine(kv).generate(IDS[:, :length], max_new_tokens=3)
        whole = 1 < length <= method.windows
        assert str(generation.fallback).startswith("all is read") == whole
        if whole:
            with attached(model, Full()) as kv:
                assert generation.tokens == Engine(kv).generate(IDS[:, :length], max_new_tokens=3).tokens


def test_a_press_that_draws_draws_the_same_again_and_leaves_torchs_numbers_alone() -> None:
    with attached(tiny("llama"), KVPress(press={"name": "RandomPress"}), budget=60) as kv:
        torch.manual_seed(5)
        first = sealed(kv).layers[1].kept_positions()
        after = torch.rand(3)
        assert torch.equal(sealed(kv).layers[1].kept_positions(), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)
