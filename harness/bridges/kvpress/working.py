"""Measures the working memory of a press, which kvpress does not state, on the first layer of a
small model whose heads have the given shape."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from harness.bridges.kvpress.building import build
from harness.bridges.kvpress.keep import press_one
from harness.bridges.kvpress.package import KVPressError
from harness.engine.allocations import Allocations
from harness.engine.hf import layer_specs
from methods.base import LayerWorkload

SAMPLES = 512, 1024  # tokens of the measured prompts
KV_HEADS = 2  # KV heads of the measured layer; with one, some copies would be views
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def working_bytes(press: Any, case: LayerWorkload) -> int:
    """Return the most bytes that `press`, a mapping with a hash, takes for one sequence besides the
    layer's input and its keys and values. They are taken to grow linearly between two measured
    lengths, and with the number of KV heads. A press that fails on the small model is assumed to
    copy keys and values, because all presses are given copies."""
    spec, share = case.spec, round(case.budget / case.sealed, 2)
    shape = KV_HEADS * spec.num_heads // spec.num_kv_heads, spec.head_dim, case.element_bytes
    copies = case.sealed * case.row_bytes
    try:
        short, long = (_measured(press, *shape, tokens, share) for tokens in SAMPLES)
    except KVPressError:
        return copies
    each = (long - short) / (SAMPLES[1] - SAMPLES[0])
    return max(copies, int((short + each * (case.sealed - SAMPLES[0])) * spec.num_kv_heads / KV_HEADS))


@cache
def _measured(press: Any, heads: int, head_dim: int, element_bytes: int, tokens: int, share: float) -> int:
    """Return the bytes measured on a layer of a small model with so many query heads."""
    config = LlamaConfig(
        hidden_size=heads * head_dim,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        vocab_size=8,
    )
    dtype = DTYPES[element_bytes]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        hidden = torch.randn(1, tokens, heads * head_dim).to(dtype)
        given = [torch.randn(1, KV_HEADS, tokens, head_dim).to(dtype) for _ in range(2)]
    built = build(press)
    built.post_init_from_model(model)
    counted = Allocations()
    with counted:
        press_one(built, layer_specs(model)[0], hidden, given, max(1, int(share * tokens)))
    return counted.peak
