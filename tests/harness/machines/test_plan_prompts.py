"""The seconds up to a second token, by closed forms on a machine that is made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.machines.machine import Machine, MethodConstants
from harness.machines.plan import Workload, first_times, planned, step_times
from harness.models.base import ModelInfo
from harness.models.random import Random
from methods.full import Full
from methods.infllm import InfLLM
from methods.pqcache import PQCache
from tests.harness.machines.test_plan import FULL, KV, MADE_UP, info

MULTIPLYING = replace(MADE_UP, matmul_gflop_s={"bf16": 100_000.0}, to_host_gb_s=10, disk_gb_s=2, methods={})
PQ = replace(FULL, method=PQCache(cache_tokens=0), name="pqcache", budget=3000, placement="host")
TOKENS = FULL.tokens
STEP_S = step_times(MULTIPLYING, info(), FULL, 1, MethodConstants()).token_s[0]


def products_s(pairs: int) -> float:
    """Of Full's prompt: two operations for each weight that is no table and each token, four for each channel of a
    query and each token that it sees, and the first token's logits, which are bound by their bytes."""
    table = 128_256 * 4096
    weights = info().num_parameters - 2 * table
    return (2 * weights * TOKENS + 4 * 32 * 4096 * pairs) / 1e14 + 2 * table / 1e12


def tt2t_s(machine: Machine, model: ModelInfo, load: Workload) -> float:
    first = first_times(machine, model, load)
    assert first
    assert first.tt2t_s is not None
    return first.tt2t_s


WHOLE_S = products_s(TOKENS * (TOKENS + 1) // 2)


def test_the_second_token_of_full_takes_the_prompts_products_and_a_step() -> None:
    row = planned(MULTIPLYING, info(), FULL, 3)
    assert row.tt2t_s == pytest.approx(WHOLE_S + STEP_S, rel=1e-6)
    assert row.tt2t_s == planned(MULTIPLYING, info(), FULL, 1).tt2t_s, "of one sequence, whatever the batch"


def test_rows_leave_while_later_layers_compute() -> None:
    """The last layer's are waited for, or all but the time of the first one where the link is slow; beside a CPU every
    layer waits for its own."""
    load = replace(FULL, method=Full(offload=True), name="full_offloaded", placement="host")
    away_s = TOKENS * KV / 10e9
    first_step_s = TOKENS * KV / 10e9 + STEP_S - TOKENS * KV / 1e12
    fast = tt2t_s(MULTIPLYING, info(), load)
    slow = tt2t_s(replace(MULTIPLYING, to_host_gb_s=0.01), info(), load)
    apart = tt2t_s(replace(MULTIPLYING, device="cpu"), info(), load)
    assert WHOLE_S + away_s / 32 < fast < WHOLE_S + away_s / 32 + first_step_s + 0.01
    assert slow == pytest.approx(WHOLE_S / 32 + 1000 * away_s + fast - WHOLE_S - away_s / 32, rel=1e-3)
    assert apart == pytest.approx(WHOLE_S + away_s + first_step_s, rel=0.01)


def test_rows_on_disk_pass_through_host_memory() -> None:
    on_disk = replace(PQ, placement="disk")
    host, disk = (tt2t_s(replace(MULTIPLYING, to_host_gb_s=1e9), info(), load) for load in (PQ, on_disk))
    slow = tt2t_s(replace(MULTIPLYING, to_host_gb_s=1e9, disk_gb_s=0.01), info(), on_disk)
    assert host < disk < slow
    assert slow > 0.99 * TOKENS * KV / 0.01e9  # all but the sinks and the window


def test_a_layer_that_slides_sees_its_window() -> None:
    windows = (None, 1000) * 16
    sliding = replace(info(), layer_windows=windows)
    near = 1000 * 1001 // 2 + (TOKENS - 1000) * 1000
    wanted = products_s((TOKENS * (TOKENS + 1) // 2 + near) // 2)
    step_s = step_times(MULTIPLYING, sliding, FULL, 1, MethodConstants()).token_s[0]
    assert tt2t_s(MULTIPLYING, sliding, FULL) == pytest.approx(wanted + step_s, rel=1e-6)


def test_nothing_is_said_where_nobody_knows() -> None:
    """A prompt that is computed otherwise than Full's, and a machine whose products nobody has timed."""
    infllm = replace(FULL, method=InfLLM(), name="infllm", budget=3000)
    assert first_times(MULTIPLYING, info(), infllm) is None
    assert planned(MULTIPLYING, info(), replace(FULL, dtype="fp32", tokens=900), 1).tt2t_s is None


def test_a_model_whose_output_is_its_embedding_has_one_table() -> None:
    """SmolLM2's, of which a step and a prompt read the one there is."""
    small = Random("smollm2", None, 0, "bytes").describe()
    load = replace(FULL, tokens=4096)
    assert small.num_parameters - 49_152 * 576 == pytest.approx(106e6, rel=0.01)
    seconds = tt2t_s(MULTIPLYING, small, load)
    pairs = 4096 * 4097 // 2
    products = 2 * (small.num_parameters - 49_152 * 576) * 4096 + 4 * 30 * 576 * pairs
    step_s = step_times(MULTIPLYING, small, load, 1, MethodConstants()).token_s[0]
    assert seconds == pytest.approx(products / 1e14 + 2 * 49_152 * 576 / 1e12 + step_s, rel=1e-3)
