"""flash-attn is not here: stand-ins with its arguments, layouts and checks say whether we call it right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ops, reference
from kernels.dispatch import BackendError, use_backend
from kernels.ragged import Ragged
from kernels.reference import Segment
from tests.kernels.op_cases import random


def attend(q: Tensor, k: Tensor, v: Tensor, live: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attend from one token of one sequence. q [H D], k, v [S G D] -> [H D], [H]; of no token plus infinity."""
    if not live:
        return torch.zeros_like(q), torch.full(q.shape[:1], float("inf"))
    k, v = (x[:live].repeat_interleave(q.shape[0] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("hd,shd->hs", q, k) * scale
    return torch.einsum("hs,shd->hd", scores.softmax(-1), v), scores.logsumexp(-1)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor | None = None, softmax_scale: float = 1.0,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B 1 H D], caches [B S G D] -> [B 1 H D], [B H 1]"""
    assert return_softmax_lse
    assert all(x.stride(-1) == 1 for x in (q, k_cache, v_cache))
    assert cache_seqlens is None or (cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous())
    batch, stored = k_cache.shape[:2]
    lengths = [stored] * batch if cache_seqlens is None else cache_seqlens.tolist()
    parts = [attend(q[i, 0], k_cache[i], v_cache[i], lengths[i], softmax_scale) for i in range(batch)]
    return torch.stack([out for out, _ in parts])[:, None], torch.stack([lse for _, lse in parts])[..., None]


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """q [B T H D], k, v [B S G D] -> [B T H D], the last query sees the last key."""
    share = q.shape[2] // k.shape[2]
    weights = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(share, 2)) * softmax_scale
    if causal:
        weights += torch.full(weights.shape[2:], float("-inf")).triu(1 + k.shape[1] - q.shape[1])
    return torch.einsum("bhts,bshd->bthd", weights.softmax(-1), v.repeat_interleave(share, 2))


def loaded(monkeypatch: pytest.MonkeyPatch, with_kvcache: Callable[..., Any]) -> dict[str, Any]:
    """Run kernels/flash.py with stand-ins; it is not imported, so that others do not find it."""
    module = ModuleType("flash_attn")
    vars(module).update(flash_attn_func=flash_attn_func, flash_attn_with_kvcache=with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return run_path(str(Path(reference.__file__).with_name("flash.py")))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return loaded(monkeypatch, flash_attn_with_kvcache)


def segment(seed: int, batch: int, stored: int, live: Tensor | None = None) -> Segment:
    """Return a view of a store that has room for more."""
    k, v = (random(seed + i, batch, 2, stored + 40, 16)[:, :, :stored] for i in range(2))
    return Segment(k, v, None, live)


CASES = {
    "some of one": [segment(1, 1, 37, torch.tensor([20]))],
    "several": [segment(1, 1, 5), segment(3, 1, 37, torch.tensor([9])), segment(5, 1, 0), segment(7, 1, 1)],
    "one is empty": [segment(1, 1, 5), segment(3, 1, 37, torch.tensor([0]))],
    "some of each sequence": [
        segment(1, 3, 256, torch.tensor([256, 7, 1])),
        segment(3, 3, 512, torch.tensor([0, 500, 9])),
    ],
    "the same of all": [segment(1, 2, 256, torch.tensor([30]))],
}


@pytest.mark.parametrize("name", CASES)
def test_decode_attention_is_the_references(flash: dict[str, Any], name: str) -> None:
    segments = CASES[name]
    q = random(0, len(segments[0].k), 6, 1, 16)
    wanted = reference.segment_attention_with_lse(q, segments, 0.3)
    torch.testing.assert_close(flash["segment_attention_with_lse"](q, segments, 0.3), wanted)
    torch.testing.assert_close(flash["segment_attention"](q, segments, 0.3), wanted[0])


@pytest.mark.parametrize("new", [9, 4, 1])
def test_whole_prompts_and_later_chunks(flash: dict[str, Any], new: int) -> None:
    q, k, v = random(1, 2, 6, new, 16), random(2, 2, 2, 9, 16), random(3, 2, 2, 9, 16)
    wanted = reference.prefill_attention(q, k, v, 0.3)
    torch.testing.assert_close(flash["prefill_attention"](q, k, v, 0.3), wanted)


def test_what_it_cannot_read_is_refused_by_name(flash: dict[str, Any]) -> None:
    q, whole = random(0, 1, 6, 1, 16), segment(1, 1, 37)
    refuses = flash["segment_attention_with_lse_refuses"]
    assert "float32" in refuses(q, [whole], 1.0)
    assert "chosen" in refuses(q, [whole, whole._replace(rows=torch.zeros(1, 2, 3, dtype=torch.int64))], 1.0)
    ragged: Any = Ragged([whole.k, whole.k[:, :, :9]])
    assert refuses(q, [Segment(ragged, ragged)], 1.0)


def test_a_release_without_log_sum_exps_takes_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    old = loaded(monkeypatch, lambda q, k_cache, v_cache, cache_seqlens=None: q)
    assert "2.6.1" in old["segment_attention_refuses"](random(0, 1, 6, 1, 16), [segment(1, 1, 37)], 1.0)
    q, k, v = random(0, 1, 6, 9, 16), random(1, 1, 2, 9, 16), random(2, 1, 2, 9, 16)
    torch.testing.assert_close(old["prefill_attention"](q, k, v, 0.3), reference.prefill_attention(q, k, v, 0.3))


def test_the_order_is_fixed_until_another_is_asked_for() -> None:
    q, segments = random(0, 1, 6, 1, 16), [segment(1, 1, 37)]
    assert ops.segment_attention.order == ("triton", "flash", "cpu", "torch")
    try:
        ops.prefer({"segment_attention": ["torch", "flash"]})
        assert ops.segment_attention.order == ("torch", "flash", "triton", "cpu")
        assert ops.top_k.order == tuple(ops.top_k.targets)
        ops.forget_used()
        ops.segment_attention(q, segments, 1.0)
        assert ops.used_backends() == {"segment_attention": ["torch"]}
    finally:
        ops.prefer({})
    assert ops.segment_attention.order == tuple(ops.segment_attention.targets)
    with use_backend("flash"), pytest.raises(BackendError, match="flash_attn"):
        ops.segment_attention(q, segments, 1.0)
