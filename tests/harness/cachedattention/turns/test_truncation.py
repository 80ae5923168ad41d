"""Caches that lose their oldest tokens between two turns, held against transformers and against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedModel

from harness.cachedattention.turns.truncation import Rotation, truncated
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
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
from tests.tiny import BY_BLOCKS, PARTLY, prompt, tiny

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
