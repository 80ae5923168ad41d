"""flash-attn is not here: a stand-in with its arguments and its layout says whether we call it right."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import reference
from tests.kernels.op_cases import random


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """q [B T H D], k, v [B S G D] -> [B T H D], the last query sees the last key."""
    share = q.shape[2] // k.shape[2]
    weights = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(share, 2)) * softmax_scale
    if causal:
        weights += torch.full(weights.shape[2:], float("-inf")).triu(1 + k.shape[1] - q.shape[1])
    return torch.einsum("bhts,bshd->bthd", weights.softmax(-1), v.repeat_interleave(share, 2))


@pytest.mark.parametrize("new", [9, 4, 1])
def test_whole_prompts_and_later_chunks(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    flash = run_path(str(Path(reference.__file__).with_name("flash.py")))  # not imported: others are to miss it
    q, k, v = random(1, 2, 6, new, 16), random(2, 2, 2, 9, 16), random(3, 2, 2, 9, 16)
    wanted = reference.prefill_attention(q, k, v, 0.3)
    torch.testing.assert_close(flash["prefill_attention"](q, k, v, 0.3), wanted)
    assert "got torch.float32" in flash["prefill_attention_refuses"](q, k, v, 0.3)
