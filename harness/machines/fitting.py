"""Fits what a machine's file says to steps that were timed there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import linear_regression, median
from typing import NamedTuple

from harness.machines.machine import Machine, MethodConstants
from harness.machines.plan import Workload, step_times
from harness.models.base import ModelInfo


class NoLineError(ValueError):
    """Steps that read more were not slower; the message says what to do."""


class TimedStep(NamedTuple):
    """Seconds that a decode step of a batch has taken."""

    info: ModelInfo
    load: Workload
    batch: int
    step_s: float


def predicted_s(machine: Machine, step: TimedStep, constants: MethodConstants) -> float:
    """What a plan says in its place."""
    tpot_s = step_times(machine, step.info, step.load, step.batch, constants).tpot_s
    assert tpot_s is not None
    return tpot_s


def read_gb(machine: Machine, step: TimedStep) -> float:
    """What the device reads in the step: its seconds at a gigabyte per second, if nothing else took any."""
    alone = replace(machine, read_gb_s=1.0, matmul_gflop_s={})
    return predicted_s(alone, step, MethodConstants())


def bandwidth(machine: Machine, steps: Sequence[TimedStep]) -> float:
    """The median of what steps on the device have read in a second, in GB, as if they were nothing but their bytes."""
    return median(read_gb(machine, step) / step.step_s for step in steps)


def line(machine: Machine, steps: Sequence[TimedStep]) -> tuple[float, float]:
    """GB per second, and seconds per layer beside them, of steps on the device that read more and less: the line that
    fits them best. Where it would begin below zero, it goes through zero. Raises `NoLineError` where longer steps
    were not slower."""
    slope, start = linear_regression([read_gb(machine, step) for step in steps], [step.step_s for step in steps])
    if slope <= 0:
        raise NoLineError("Steps that read more were not slower: measure longer prompts, or on an idle machine.")
    return (bandwidth(machine, steps), 0.0) if start < 0 else (1 / slope, start / steps[0].info.num_layers)


def layer_s(machine: Machine, steps: Sequence[TimedStep], hits: float = 0.0) -> float:
    """The median of what a layer has taken beside its bytes; 0 where the bytes alone would take longer."""
    return max(0.0, median(_beside(machine, step, hits) for step in steps))


def layer_and_token_s(machine: Machine, steps: Sequence[TimedStep]) -> tuple[float, float]:
    """What a layer has taken beside its bytes, and more for each token of the prompt, as scores that compute take it:
    the median slope between steps over different lengths (Theil and Sen), and the median of what is left. None of them
    is below 0."""
    beside = [(step.load.tokens, _beside(machine, step)) for step in steps]
    slopes = [(b - a) / (longer - shorter) for shorter, a in beside for longer, b in beside if longer > shorter]
    token_s = max(0.0, median(slopes)) if slopes else 0.0
    return max(0.0, median(seconds - tokens * token_s for tokens, seconds in beside)), token_s


def _beside(machine: Machine, step: TimedStep, hits: float = 0.0) -> float:
    return (step.step_s - predicted_s(machine, step, MethodConstants(hits=hits))) / step.info.num_layers
