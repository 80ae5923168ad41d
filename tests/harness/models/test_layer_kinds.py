"""Which layers of a model hold keys and values, by its config."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from harness.models.layer_kinds import layer_kinds
from tests.tiny import SHAPE

LINEAR = ["linear_attention", "full_attention", "linear_attention"]
SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]
BORROWS = {
    "num_hidden_layers": 5, "layer_types": [*SLIDES, "sliding_attention", "full_attention"], "sliding_window": 24,
    "num_kv_shared_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "own", "expected"),
    [
        ("llama", {}, ((0, 1, 2), (None, None, None), (), ())),
        ("olmo3", {"layer_types": SLIDES, "sliding_window": 24}, ((0, 1, 2), (24, None, 24), (), ())),
        ("qwen3_next", {"layer_types": LINEAR}, ((1,), (None,), (0, 2), ())),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"]}, ((1,), (None,), (0,), ())),
        ("falcon_h1", {}, ((0, 1, 2), (None, None, None), (0, 1, 2), ())),
        ("gemma4_text", BORROWS, ((0, 1, 2), (24, None, 24), (), ((3, 2), (4, 1)))),
    ],
)
def test_states_are_no_keys_and_values(kind: str, own: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert layer_kinds(AutoConfig.for_model(kind, **SHAPE | own)) == expected
