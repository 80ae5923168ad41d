"""Provides random weights in the shape of a public model, for speed, memory and traffic without a
download, and quick tests.

Scores mean nothing here. Weights depend only on shape, layers, seed, dtype and kind of device.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harness.models import embedded
from harness.models.base import Identity, ModelError, ModelSource
from harness.models.gguf import byte_level

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("shapes.yaml").read_text(encoding="utf-8")
)
TOKENIZERS = ("auto", "smollm2", "bytes")
SMOLLM2_VOCAB = 49_152
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Random(ModelSource):
    """Provide a model with random weights. `shape`: a name in shapes.yaml. `layers`: how many, None
    for all. `tokenizer_name`: one of TOKENIZERS."""

    shape: str = "smollm2"
    layers: int | None = None
    seed: int = 0
    tokenizer_name: str = "auto"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ModelError(
                f"model.shape={self.shape} is unknown: choose one of {', '.join(SHAPES)}."
            )
        most = SHAPES[self.shape]["num_hidden_layers"]
        if self.layers is not None and not 1 <= self.layers <= most:
            raise ModelError(
                f"model.layers={self.layers} does not suit {self.shape}: choose 1 to {most}, or null for all."
            )
        if self.tokenizer_name not in TOKENIZERS:
            raise ModelError(
                f"model.tokenizer_name={self.tokenizer_name} is unknown: choose one of {', '.join(TOKENIZERS)}."
            )
        if self.tokenizer_name == "smollm2" and self._vocab < SMOLLM2_VOCAB:
            raise ModelError(
                f"model.tokenizer_name=smollm2 needs {SMOLLM2_VOCAB} tokens and {self.shape} has {self._vocab}: "
                "use tokenizer_name=bytes."
            )

    def identity(self) -> Identity:
        chosen = [self._arguments(), self.seed, self._tokenizer_name()]
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()
        return Identity(f"random/{self.shape}", f"config-sha256:{digest}", "random")

    def config(self) -> PreTrainedConfig:
        from transformers import AutoConfig

        tokenizer = self.tokenizer()
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        public = SHAPES[self.shape]
        return AutoConfig.for_model(
            public["model_type"], dtype=public["dtype"], **self._arguments(), **ends
        )

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return (
            embedded.SmolLM2().tokenizer()
            if self._tokenizer_name() == "smollm2"
            else byte_tokenizer()
        )

    def build(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """Return the model, whose weights are allocated once, with their dtype and on their device:
        the usual initialisation takes minutes for 8B on a CPU."""
        import torch
        from transformers import AutoModelForCausalLM

        config = self.config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model = model.to_empty(device=device)
        model.tie_weights()
        with torch.device(device):  # buffers that are computed, not loaded
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        # Gemma 3
        if (scale := getattr(model.model.embed_tokens, "scalar_embed_scale", None)) is not None:
            model.model.embed_tokens.embed_scale.fill_(scale)
        fill(model, torch.Generator(device).manual_seed(self.seed))
        return model

    def _arguments(self) -> dict[str, Any]:
        """Return the keyword arguments with which transformers makes the model's config."""
        public = {
            key: value
            for key, value in SHAPES[self.shape].items()
            if key not in ("model_type", "dtype")
        }
        return public if self.layers is None else public | {"num_hidden_layers": self.layers}

    def _tokenizer_name(self) -> str:
        if self.tokenizer_name != "auto":
            return self.tokenizer_name
        return "smollm2" if self._vocab >= SMOLLM2_VOCAB and embedded.installed() else "bytes"

    @property
    def _vocab(self) -> int:
        return int(SHAPES[self.shape]["vocab_size"])


def fill(model: nn.Module, generator: torch.Generator) -> None:
    """Fill a model with random weights: matrices are drawn so that their outputs have the variance
    of their inputs; norms are 1, biases 0. The numbers are uniform, since those are drawn faster
    than normal ones."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.0)
            elif parameter.dim() > 1:
                experts = (
                    model.get_submodule(name.rpartition(".")[0]) if parameter.dim() > 2 else None
                )
                inputs = parameter.shape[-2 if getattr(experts, "is_transposed", False) else -1]
                bound = (3 / inputs) ** 0.5
                parameter.uniform_(-bound, bound, generator=generator)
            else:
                parameter.fill_(1.0)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer that takes every byte as a token and has ChatML as template: 259
    tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    end, start, stop = SPECIAL_TOKENS
    return byte_level(
        [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())],
        SPECIAL_TOKENS,
        ByteLevel(add_prefix_space=False, use_regex=False),
        bos_token=start,
        eos_token=stop,
        pad_token=end,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
