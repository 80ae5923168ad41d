"""Models with layers that slide over a window, with sink logits, with layers that do not rotate."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import DynamicCache

from harness.engine.attach import Attachment, attached
from harness.engine.engine import Engine, Generation
from harness.engine.footprint import footprint
from kernels.dispatch import use_backend
from methods.full import Full
from methods.oracle import Oracle
from tests.harness.engine.test_generate import conversation
from tests.harness.engine.test_hf import NEW, generated
from tests.tape import Tape
from tests.tiny import HYBRID, WINDOW, fresh, prompt, tiny

hybrid = pytest.mark.parametrize("architecture", HYBRID)
ROW = 2 * 2 * 16 * 4  # bytes of a token in one layer
SLIDING = {"gemma3_text": 4, "gpt_oss": 2}


def answer(kv: Attachment, length: int, chunk: int | None = None, graphs: Any = None, new: int = NEW) -> Generation:
    return Engine(kv, prefill_chunk=chunk, graphs=graphs).generate(prompt(length), max_new_tokens=new)


@pytest.mark.tokens
@hybrid
@pytest.mark.parametrize("length", [1, WINDOW - NEW, WINDOW, WINDOW + 1, 3 * WINDOW + 5])
@pytest.mark.parametrize("chunk", [None, 7])
def test_texts_around_the_window_are_generates(architecture: str, length: int, chunk: int | None) -> None:
    with attached(tiny(architecture), Full()) as kv:
        generation = answer(kv, length, chunk)
    assert generation.tokens == generates(architecture, length)


@cache
def generates(architecture: str, length: int) -> list[list[int]]:
    return generated(tiny(architecture), prompt(length))


@pytest.mark.tokens
@hybrid
def test_turns_are_generates(architecture: str) -> None:
    model = tiny(architecture)
    plain = conversation(model, DynamicCache(config=model.config))
    with attached(model, Full()) as kv:
        assert conversation(model, kv.cache(capacity=140)) == plain


@hybrid
def test_layers_that_slide_take_the_bytes_of_their_window_and_no_budget(architecture: str) -> None:
    whole = tiny(architecture).config.num_hidden_layers - SLIDING[architecture]
    with attached(tiny(architecture), Oracle(sinks=0, recent_ratio=0), budget=0.2) as kv:
        assert [spec.index for spec in kv.specs] == list(range(whole))
        assert {spec.num_layers for spec in kv.specs} == {whole}
        generation = answer(kv, 100)
        cache = kv.cache(capacity=100 + NEW)
    assert generation.kv["device"] == (whole * (100 + NEW) + SLIDING[architecture] * WINDOW) * ROW
    assert (generation.measured["attended_prompt"], generation.measured["union_prompt"]) == (20, 20)
    assert len(cache.method_layers) == whole
    sliding = [layer for layer in cache.layers if layer.spec.window is not None]
    assert footprint(sliding)["device"] == SLIDING[architecture] * WINDOW * ROW


QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "num_hidden_layers": 4}


@pytest.mark.tokens
@pytest.mark.parametrize(("architecture", "more"), [("qwen2", QWEN), ("mistral", {"sliding_window": WINDOW})])
@pytest.mark.parametrize("chunk", [None, 9])
@pytest.mark.parametrize("graphs", [False, True])
def test_windows_of_models_that_run_by_blocks(
    architecture: str, more: dict[str, Any], chunk: int | None, graphs: bool
) -> None:
    model = fresh(architecture, **more)
    for length in (WINDOW - 6, 50):
        with attached(model, Full()) as kv, use_backend("torch"):
            engine = Engine(kv, prefill_chunk=chunk, graphs=Tape() if graphs else None)
            generation = engine.generate(prompt(length), max_new_tokens=NEW)
        assert engine.plain_reason is None
        assert (generation.capture_s is not None) == graphs
        assert generation.tokens == generated(model, prompt(length))


def test_where_every_layer_slides_a_method_needs_a_text_within_the_window() -> None:
    model = fresh("mistral", sliding_window=WINDOW)
    with attached(model, Oracle(sinks=0, recent_ratio=0), budget=0.5) as kv:
        assert answer(kv, 20, new=4).measured["attended_prompt"] == 10
        with pytest.raises(ValueError, match="slides over 24"):
            answer(kv, 20, new=5)
    with attached(model, Full()) as kv:
        generation = answer(kv, 50)
    assert generation.measured["attended_prompt"] < WINDOW  # of those that are in the window, fewer with every step
    assert generation.measured["attended_total"] == WINDOW
