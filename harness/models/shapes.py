"""The shapes of public models, for random weights: what their config.json says, without a download."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.models.architectures import class_of


class Sizes(NamedTuple):
    model_type: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    window: int
    rope_theta: float
    rope: Mapping[str, Any] = MappingProxyType({})  # scaling, where there is one
    more: Mapping[str, Any] = MappingProxyType({})
    dtype: str = "bfloat16"  # what the model was published in

    def config(self, layers: int | None) -> dict[str, Any]:
        """Keyword arguments of transformers' config; `layers`: None for all."""
        common = {
            "architectures": [class_of(self.model_type)],
            "num_hidden_layers": self.layers if layers is None else layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.window,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta} | dict(self.rope),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
        return common | dict(self.more)


LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

GEMMA_3 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {"head_dim": 64, "sliding_window": 128, "num_local_experts": 32, "num_experts_per_tok": 4}

# fmt: off
SHAPES = {
    # name                   type     layers hidden inner heads KV   vocab     window         theta
    "tiny":            Sizes("llama",     3,   128,   256,  8,  2,     512,   131_072,       10_000.0, dtype="float32"),
    "smollm2":         Sizes("llama",    30,   576,  1536,  9,  3,  49_152,     8_192,      100_000.0,
                             more={"tie_word_embeddings": True}),
    "llama-3.1-8b":    Sizes("llama",    32,  4096, 14336, 32,  8, 128_256,   131_072,      500_000.0, LLAMA_31_ROPE),
    "llama-3-8b-1m":   Sizes("llama",    32,  4096, 14336, 32,  8, 128_256, 1_048_576, 3_580_165_449.0),
    "llama-2-7b-chat": Sizes("llama",    32,  4096, 11008, 32, 32,  32_000,     4_096,       10_000.0, dtype="float16"),
    "mistral-7b-v0.2": Sizes("mistral",  32,  4096, 14336, 32,  8,  32_000,    32_768,    1_000_000.0,
                             more={"sliding_window": None}),
    "qwen2-7b":        Sizes("qwen2",    28,  3584, 18944, 28,  4, 152_064,    32_768,    1_000_000.0,
                             more={"rms_norm_eps": 1e-6}),
    "yi-9b-200k":      Sizes("llama",    48,  4096, 11008, 32,  4,  64_000,   262_144,   10_000_000.0,
                             more={"rms_norm_eps": 1e-6}),
    # plain RoPE: LongRoPE's factors change neither cost nor memory
    "phi-3-mini-128k": Sizes("phi3",     32,  3072,  8192, 32, 32,  32_064,   131_072,       10_000.0,
                             more={"sliding_window": 262_144}),
    "gemma-3-1b":      Sizes("gemma3_text", 26, 1152, 6912,  4,  1, 262_144,    32_768,    1_000_000.0, more=GEMMA_3),
    "gpt-oss-20b":     Sizes("gpt_oss",  24,  2880,  2880, 64,  8, 201_088,   131_072,      150_000.0, GPT_OSS_ROPE,
                             more=GPT_OSS),
}
# fmt: on
