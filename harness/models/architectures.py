"""The architectures that run, by their class in transformers: the one list."""

from __future__ import annotations

from typing import NamedTuple


class Architecture(NamedTuple):
    model_type: str  # transformers' name in config.json
    by_blocks: bool  # whether its decoder layers are those of kernels/block.py, so that engine/forward.py can run them


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", by_blocks=True),
    "MistralForCausalLM": Architecture("mistral", by_blocks=True),
    "Qwen2ForCausalLM": Architecture("qwen2", by_blocks=True),
    "Qwen3ForCausalLM": Architecture("qwen3", by_blocks=True),
    "Phi3ForCausalLM": Architecture("phi3", by_blocks=True),
}


def class_of(model_type: str) -> str:
    return next(name for name, known in ARCHITECTURES.items() if known.model_type == model_type)
