"""FlashAttention in torch runs on no CPU: stand-ins with its arguments and masks say whether we call it right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import fused, ops, reference, windowed
from kernels.dispatch import use_backend
from kernels.sink_logits import causal_attention
from tests.kernels.op_cases import WINDOWS, random

LONG = 1 << 30


class Flash:
    """Attends as the two operations do, and notes with which masks it was called."""

    def __init__(self) -> None:
        self.masks: list[Any] = []

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> tuple[Tensor, ...]:
        """q [B H T D], k, v [B G S D] -> [B H T D], [B H T]"""
        assert (dropout, debug) == (0.0, False)
        self.masks.append(causal)
        first = k.shape[2] - q.shape[2] if causal else k.shape[2]
        out, lse = windowed.windowed_attention(q, k, v, scale, first, LONG)
        return out, lse, *[torch.empty(0)] * 7

    def planned(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, dropout: float, causal: bool, debug: bool, *,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """q [B H T D], k, v [B G S D] -> [B H T D], [B H T 1]; a causal mask begins at the first key."""
        assert (bias, lse, dropout, debug) == (None, True, 0.0, False)
        assert all(x.is_contiguous() for x in (k, v))
        self.masks.append((k.shape[2], causal))
        out, sums = windowed.windowed_attention(q, k, v, scale, 0 if causal else k.shape[2], LONG)
        return torch.empty_like(q).copy_(out), sums.unsqueeze(3), *[torch.empty(0)] * 7

    def by_token(
        self, q: Tensor, k: Tensor, v: Tensor, cum_q: None, cum_k: None, most_q: int, most_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """q [B T H D], k, v [B S G D] -> [B T H D], [B H T]; windows count from the last query's key, the last one."""
        assert (most_q, most_k, dropout, debug) == (q.shape[1], k.shape[1], 0.0, False)
        assert causal == (window_size_right == 0)
        assert min(window_size_left, window_size_right) >= 0
        self.masks.append((window_size_left, window_size_right))
        first = k.shape[1] - q.shape[1] + window_size_right
        whole = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = windowed.windowed_attention(*whole, scale, first, window_size_left + window_size_right + 1)
        return out.transpose(1, 2), lse, *[torch.empty(0)] * 3


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    """FlashAttention on a card that there seems to be."""
    flash = Flash()
    for name, run in (("flash", flash.dense), ("cudnn", flash.planned)):
        aten = f"_scaled_dot_product_{name}_attention"
        monkeypatch.setattr(torch.ops.aten, aten, SimpleNamespace(default=run), raising=False)
    monkeypatch.setattr(fused, "_windowed", SimpleNamespace(default=flash.by_token))
    monkeypatch.setattr(fused, "can_use_flash_attention", lambda params: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    ops.forget_used()
    return flash


def drawn(
    heads: int, groups: int, dim: int, new: int, stored: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    q = random(1, 2, new, heads, dim).transpose(1, 2).to(dtype)
    return q, *(random(seed, 2, groups, stored + 9, dim).to(dtype)[:, :, :stored] for seed in (2, 3))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("new", "stored"), [(9, 9), (7, 40), (2, 3)])
def test_whole_prompts_and_later_chunks(flash: Flash, dim: int, new: int, stored: int) -> None:
    q, k, v = drawn(6, 2, dim, new, stored)
    assert_close(ops.prefill_attention(q, k, v, 0.3), reference.prefill_attention(q, k, v, 0.3), atol=2e-2, rtol=0)
    assert ops.used_backends() == {"prefill_attention": ["fused"]}
    assert flash.masks == [True]


def test_sinks_take_the_log_sum_exp(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(6, 2, 64, 7, 40)
    sinks = random(4, 6)
    got = causal_attention(q, k, v, 0.3, sinks)
    assert ops.used_backends() == {"windowed_attention": ["fused"]}
    assert flash.masks == [True]
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert_close(got, causal_attention(q, k, v, 0.3, sinks), atol=2e-2, rtol=0)


@pytest.mark.parametrize("name", [*WINDOWS, "all-seen"])
def test_windows(flash: Flash, name: str) -> None:
    """Where some query sees no key, or there is one query, another backend takes them."""
    new, stored, first, window = (WINDOWS | {"all-seen": (7, 40, 40, 1000)})[name]
    q, k, v = drawn(6, 2, 64, new, stored)
    reason = ops.windowed_attention.refusal("fused", q, k, v, 0.3, first, window)
    seen = [window > behind >= 0 for t in range(new) for behind in (first + t - s for s in range(stored))]
    all_see = all(any(seen[t * stored : (t + 1) * stored]) for t in range(new))
    assert (reason is None) == (all_see and new > 1)
    if reason is None:
        wanted = windowed.windowed_attention(q, k, v, 0.3, first, window)
        assert_close(fused.windowed_attention(q, k, v, 0.3, first, window), wanted, atol=2e-2, rtol=0)
        plain = {"all-seen": False, "causal": True}
        assert [plain.get(name, mask) for mask in flash.masks] == flash.masks


@pytest.mark.parametrize(
    ("new", "stored", "masks"),
    [
        (12, 12, [(12, True)]),
        (12, 24, [(8, False), (4, False), (12, True)]),  # lengths of which cuDNN has plans: powers of two
        (8, 28, [(16, False), (4, False), (8, True)]),
        (12, 23, [True]),  # FlashAttention: other places or lengths, short chunks
        (10, 10, [True]),
        (4, 8, [True]),
    ],
)
def test_cudnn_takes_long_chunks_of_common_lengths(
    flash: Flash, new: int, stored: int, masks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_PLANNED", 8)
    monkeypatch.setattr(fused, "_STEP", 4)
    monkeypatch.setattr(fused, "can_use_cudnn_attention", lambda params: True)
    for major in (9, 8):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        flash.masks.clear()
        q, k, v = drawn(6, 2, 64, new, stored)
        with use_backend("torch"):
            got = fused.prefill_attention(q, k, v, 0.3)
        assert_close(got, reference.prefill_attention(q, k, v, 0.3), atol=2e-2, rtol=0)
        assert flash.masks == (masks if major == 9 else [True])


def test_what_it_cannot_do_is_refused(flash: Flash, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = ops.prefill_attention.refusal
    assert "float32" in str(refusal("fused", *drawn(6, 2, 64, 9, 9, torch.float32), 1.0))
    assert "got 1 and 9" in str(refusal("fused", *drawn(6, 2, 64, 1, 9), 1.0))
    assert "multiple of 8" in str(refusal("fused", *drawn(6, 2, 20, 9, 9), 1.0))
    monkeypatch.setattr(fused, "can_use_flash_attention", lambda params: False)
    assert "FlashAttention" in str(refusal("fused", *drawn(6, 2, 64, 9, 9), 1.0))
    monkeypatch.setattr(fused, "_HAS_WINDOWS", False)
    assert "version" in str(ops.windowed_attention.refusal("fused", *drawn(6, 2, 64, 9, 9), 1.0, 0, 9))


def test_on_a_cpu_it_is_refused_by_its_device() -> None:
    assert "on a CUDA device" in str(ops.prefill_attention.refusal("fused", *drawn(6, 2, 64, 9, 9), 1.0))
    assert fused._HAS_WINDOWS
