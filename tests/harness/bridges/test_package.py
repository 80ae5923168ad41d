"""kvpress is imported without a trace in transformers, and whoever imports it himself does us no harm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness import Engine, attached
from harness.bridges.kvpress.building import INSTALL, KVPressError, package, without_data_sets
from harness.bridges.kvpress.kvpress import KVPress
from methods.snapkv import SnapKV
from tests.forks import Forked
from tests.tiny import prompt, tiny

installed = pytest.mark.skipif(find_spec("kvpress") is None, reason="kvpress is not installed: `make setup` does it")
IDS = prompt(80)


def tokens(method: object = SnapKV(window=8)) -> list[list[int]]:
    with attached(tiny("gemma3_text"), method, budget=40) as kv:  # type: ignore[arg-type]
        return Engine(kv).generate(prompt(80), max_new_tokens=4).tokens


def functions() -> dict[str, Callable[..., object]]:
    return dict(ALL_ATTENTION_FUNCTIONS.items())


def by_us_first() -> None:
    wanted, before = tokens(), functions()
    package()
    assert functions() == before
    assert tokens() == wanted
    plain = tiny("llama")(IDS).logits
    with attached(tiny("llama"), KVPress(press={"name": "KnormPress"}), budget=40) as kv:
        Engine(kv).generate(IDS, max_new_tokens=2)
    assert torch.equal(tiny("llama")(IDS).logits, plain)


def by_the_user_first() -> None:
    with without_data_sets():
        import_module("kvpress")
    by_kvpress = tokens()
    package()
    assert tokens() == by_kvpress
    assert all(
        "attention_patch" in function.__qualname__ for name, function in functions().items() if name != "kv_harness"
    )


@installed
@pytest.mark.parametrize("order", [by_us_first, by_the_user_first])
def test_attention_stays_what_it_was_whoever_imports_kvpress_and_when(order: Callable[[], None]) -> None:
    process = Forked(order)
    assert process.wait() == 0, process.err


@pytest.mark.parametrize("found", [None, "0.6.0"])
def test_where_it_is_absent_or_another_the_error_says_how_to_install_it(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.cache_clear()
    monkeypatch.setitem(sys.modules, "kvpress", None)
    if found is not None:
        monkeypatch.setattr("harness.bridges.kvpress.building.version", lambda name: found)
    with pytest.raises(KVPressError) as raised:
        package()
    package.cache_clear()
    assert INSTALL in str(raised.value)
    for press in ({}, {"window_size": 3}, "SnapKVPress", {"name": "AdaKVPress", "press": {"n": 1}}):
        with pytest.raises(KVPressError, match="press"):  # also where kvpress is absent
            KVPress(press=press)  # type: ignore[arg-type]
