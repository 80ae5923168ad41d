"""Layers that differ: some have heads of another size, and some borrow the keys and values of an earlier layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as exact

from harness import Engine, attached
from harness.config.settings import Settings, SettingsError
from harness.jobs.resolve import resolve
from harness.models.base import ModelInfo
from methods.base import AttnInput, KVLayer
from methods.full import Full
from methods.oracle import OracleRead
from tests.methods.test_contract import small
from tests.tiny import WINDOW, prompt, saved, tiny

BORROWS, LENGTH, NEW = "gemma4_e2b", 61, 6


def described(family: str, folder: Path) -> ModelInfo:
    return saved(tiny(family), folder).describe()


@pytest.mark.parametrize("family", ["gemma4_text", BORROWS])
def test_bytes_are_those_of_each_layers_own_heads(family: str, tmp_path: Path) -> None:
    info = described(family, tmp_path)
    slides, whole = info.layer_heads[0], info.layer_heads[1]
    assert (slides.head_dim, whole.head_dim, info.head_dim, info.num_layers) == (16, 32, 32, 4)
    rows = 2 * WINDOW * slides.num_kv_heads * 16 + 2 * (LENGTH + NEW) * whole.num_kv_heads * 32
    assert info.kv_bytes("fp32", LENGTH + NEW) == 2 * rows * 4
    with attached(tiny(family), Full()) as kv:
        assert Engine(kv).generate(prompt(LENGTH), max_new_tokens=NEW).kv["device"] == 2 * rows * 4


def lent(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[KVLayer, AttnInput, Tensor, list[Tensor]]:
    """The layer that lends in the first step after a prompt, what is asked of it, what it gives, and its choices."""
    chosen, calls, select = list[Tensor](), list[Any](), OracleRead.select

    def noted(policy: OracleRead, q: Tensor, top: int) -> Tensor:
        chosen.append(select(policy, q, top))
        return chosen[-1]

    monkeypatch.setattr(OracleRead, "select", noted)
    with attached(tiny(BORROWS), small(name), budget=0.4) as kv:
        cache = kv.cache(capacity=LENGTH + 1)
        kv.model(prompt(LENGTH), past_key_values=cache)
        cache.seal()
        layer, lend = cache.layers[3], cache.layers[3].lend
        layer.lend = lambda x: calls.append((x, lend(x))) or calls[-1][1]  # type: ignore[method-assign, func-returns-value]
        kv.model(prompt(1), past_key_values=cache)
    [(x, out)] = calls
    return layer, x, out, chosen[-2:]


def test_who_borrows_reads_what_an_evicting_method_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, out, _ = lent("snapkv", monkeypatch)
    store = layer.store  # type: ignore[attr-defined]
    assert store.length == int(0.4 * LENGTH) + 1
    torch.testing.assert_close(out, exact(x.q, store.k, store.v, scale=layer.spec.scale, enable_gqa=True))


def test_who_borrows_chooses_by_queries_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, out, (first, second) = lent("oracle", monkeypatch)
    read, store = layer.reads, layer.store  # type: ignore[attr-defined]
    assert torch.equal(read.rows, first)
    assert not torch.equal(first, second)
    rows = torch.cat([read.rows_of(second, read.plan), torch.full((1, 2, 1), LENGTH)], 2)
    k, v = (side.gather(2, rows[..., None].expand(-1, -1, -1, 32)) for side in (store.k, store.v))
    torch.testing.assert_close(out, exact(x.q, k, v, scale=layer.spec.scale, enable_gqa=True), atol=1e-4, rtol=1e-4)


def test_all_tokens_of_a_prompt_pass_through_layers_that_borrow() -> None:
    """`generate` lets only the last one pass, to which the ring of a window is enough."""
    expected = tiny(BORROWS)(prompt(LENGTH)).logits
    with attached(tiny(BORROWS), Full()) as kv:
        cache = kv.cache(capacity=LENGTH)
        pieces = [kv.model(ids, past_key_values=cache).logits for ids in prompt(LENGTH).split(40, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["infllm", "lm_infinite"])
def test_a_method_with_a_prompt_of_its_own_is_refused_where_layers_borrow(name: str, tmp_path: Path) -> None:
    why = "other layers of this model read its keys and values"
    with pytest.raises(ValueError, match=why), attached(tiny(BORROWS), small(name), budget=0.4):
        pass
    with pytest.raises(ValueError, match=why):  # before weights load
        resolve(Settings(budget=0.4), small(name), described(BORROWS, tmp_path))


def test_a_model_whose_layers_borrow_stays_on_one_device(tmp_path: Path) -> None:
    info = replace(described(BORROWS, tmp_path), spread=True)
    with pytest.raises(SettingsError, match="read keys and values of others"):
        resolve(Settings(budget=0.4, device="cuda"), Full(), info)
