"""The costs along an answer are exact where they can be counted; test_slots.py holds the other methods'."""

from __future__ import annotations

from harness.engine.attach import attached
from harness.engine.engine import Engine
from methods.base import Budget
from methods.full import Full
from tests.methods.test_contract import small
from tests.tiny import prompt, tiny


def test_full_reads_all_and_a_limit_of_generated_tokens_ends_growth() -> None:
    row = 3 * 2 * 2 * 16 * 4  # bytes of a token: layers, keys and values, heads, channels, fp32
    with attached(tiny("llama"), Full()) as kv:
        full = Engine(kv).generate(prompt(50), max_new_tokens=140).along
        assert Engine(kv).generate(prompt(50), max_new_tokens=64).along is None  # 63 steps
    assert full == {
        "steps": [64, 128, 139],
        "attended": [50 + 32.5, 50 + 96.5, 50 + 134],
        "moved_bytes": [0, 0, 0],
        "used_bytes": [row * (50 + steps) for steps in (64, 128, 139)],
    }
    with attached(tiny("llama"), small("streaming"), budget=Budget(0.5, generated=40)) as kv:
        kept = Engine(kv).generate(prompt(50), max_new_tokens=140).along
    assert kept is not None
    assert kept["attended"][0] < kept["attended"][1] <= 25 + 40
    assert max(kept["used_bytes"]) <= row * (25 + 40) + 64 * 25  # with the positions that are kept
