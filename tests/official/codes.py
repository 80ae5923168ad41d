"""KIVI: what attention over its codes gives, on the embedded model's keys."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

import torch
from torch import Tensor

from methods.kivi import Kivi
from tests.methods.recorded import Recorded
from tests.official.clones import Repository, flash_attn_func, released
from tests.official.comparison import Comparison, Difference, off
from tests.official.selecting import LAYERS, STEPS, flat

KIVI = Repository("jy-yuan/KIVI", "876b4d2d08e3b1d5f70d0969c299d8c7c42ddfb6")
PROMPT = 700  # 60 keys wait
SAME = 0.01  # of an output's length: ranges are fp16 here


def _unchanged(*given: Any) -> Any:
    return lambda decorated: decorated


KIVI_STUBS: dict[str, dict[str, Any]] = {
    "transformers.models.llama.modeling_llama": {
        **dict.fromkeys(("LlamaRotaryEmbedding", "LlamaRMSNorm", "LlamaMLP", "LLAMA_INPUTS_DOCSTRING")),
        **dict.fromkeys(("BaseModelOutputWithPast", "CausalLMOutputWithPast")),
        "LlamaPreTrainedModel": torch.nn.Module,
        "add_start_docstrings_to_model_forward": _unchanged,
        "replace_return_docstrings": lambda **_: _unchanged(),
        "LlamaConfig": None,
        "Union": Union,
        "apply_rotary_pos_emb": lambda q, k, *_: (q, k),
    },
    "transformers.modeling_attn_mask_utils": {"_prepare_4d_causal_attention_mask": None},
    "triton": {"jit": lambda kernel: kernel},
    "triton.language": {"constexpr": None},
}


def _pack(x: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """What its Triton kernel computes, by its code in plain torch."""
    code, scale, least = sys.modules["quant.new_pack"].quant_and_pack_vcache(x, group, bits)
    return code, scale.squeeze(-1), least.squeeze(-1)


def _product(group: int, x: Tensor, code: Tensor, scale: Tensor, least: Tensor, bits: int) -> Tensor:
    """What its CUDA kernel computes: `x` times what the codes stand for."""
    unpack = sys.modules["quant.new_pack"].unpack_and_dequant_vcache
    return x @ unpack(code, scale.unsqueeze(-1), least.unsqueeze(-1), group, bits)


def kivi(bits: int, clone: Path) -> Difference:
    """Keys and values stand once per query head: its plain attention has no grouped heads."""
    s, method = Recorded(PROMPT + STEPS, LAYERS, repeated=True), Kivi(bits=bits)
    layers = s.start(method, None)
    s.seal(layers, 0, PROMPT)
    apart, ours_off, theirs_off = [], [], []
    stubs = KIVI_STUBS | {"quant.matmul": {"cuda_bmm_fA_qB_outer": _product}}
    for layer, ours in enumerate(layers):
        past, outs = None, []
        with released(clone, "models.llama_kivi", stubs) as module:
            module.triton_quantize_and_pack_along_last_dim = _pack
            for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, s.length))]:
                out, past = _forward(module.LlamaAttention_KIVI, s, method, layer, start, end, past)
                outs.append(out)
        for position, theirs in zip(range(PROMPT, s.length), outs[1:], strict=True):
            out = flat(ours.decode(s.at(layer, position, position + 1)))
            q, k, v = (x[:, :, : position + 1].transpose(1, 2) for x in (s.q(layer), s.k(layer), s.v[layer]))
            exact = flash_attn_func(q[:, -1:], k, v).flatten(2)
            apart.append(off(out, theirs))
            ours_off.append(off(out, exact))
            theirs_off.append(off(theirs, exact))
    same, of = int((torch.stack(apart) < SAME).sum()), len(apart)
    ours_mean, theirs_mean, between = (float(torch.stack(x).mean()) for x in (ours_off, theirs_off, apart))
    words = (
        f"{100 * between:.2f} % of an output in the mean: ranges are fp16 here, widened so that they cut nothing off. "
        f"Both are off the exact output by {ours_mean:.3f} (ours) and {theirs_mean:.3f} (theirs) of it"
    )
    return Difference(same, of, words)


def _forward(attention: Any, s: Recorded, method: Kivi, layer: int, start: int, end: int, past: Any) -> Any:
    """Run its attention for tokens start..end-1. -> its output [1 T H*D] and its cache"""
    q, k, v = (flat(x[:, :, start:end]) for x in (s.q(layer), s.k(layer), s.v[layer]))
    heads, dim = s.shape.heads, s.shape.dim
    module = SimpleNamespace(
        config=SimpleNamespace(pretraining_tp=1), q_proj=lambda _: q, k_proj=lambda _: k, v_proj=lambda _: v,
        o_proj=lambda x: x, rotary_emb=lambda *_: (None, None), num_heads=heads, num_key_value_heads=heads,
        num_key_value_groups=1, head_dim=dim, hidden_size=heads * dim, k_bits=method.bits, v_bits=method.bits,
        group_size=method.group, residual_length=method.residual,
    )  # fmt: skip
    output, _, cache = attention.forward(module, q, None, None, past, use_cache=True)
    return output, cache


COMPARISONS = [
    Comparison(
        "kivi", KIVI, "models/llama_kivi.py", f"outputs within {100 * SAME:g} %", partial(kivi, bits), f"bits={bits}"
    )
    for bits in (4, 2)
]
