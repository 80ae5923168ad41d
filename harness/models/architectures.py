"""Lists the architectures that run, by their class in transformers."""

from __future__ import annotations

from typing import NamedTuple


class Architecture(NamedTuple):
    model_type: str  # transformers' name in config.json
    by_blocks: bool  # its decoder layers are built as kernels/block.py describes, so engine/forward.py can run them
    unlike: str = ""  # how its decoder layers differ from those
    drops_cache: bool = False  # `generate` computes a text again that outgrows LongRoPE's original length
    sink_logits: bool = False  # its softmax has an additional term per query head (kernels/sink_logits.py)


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", by_blocks=True),
    "MistralForCausalLM": Architecture("mistral", by_blocks=True),
    "Qwen2ForCausalLM": Architecture("qwen2", by_blocks=True),
    "Qwen3ForCausalLM": Architecture("qwen3", by_blocks=True),
    "Phi3ForCausalLM": Architecture("phi3", by_blocks=True, drops_cache=True),
    # The text model alone (1B); the larger ones are Gemma3ForConditionalGeneration
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text", by_blocks=False, unlike="it has norms after its sublayers as well, and a GELU MLP"
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss", by_blocks=False, sink_logits=True, unlike="its MLP is a mixture of experts"
    ),
}
SINK_LOGITS = tuple(known.model_type for known in ARCHITECTURES.values() if known.sink_logits)
