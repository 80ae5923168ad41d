"""Tiny random models of every supported architecture: 3 layers, 8 query heads, 2 KV heads, head size 16, fp32."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from harness.models.hub import HuggingFace
from harness.models.random import byte_tokenizer

SHAPE = {
    "vocab_size": 199, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOW = 24  # of layers that slide
SLIDES = ["sliding_attention", "sliding_attention", "full_attention"]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "gemma3_text": {
        "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": WINDOW, "num_hidden_layers": 6,
        "layer_types": 2 * SLIDES, "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
PARTLY: dict[str, dict[str, Any]] = {  # they rotate a part of each head: GLM neighbouring channels, Phi-4-mini halves
    "glm": {"head_dim": 16, "attention_bias": True},
    "glm4": {"head_dim": 16, "attention_bias": True},
    "phi4": {"model_type": "phi3", "rope_parameters": PART, "partial_rotary_factor": 0.75},
}
UNTIED = {"tie_word_embeddings": False}  # else Gemma 4 repeats a token, whatever its attention gives
GEMMA4: dict[str, Any] = {  # layers that slide have smaller heads
    "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW, "num_hidden_layers": 4,
    "layer_types": 2 * SLIDES[1:], "hidden_size_per_layer_input": 0,
}  # fmt: skip
E2B: dict[str, Any] = GEMMA4 | {  # the last two layers borrow keys and values
    "model_type": "gemma4_text", "num_hidden_layers": 6, "layer_types": 3 * SLIDES[1:], "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 199,
}  # fmt: skip
FURTHER: dict[str, dict[str, Any]] = {  # families that tests/families.py alone holds against `generate`
    "qwen2.5-14b": {"model_type": "qwen2", "hidden_size": 160, "num_attention_heads": 10},  # groups of 5 query heads
    "qwen3_moe": {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"num_hidden_layers": 4},  # the last does not rotate
    "glm4_moe": {
        "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "gemma4_text": GEMMA4
    | UNTIED
    | {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
    "mimo_v2_flash": {
        "head_dim": 24, "v_head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 4,
        "layer_types": 2 * SLIDES[1:], "mlp_layer_types": ["dense"] + 3 * ["sparse"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    },  # layers that slide have twice as many KV heads, and sinks
    "gemma4_e2b": E2B | UNTIED,
    "gemma3n_text": {
        "head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 6, "layer_types": 3 * SLIDES[1:],
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 199,
        "laurel_rank": 8, "intermediate_size": 6 * [160], "activation_sparsity_pattern": 6 * [0.0],
        "tie_word_embeddings": False,
    },  # the last two layers borrow keys and values
    "gemma4_moe": GEMMA4
    | UNTIED
    | {"model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
    | {"moe_intermediate_size": 48},
    "granite4": {
        "model_type": "granitemoehybrid", "layer_types": 3 * ["attention"], "position_embedding_type": "rope",
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64, "mamba_n_heads": 8,
        "attention_multiplier": 0.2,
    },  # of a class for hybrids, without a layer that keeps a state
    "gemma3": {  # of texts and images
        "text_config": SHAPE | ARCHITECTURES["gemma3_text"] | {"vocab_size": 264, "tie_word_embeddings": True},
        "image_token_index": 260,
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "mm_tokens_per_image": 4,
    },
}  # fmt: skip
GDN: dict[str, Any] = {  # Gated DeltaNet
    "num_hidden_layers": 4, "layer_types": 2 * ["linear_attention", "full_attention"], "head_dim": 16,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
FEW: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
STATEFUL: dict[str, dict[str, Any]] = {  # some of their layers keep a state in place of keys and values, or beside them
    "qwen3_5_text": GDN,
    "qwen3_next": GDN | FEW | {"num_experts": 4, "shared_expert_intermediate_size": 48},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "attention"], "head_dim": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
    },  # its attention does not rotate
    "falcon_h1": MAMBA | {"mamba_d_ssm": 256, "head_dim": 16},  # each layer has both
    "lfm2": {"num_hidden_layers": 4, "layer_types": 2 * ["conv", "full_attention"], "block_multiple_of": 16},
    "granitemoehybrid": MAMBA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
    | {"num_hidden_layers": 4, "layer_types": 2 * ["mamba", "attention"]},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 8, "use_mamba_kernels": False,
    },
    "bamba": MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "olmo_hybrid": GDN,
}  # fmt: skip
MLA: dict[str, Any] = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "num_key_value_heads": 8,
}  # fmt: skip
ROUTED: dict[str, Any] = FEW | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
INDEXED: dict[str, Any] = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 512}  # which covers short prompts
LATENT: dict[str, dict[str, Any]] = {  # keys and values of a token are one latent
    "deepseek_v2": MLA | ROUTED | {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN},
    "deepseek_v3": MLA | ROUTED | {"rope_parameters": YARN},
    "glm4_moe_lite": MLA | ROUTED | {"n_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v32": MLA | ROUTED | INDEXED | {"rope_parameters": YARN},
    "glm_moe_dsa": MLA | ROUTED | INDEXED | {"n_group": 1, "indexer_types": ["full", "shared", "full"]},
    "minicpm3": MLA,
    "kimi_linear": MLA
    | FEW
    | {"num_hidden_layers": 4, "layer_types": 2 * ["linear_attention", "full_attention"], "linear_head_dim": 16}
    | {"linear_num_heads": 4, "num_local_experts": 4, "mlp_layer_types": ["dense", *3 * ["sparse"]]},
}
IMAGES: dict[str, Any] = {
    "depth": 1, "num_heads": 2, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16,
    "intermediate_size": 16, "out_hidden_size": 128, "deepstack_visual_indexes": [0],
}  # fmt: skip
PIXTRAL = IMAGES | {"model_type": "pixtral", "image_size": 32, "patch_size": 8}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
LENGTHENED: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "llama_4_scaling_beta": 0.1}
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # of texts and images: kind, text part, vision
    "mistral3": ("mistral3", {"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "ministral3": (
        "mistral3",
        {"model_type": "ministral3", "rope_parameters": LENGTHENED | {"original_max_position_embeddings": 32}},
        PIXTRAL,
    ),
    "mistral4": (
        "mistral3",
        {"model_type": "mistral4", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}
        | MLA
        | ROUTED
        | {"qk_nope_head_dim": 8, "kv_lora_rank": 8},
        PIXTRAL,
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {"rope_parameters": AXES}, IMAGES),
    "qwen3_vl": ("qwen3_vl", {"rope_parameters": AXES}, IMAGES),
    "qwen3_vl_moe": ("qwen3_vl_moe", {"rope_parameters": AXES, "num_experts": 4} | FEW, IMAGES),
    "gemma4": (
        "gemma4",
        E2B | {"vocab_size_per_layer_input": 264},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    ),
    "qwen3_5": ("qwen3_5", GDN, IMAGES),
    "qwen3_5_moe": ("qwen3_5_moe", GDN | FEW | {"num_experts": 4, "shared_expert_intermediate_size": 48}, IMAGES),
}


def whole(name: str, *, tied: bool = False) -> PreTrainedModel:
    """A fresh model of texts and images with random weights."""
    kind, text, vision = WHOLE[name]
    text = SHAPE | {"vocab_size": 264, "head_dim": 16, "initializer_range": 0.15, "tie_word_embeddings": tied} | text
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=tied, image_token_id=260
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


HYBRID = ("gemma3_text", "gpt_oss")  # they run their own forward, and some of their layers slide
BY_BLOCKS = tuple(name for name in ARCHITECTURES if name not in HYBRID)


@cache
@torch.inference_mode(mode=False)  # weights made inside would serve no test outside, whichever of them comes first
def tiny(architecture: str) -> PreTrainedModel:
    """The same weights each time. Wide initial weights, so that attention is far from uniform.

    What a test draws afterwards does not depend on whether it was the first to ask for the model."""
    return fresh(architecture)


def fresh(architecture: str, **more: Any) -> PreTrainedModel:
    """A fresh model of `tiny`, or of another type that transformers knows, with `more` in its config."""
    own = (ARCHITECTURES | PARTLY | FURTHER | STATEFUL | LATENT).get(architecture, {})
    shape = {"model_type": architecture} | SHAPE | own | more
    config = AutoConfig.for_model(**shape, initializer_range=0.15)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if architecture in PARTLY and name.endswith("bias"):  # zeros otherwise
                parameter.data.uniform_(-0.3, 0.3)
    return model


BORDER = 64  # tokens up to which the models of `by_length` rotate a text as trained


def by_length(architecture: str, kind: str, border: int = BORDER, **more: Any) -> PreTrainedModel:
    """A fresh model whose rotation depends on the length of the text: `longrope` or `dynamic`. It never ends a text."""
    part = 0.75 if architecture == "phi4" else 1.0
    pairs = int(8 * part)
    factors = {"short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs, "original_max_position_embeddings": border}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | (factors if kind == "longrope" else {})
    rope |= {"partial_rotary_factor": part} if part < 1 else {}
    own = {"rope_parameters": rope, "max_position_embeddings": 4 * border if kind == "longrope" else border}
    own |= {"original_max_position_embeddings": border} if kind == "longrope" else {}
    model = fresh(architecture, **own, **more)
    model.generation_config.eos_token_id = None
    return model


def saved(model: PreTrainedModel, folder: Path) -> HuggingFace:
    """A model in the hub's layout, with a tokenizer that has a token per byte."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return HuggingFace(str(folder))


def eager(architecture: str) -> PreTrainedModel:
    """A copy that gives its attention weights: asked for them, transformers leaves hooks on the layers."""
    model = deepcopy(tiny(architecture))
    model.set_attn_implementation("eager")
    return model


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """[B S] random token ids, no special ones."""
    return torch.randint(3, SHAPE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))
