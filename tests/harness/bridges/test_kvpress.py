"""Presses of kvpress keep here what they keep behind a model's own attention, which runs beside it as the reference."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from harness import Engine, attached
from harness.bridges.kvpress import keep
from harness.bridges.kvpress.building import build, set_ratio
from harness.bridges.kvpress.keep import lent_module, ratio_for
from harness.bridges.kvpress.kvpress import KVPress
from harness.bridges.kvpress.package import KVPressError, package
from harness.bridges.kvpress.working import working_bytes
from harness.config import plugins
from harness.config.plugins import PluginError
from harness.config.settings import Results, Settings
from harness.engine.allocations import Allocations
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.engine.finite import NotFiniteError
from harness.engine.footprint import footprint
from harness.engine.hf import Rotary
from harness.jobs.alignment import shapes
from harness.jobs.evaluate import evaluate
from harness.models.random import Random
from harness.results.identity import code_of
from kernels.rope import rotate
from methods.base import LayerWorkload
from methods.full import Full
from methods.pools import KVStore, PerHeadStore
from tests.fast import MODEL, niah
from tests.tiny import HYBRID, prompt, tiny

pytestmark = pytest.mark.skipif(
    find_spec("kvpress") is None, reason="kvpress is not installed: `make setup` does it, and its error says how"
)
LENGTH, BUDGET = 201, 0.3
IDS = prompt(LENGTH)
SNAP = {"name": "SnapKVPress", "window_size": 16}
EXPECTED = {"name": "ExpectedAttentionPress"}
CHOOSING = {
    "snapkv": SNAP,
    "expected_attention": EXPECTED,
    "tova": {"name": "TOVAPress"},
    "streaming": {"name": "StreamingLLMPress"},
    "keydiff": {"name": "KeyDiffPress"},
    "knorm": {"name": "KnormPress"},
    "lagkv": {"name": "LagKVPress", "lag_size": 16},
    "pyramidkv": {"name": "PyramidKVPress", "window_size": 8},
    "chunkkv": {"name": "ChunkKVPress", "press": SNAP},
    "adakv": {"name": "AdaKVPress", "press": EXPECTED},
    "criticalkv": {"name": "CriticalKVPress", "press": SNAP},
    "critical_adakv": {"name": "CriticalAdaKVPress", "press": SNAP},
    "cur": {"name": "CURPress"},
    "non_causal": {"name": "NonCausalAttnPress"},
    "simlayer": {"name": "SimLayerKVPress", "lazy_threshold": 0.3, "n_recent": 40},
    "two": {"name": "ComposedPress", "presses": [SNAP]},
}
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
def theirs(name: str, ratio: float) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and masked places in every layer, after a press has hooked into transformers' own forward."""
    press, model = build(PRESSES[name]), tiny("llama")
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


def sealed(kv: Attachment, *, chunk: int | None = None, ids: Tensor = IDS) -> KVCache:
    engine = Engine(kv, prefill_chunk=chunk)
    made = engine.cache(ids, 16)
    engine.prefill(made, ids, whole=True)
    made.seal()
    return made


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


@torch.inference_mode()
def test_the_input_of_one_layer_is_held_and_not_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer closes before the next one has taken in its whole prompt."""
    held, model = list[int](), tiny("llama")
    with attached(model, KVPress(press=SNAP), budget=BUDGET) as kv:
        engine = Engine(kv, prefill_chunk=64)
        made = engine.cache(IDS, 16)
        policies, attend = [layer.keeps for layer in made.layers], made.attend

        def counting(*given: Any) -> Any:
            held.append(sum(bool(policy.hidden) for policy in policies))
            return attend(*given)

        monkeypatch.setattr(made, "attend", counting)
        engine.prefill(made, IDS, whole=True)
    assert made.has_closed
    assert len(held) >= 2
    assert max(held) == 1


@pytest.mark.parametrize("name", CHOOSING | REWRITING)
def test_a_press_keeps_what_it_keeps_behind_the_models_own_attention(name: str) -> None:
    wanted = theirs(name, ratio_for(LENGTH, round(BUDGET * LENGTH)))
    with attached(tiny("llama"), KVPress(press=PRESSES[name]), budget=BUDGET) as kv:
        for ours in (sealed(kv), sealed(kv, chunk=64)):
            for layer, kept in zip(ours.layers, wanted, strict=True):
                held = layer.store.per_head() if isinstance(layer.store, PerHeadStore) else by_head(layer.store)
                for both, rows in zip(held, rows_of(*kept), strict=True):
                    assert_close(in_order(torch.cat(both, -1)), rows, atol=2e-4, rtol=1e-3)


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
        ("chunkkv", "ChunkKVPress keeps 41 prompt tokens where the budget is 70", "kept"),
        ("think", "ThinKPress puts other rows in the place of the prompt's and keeps 201 prompt", "all"),
        ("merging", "MergingPress puts other rows in the place of the prompt's", "none"),
        ("rerotated", "KeyRerotationPress puts other rows in the place of the prompt's", "none"),
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


def test_rotated_keys_are_as_far_from_what_follows_as_kvpress_puts_them() -> None:
    """Its pipeline goes on at the place behind the last row, ours behind the whole prompt."""
    with attached(tiny("llama"), KVPress(press=PRESSES["rerotated"]), budget=60) as kv:
        layer = sealed(kv).layers[1]
    kept = theirs("rerotated", ratio_for(LENGTH, 60))[1][0]
    q = torch.randn(1, 8, 1, 16, generator=torch.Generator().manual_seed(1))
    near, far = (rotate(q, *layer.spec.rope(torch.tensor([place]))) for place in (60 + 5, LENGTH + 5))
    logits = [(x.view(1, 2, 4, 16) @ keys.mT) for x, keys in ((near, kept), (far, layer.store.k))]
    assert_close(*logits, atol=1e-3, rtol=1e-3)


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
        ({"name": "KVzipPress"}, "a __call__ of its own"),
        ({"name": "FinchPress"}, "a __call__ of its own"),
        ({"name": "KVComposePress"}, "a __call__ of its own"),
        ({"name": "DecodingPress", "base_press": SNAP}, "a __call__ of its own"),
        ({"name": "DMSPress", "press": SNAP}, "no budget holds"),
        ({"name": "ObservedAttentionPress"}, "weights of eager attention"),
        ({"name": "QFilterPress"}, "only a hub has: choose another"),
        ({"name": "LUKVPress"}, "only a hub has"),
        ({"name": "DuoAttentionPress"}, "only a hub has"),
        ({"name": "ExpectedAttentionStatsPress"}, "set press.stats_folder"),
        ({"name": "SnapKVPres"}, "did you mean SnapKVPress?"),
        ({"name": "tests.own_press.Nothing"}, "tests.own_press has no Nothing"),
        ({"name": "no_such_folder.Press"}, "is its folder on PYTHONPATH?"),
        ({"name": "torch.nn.Linear"}, "derived from kvpress's BasePress"),
        (
            {"name": "SnapKVPress", "window": 8},
            "press.window is not a parameter of SnapKVPress; did you mean window_size?",
        ),
        ({"name": "SnapKVPress", "compression_ratio": 0.5}, "leave it out and set budget"),
        ({"name": "AdaKVPress"}, "press: AdaKVPress needs press, which has no default"),
        ({"name": "AdaKVPress", "press": {"name": "TOVAPres"}}, "press.press.name=TOVAPres"),
        (
            {"name": "ChunkKVPress", "press": {"name": "AdaKVPress", "press": SNAP}},
            "ChunkKVPress requires a ScorerPress",
        ),
        ({"name": "ComposedPress", "presses": [SNAP, EXPECTED]}, "the ratio of one press"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(press: dict[str, Any], said: str) -> None:
    with pytest.raises(KVPressError) as raised:
        KVPress(press=press).check_model(shapes(Random(shape="tiny").describe())[0])
    assert said in str(raised.value)


def test_a_press_by_its_bare_name_is_refused_with_the_words_to_write() -> None:
    with pytest.raises(PluginError, match=r"method\.press=\{name: TOVAPress\}"):
        plugins.build({"_target_": "harness.bridges.kvpress.kvpress.KVPress", "press": "TOVAPress"}, "method")


@pytest.mark.parametrize("name", ["snapkv", "expected_attention", "tova", "non_causal"])
def test_what_a_press_takes_while_it_works_is_forecast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From shorter prompts and fewer heads than those of the layer, which is another one."""
    press, peaks, work = KVPress(press=PRESSES[name]).press, list[int](), keep.press_one

    def counted(*given: Any) -> keep.Pressed:
        with Allocations() as seen:
            pressed = work(*given)
        peaks.append(seen.peak)
        return pressed

    monkeypatch.setattr(keep, "press_one", counted)
    with attached(tiny("llama"), KVPress(press=press), budget=0.3) as kv:
        Engine(kv).generate(prompt(1400), max_new_tokens=2)
        spec = kv.specs[0]
    forecast = working_bytes(press, LayerWorkload(spec, 1400, 420, "device", 4))
    assert 0.8 * max(peaks) <= forecast <= 1.5 * max(peaks)


def test_a_failing_press_is_named() -> None:
    chunked = {"name": "ChunkPress", "press": SNAP, "chunk_length": 10}  # no chunk is as long as its window
    with (
        attached(tiny("llama"), KVPress(press=chunked), budget=60) as kv,
        pytest.raises(KVPressError, match=r"ChunkPress.*layer 0"),
    ):
        sealed(kv)


@pytest.mark.parametrize("inside", [False, True])
def test_scores_that_are_nan_are_refused_by_name(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.own_press.MoodyPress.mood", "nan")
    press: dict[str, Any] = {"name": "tests.own_press.MoodyPress"}
    given = {"name": "ChunkKVPress", "press": press} if inside else press
    with (
        attached(tiny("llama"), KVPress(press=given), budget=60) as kv,
        pytest.raises(KVPressError, match=r"^MoodyPress.*layer 1.*NaN"),
    ):
        sealed(kv)


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("raise", "KVPressError: MoodyPress of kvpress fails in layer 1 (RuntimeError: boom)"),
        ("nan", "KVPressError: MoodyPress of kvpress gives scores in layer 1 that are NaN"),
    ],
)
def test_a_press_that_fails_in_an_example_leaves_the_others_alone(
    mood: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(results=Results(root=str(tmp_path)), baseline="off", warmup=0, budget=0.3)
    prefill, prompts = Engine.prefill, list[int]()

    def third_in_a_mood(*arguments: Any, **keywords: Any) -> Any:
        prompts.append(len(prompts))
        monkeypatch.setattr("tests.own_press.MoodyPress.mood", mood if len(prompts) == 3 else "")
        return prefill(*arguments, **keywords)

    monkeypatch.setattr(Engine, "prefill", third_in_a_mood)
    made = evaluate(KVPress(press={"name": "tests.own_press.MoodyPress"}), niah(depths=4), MODEL, settings)
    (failed,) = made.failed
    assert len(made.records) == 3
    assert failed.error.startswith(error)


def test_a_press_that_leaves_keys_that_are_not_finite_is_found_by_its_layer() -> None:
    press = {"name": "tests.own_press.InfinitePress"}
    with (
        attached(tiny("llama"), KVPress(press=press), budget=60) as kv,
        pytest.raises(NotFiniteError, match=r"first 2 tokens.*layer 0.*KVPress"),
    ):
        Engine(kv).generate(IDS, max_new_tokens=4)


@pytest.mark.parametrize("press", [SNAP, EXPECTED, PRESSES["two"], PRESSES["adakv"], {"name": "CompactorPress"}])
def test_a_prompt_no_longer_than_a_presss_windows_is_read_whole(press: dict[str, Any]) -> None:
    method, model = KVPress(press=press), tiny("llama")
    assert method.windows == {"SnapKVPress": 16, "ComposedPress": 16, "CompactorPress": 12}.get(press["name"], 4)
    for length in range(1, method.windows + 3):
        with attached(model, method, budget=0.2) as kv:
            made = Engine(kv).generate(IDS[:, :length], max_new_tokens=3)
        whole = 1 < length <= method.windows
        assert str(made.fallback).startswith("all is read") == whole
        if whole:
            with attached(model, Full()) as kv:
                assert made.tokens == Engine(kv).generate(IDS[:, :length], max_new_tokens=3).tokens


def test_a_press_that_draws_draws_the_same_again_and_leaves_torchs_numbers_alone() -> None:
    with attached(tiny("llama"), KVPress(press={"name": "RandomPress"}), budget=60) as kv:
        torch.manual_seed(5)
        first = sealed(kv).layers[1].kept_positions()
        after = torch.rand(3)
        assert torch.equal(sealed(kv).layers[1].kept_positions(), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)


OWN_PRESS = """
from dataclasses import dataclass

from kvpress import KnormPress

SHARPNESS = {sharpness}


@dataclass
class MyPress(KnormPress):
    pass
"""


def test_the_code_of_a_users_press_is_part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep it stands in other presses. An edited press does not find the runs of the old one."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "my_presses_for_identity.py"
    method = KVPress(press={"name": "AdaKVPress", "press": {"name": f"{file.stem}.MyPress"}})
    codes = []
    for sharpness in (1, 2):
        file.write_text(OWN_PRESS.format(sharpness=sharpness))
        codes.append(code_of(method))
    first, second = codes
    assert [name for name in first if first[name] != second[name]] == [file.stem]
    assert first.keys() - {file.stem} == code_of(KVPress(press=SNAP)).keys()


def test_another_release_of_kvpress_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.bridges.kvpress.package.version", lambda name: "0.6.0")
    package.cache_clear()
    try:
        with pytest.raises(KVPressError, match=r"kvpress 0\.6\.0.*kvpress==0\.5\.5"):
            package()
    finally:
        package.cache_clear()
