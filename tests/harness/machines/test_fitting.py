"""Fits find what made-up steps were made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from harness.machines.fitting import (
    NoLineError,
    TimedStep,
    bandwidth,
    layer_and_token_s,
    layer_s,
    line,
    predicted_s,
    read_gb,
)
from harness.machines.machine import Machine, MethodConstants
from harness.machines.plan import Workload
from harness.models.random import Random
from methods.full import Full
from methods.snapkv import SnapKV

TRUE = Machine(name="true", device="cpu", device_bytes=10**10, read_gb_s=40, basis="measured", source="nobody")
LIMITS = replace(TRUE, read_gb_s=60)  # as calibrate finds them, which no step reaches
LOAD = Workload(method=Full(), name="full", budget=None, placement="device", tokens=1000, new=16)


def made_of(layer: float, *loads: Workload, token: float = 0.0) -> list[TimedStep]:
    """Steps on the true machine, whose layers take so much beside their bytes, and so much more for each token."""
    info = Random("smollm2", None, 0, "bytes").describe()
    steps = [TimedStep(info, load, 1, 1.0) for load in loads]
    return [step._replace(step_s=predicted_s(TRUE, step, MethodConstants(layer, token))) for step in steps]


def full(*lengths: int) -> list[Workload]:
    return [replace(LOAD, tokens=tokens) for tokens in lengths]


def test_a_line_is_a_bandwidth_and_what_layers_take_beside() -> None:
    assert line(LIMITS, made_of(2e-4, *full(1000, 3000, 6000))) == (pytest.approx(40), pytest.approx(2e-4))


def test_a_line_does_not_begin_below_zero() -> None:
    """Where short steps were faster than their bytes, all are taken for their bytes."""
    steps = made_of(0.0, *full(1000, 3000, 6000))
    faster = [steps[0]._replace(step_s=0.5 * steps[0].step_s), *steps[1:]]
    assert line(LIMITS, faster) == (pytest.approx(40), 0.0)


def test_longer_steps_that_are_not_slower_have_no_line() -> None:
    steps = made_of(0.0, *full(1000, 6000))
    with pytest.raises(NoLineError, match="Steps that read more were not slower: measure longer prompts"):
        line(LIMITS, [steps[0], steps[1]._replace(step_s=steps[0].step_s)])


def test_medians_are_not_moved_by_one_step() -> None:
    steps = made_of(0.0, *full(1000, 3000, 6000))
    odd = [steps[0]._replace(step_s=9 * steps[0].step_s), *steps[1:]]
    assert bandwidth(LIMITS, odd) == pytest.approx(40)
    snapkv = replace(LOAD, method=SnapKV(), name="snapkv", budget=256)
    beside = made_of(3e-4, *(replace(snapkv, tokens=tokens) for tokens in (1000, 3000, 6000)))
    odd = [beside[0]._replace(step_s=9 * beside[0].step_s), *beside[1:]]
    assert layer_s(TRUE, odd) == pytest.approx(3e-4)
    assert layer_s(replace(TRUE, read_gb_s=1), beside) == 0  # never less than nothing


def test_what_grows_with_the_prompt_is_told_from_what_every_layer_takes() -> None:
    snapkv = [replace(LOAD, method=SnapKV(), name="snapkv", budget=256, tokens=tokens) for tokens in (1000, 3000, 6000)]
    growing = made_of(3e-4, *snapkv, token=1e-7)
    assert layer_and_token_s(TRUE, growing) == (pytest.approx(3e-4), pytest.approx(1e-7))
    assert layer_and_token_s(TRUE, growing[::2]) == (pytest.approx(3e-4), pytest.approx(1e-7))
    of_one = layer_s(TRUE, growing[1:2])
    assert layer_and_token_s(TRUE, growing[1:2]) == (pytest.approx(of_one), 0.0)
    shrinking = made_of(3e-4, *snapkv)
    shrinking[0] = shrinking[0]._replace(step_s=9 * shrinking[0].step_s)
    assert layer_and_token_s(TRUE, shrinking) == (pytest.approx(3e-4), 0.0)
    assert predicted_s(TRUE, growing[0]._replace(batch=2), MethodConstants(0.0, 1e-7)) == pytest.approx(
        predicted_s(TRUE, growing[0]._replace(batch=2), MethodConstants()) + 30 * 2 * 1000 * 1e-7
    )


def test_bytes_are_weights_keys_and_values() -> None:
    """The output's matrix is the embedding: SmolLM2 ties them."""
    (step,) = made_of(0.0, LOAD)
    info = step.info
    assert read_gb(LIMITS, step) == pytest.approx(2e-9 * info.num_parameters + 1e-9 * 1008 * 30 * 2 * 3 * 64 * 2)


def test_steps_of_other_bytes_say_so() -> None:
    lengths: Sequence[int] = (1000, 2000)
    first, second = made_of(0.0, *full(*lengths))
    assert read_gb(LIMITS, second) - read_gb(LIMITS, first) == pytest.approx(1e-9 * 1000 * 30 * 2 * 3 * 64 * 2)
