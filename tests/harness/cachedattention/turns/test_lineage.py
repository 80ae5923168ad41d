"""What is stored is used for nothing but what it was computed for: not by other calibrations, not as an uncut text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedModel

from harness.cachedattention.store.fingerprint import content_digest
from harness.cachedattention.turns.caches import CachesBetweenTurns
from harness.cachedattention.turns.opening import fingerprint
from harness.cachedattention.turns.truncation import Rotation, truncated
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.models.random import Random
from methods.adakv import AdaKV
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infllm import InfLLM
from methods.kivi import Kivi
from methods.lm_infinite import LMInfinite
from methods.pyramidkv import PyramidKV
from methods.snapkv import SnapKV
from methods.streaming import Streaming
from tests.harness.cachedattention.turns.test_caches import CAPACITY, MB, Talk, plain, stored
from tests.methods.test_contract import attach
from tests.tiny import BY_BLOCKS, PARTLY, prompt, tiny


def test_another_calibration_is_another_fingerprint() -> None:
    """InfiniGen's directions choose what is read, and what was read is in the rows of the answer.

    The model is one and the same, so what was prepared for another text must not be taken."""
    loaded = Random(shape="tiny", layers=2).load("fp32", "cpu")
    method, found = InfiniGen(calibration_tokens=64), []
    for seed in (1, 2, 1):
        with attached(loaded.model, method, budget=0.2, calibration=prompt(64, seed=seed)) as kv:
            found.append(fingerprint(kv, loaded).digest)
    assert found[0] == found[2] != found[1]


def adapters(model: PreTrainedModel) -> Iterator[None]:
    """Attaches an adapter, switches it off and on, and changes its strength."""
    peft = pytest.importorskip("peft")
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    yield
    model.disable_adapters()
    yield
    model.enable_adapters()
    model.model.layers[0].self_attn.q_proj.scaling["default"] *= 3
    yield


def writes(model: PreTrainedModel) -> Iterator[None]:
    """Writes other numbers into weights, in ways of which torch counts only the first, and moves numbers."""
    other = {name: x + 0.01 for name, x in model.state_dict().items()}
    weight = model.model.layers[0].self_attn.q_proj.weight
    model.load_state_dict(other)
    yield
    weight.data = weight.data.clone() * 2
    yield
    weight.data.copy_(weight.data.roll(1, 0))
    yield
    weight.data[0, 0] += 1
    yield


def turns(model: PreTrainedModel) -> Iterator[None]:
    """Rotates and scales otherwise, by numbers that a checkpoint does not hold."""
    rotary: Any = model.model.rotary_emb
    rotary.inv_freq.mul_(0.5)
    yield
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
    yield


@pytest.mark.parametrize("change", [writes, adapters, turns])
def test_other_weights_are_prepared_for_again_and_have_another_fingerprint(
    change: Callable[[PreTrainedModel], Iterator[None]],
) -> None:
    loaded = Random(shape="tiny", layers=2).load("fp32", "cpu")
    method, text = InfiniGen(calibration_tokens=64), prompt(64)

    def prepared(model: PreTrainedModel) -> tuple[object, str, str]:
        with attached(model, method, budget=0.2, calibration=text) as kv:
            return kv.prepared, content_digest(kv.prepared), fingerprint(kv, loaded).digest

    before, *seen = prepared(loaded.model)
    assert prepared(loaded.model)[0] is before
    prints = set(seen[1:])
    for number, _ in enumerate(change(loaded.model), 2):
        _, digest, mark = prepared(loaded.model)
        assert (digest, mark) == prepared(deepcopy(loaded.model))[1:]  # of which nothing is remembered
        prints.add(mark)
        assert len(prints) == number


@pytest.mark.tokens
@pytest.mark.parametrize("method", [Full(), H2O()], ids=["full", "h2o"])
@pytest.mark.parametrize("sinks", [0, 2])
def test_another_run_computes_a_text_that_was_cut_here(method: Any, sinks: int, tmp_path: Path) -> None:
    text, new = prompt(80)[0].tolist(), prompt(20, seed=1)[0].tolist()
    with attach(method, 0.8) as kv:
        first = stored(kv, tmp_path, disk=9 * MB)
        talk = Talk(kv, first)
        talk.turn(text)
        kept = first.shorten("alice", talk.fed, 40, CAPACITY, sinks=sinks)
        assert first.resume("alice", kept, CAPACITY).reused == len(kept)
        first.close()
        second = stored(kv, tmp_path, disk=9 * MB)
        with plain(kv, CachesBetweenTurns) as recompute:
            talks = [Talk(kv, histories) for histories in (second, recompute)]
            for one in talks:
                one.fed = list(kept)
                one.turn(new)
        assert talks[0].said == talks[1].said
        assert [one.found[0].reused for one in talks] == [0, 0]
        assert second.resume("alice", talks[0].fed, CAPACITY).reused == len(talks[0].fed)
        second.close()


# Caches that lose their oldest tokens between two turns, held against transformers and against each other.

SEEN, KEEP, NEW = 90, 40, 12
EXACT = {"atol": 2e-3, "rtol": 1e-3}
EVICTING: list[Method] = [
    AdaKV(window=4, kernel=3), H2O(), LMInfinite(n_init=2), PyramidKV(window=4, kernel=3), SnapKV(window=4, kernel=3),
    Streaming(sinks=2), Streaming(sinks=2, positions="original"),
]  # fmt: skip
KEEPING: list[Method] = [
    Full(),
    InfiniGen(dense_layers=(0,), calibration_tokens=64),
    InfLLM(n_init=2, block=4, repr_topk=2, exc_block=8),
    Kivi(residual=16, group=8),
]


def fed(kv: Attachment, ids: Tensor, decoded: int = 6) -> KVCache:
    """A cache behind a turn: all but the last tokens as its prompt, those as its answer."""
    cache, engine = kv.start(KVCache, capacity=ids.shape[1] + NEW), Engine(kv)
    with torch.inference_mode():
        engine.prefill(cache, ids[:, :-decoded])
        cache.seal()
        for token in ids[:, -decoded:].split(1, dim=1):
            engine.run(token, cache)
    return cache


def shortened(kv: Attachment, cache: KVCache, keep: int, **how: Any) -> KVCache:
    rotations = [Rotation(spec.rope, kv.model.dtype) for spec in kv.model_specs]
    contents = [{name: x.clone() for name, x in state.items()} for state in cache.whole_contents()]
    fresh = kv.start(KVCache, capacity=SEEN + 4 * NEW)  # for positions that go on behind what was seen, too
    fresh.refill(truncated(contents, fresh.layers, rotations, keep, **how))
    return fresh


def answered(kv: Attachment, cache: KVCache, seed: int = 5) -> Tensor:
    """Logits behind a turn of NEW tokens, and in the steps behind it."""
    ids, engine = prompt(NEW, seed=seed), Engine(kv)
    with torch.inference_mode():
        found = [engine.prefill(cache, ids[:, :-3])]
        cache.seal()
        found += [engine.run(token, cache) for token in ids[:, -3:].split(1, dim=1)]
    return torch.stack(found)


def theirs(model: PreTrainedModel, ids: Tensor, keep: int) -> Tensor:
    """transformers' own: rows cut off in front, and what follows at its true positions."""
    whole, new = DynamicCache(), prompt(NEW, seed=5)
    with torch.inference_mode():
        model(ids, past_key_values=whole)
        cut = DynamicCache()
        for layer, rows in enumerate(whole.layers):
            cut.update(rows.keys[:, :, -keep:], rows.values[:, :, -keep:], layer)
        places = torch.arange(ids.shape[1], ids.shape[1] + NEW)[None]
        logits = model(new, past_key_values=cut, position_ids=places).logits
    return logits[:, -4:].transpose(0, 1)


@pytest.mark.parametrize("architecture", [*BY_BLOCKS, *PARTLY, "smollm3"])
def test_what_stays_is_what_transformers_keeps(architecture: str) -> None:
    """Distances are all that attention sees: a cache cut in front gives the same, wherever it is moved to."""
    model, ids = tiny(architecture), prompt(SEEN)
    with attached(model, Full()) as kv:
        cache = shortened(kv, fed(kv, ids), KEEP)
        assert cache.num_tokens == KEEP
        ours = answered(kv, cache)
        naive = answered(kv, shortened(kv, fed(kv, ids), KEEP, naive=True))
    wanted = theirs(model, ids, KEEP)
    assert_close(ours, wanted, **EXACT)
    assert (naive - wanted).abs().max() > 20 * (ours - wanted).abs().max()


def test_first_tokens_may_stay() -> None:
    """Every head has its sinks and its last tokens, side by side."""
    model, ids = tiny("llama"), prompt(SEEN)
    with attached(model, Full()) as kv:
        whole = fed(kv, ids).contents()
        cut = shortened(kv, fed(kv, ids), KEEP, sinks=4)
        assert answered(kv, cut).isfinite().all()
        cut = shortened(kv, fed(kv, ids), KEEP, sinks=4)
    for spec, state, old in zip(kv.model_specs, cut.contents(), whole, strict=True):
        assert torch.equal(state["v0"], torch.cat([old["v0"][:, :, :4], old["v0"][:, :, 4 - KEEP :]], 2))
        assert_close(state["k0"][:, :, :4], old["k0"][:, :, :4], **EXACT)
        off = Rotation(spec.rope, model.dtype).off
        last = off(old["k0"][:, :, 4 - KEEP :], torch.arange(SEEN + 4 - KEEP, SEEN))
        assert_close(off(state["k0"][:, :, 4:], torch.arange(4, KEEP)), last, **EXACT)


@pytest.mark.parametrize("sinks", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", [*KEEPING, *EVICTING], ids=lambda method: type(method).__name__)
def test_every_method_goes_on_behind_a_shorter_history(method: Method, sinks: int) -> None:
    model, ids = tiny("llama"), prompt(SEEN)
    with attached(model, method, budget=30, calibration=prompt(64)) as kv:
        before = fed(kv, ids)
        cache = shortened(kv, before, 16, sinks=sinks)
        rows = [x for state in cache.contents() for name, x in state.items() if name[0] == "k"]
        assert cache.num_tokens == 16
        assert max(x.shape[-2] for x in rows) == 16
        assert all(layer.attended.prompt <= 16 for layer in cache.layers)
        logits = answered(kv, cache)
    assert logits.isfinite().all()
    assert cache.num_tokens == 16 + NEW
