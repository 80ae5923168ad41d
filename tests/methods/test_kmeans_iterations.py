"""PQCache's k-means iterations: the paper's fit of prefill and clustering, a fixed number, and a fit from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.engine.attach import attached
from kernels import ops
from methods.base import AttnInput
from methods.parts import kmeans_iterations
from methods.parts.kmeans_iterations import LENGTHS, Fit, measure, polynomial
from methods.pqcache import PQCache
from tests.fast import PQ
from tests.tiny import prompt, tiny

PAPER = (4.86069848e-11, 2.52501805e-06, 5.10610107e-04)  # a Mistral layer's prefill on the authors' GPU
SLOW = Fit(*PAPER, few_1=2e-6, few_0=1e-3, one_1=5e-7, one_0=1e-4)
AUTO = replace(PQ, iterations="auto")


def test_the_papers_formula() -> None:
    """Mistral at 8192 tokens: 24 ms of prefill; 17.4 ms for 3 rounds and 4.2 ms for each further one."""
    prefill = PAPER[0] * 8192**2 + PAPER[1] * 8192 + PAPER[2]
    assert prefill == pytest.approx(24.5e-3, rel=0.01)
    few, each = 2e-6 * 8192 + 1e-3, 5e-7 * 8192 + 1e-4
    assert SLOW.iterations(8192) == int((prefill - few) / each + 3) == 4


def test_longer_prompts_hide_more_rounds_within_bounds() -> None:
    made = [SLOW.iterations(tokens) for tokens in range(1, 200_000, 500)]
    assert made == sorted(made)
    assert (made[0], made[-1]) == (3, 23)
    assert replace_round(SLOW, 1e-9).iterations(100_000) == 300
    assert replace_round(SLOW, 0.0).iterations(100) == 3  # three rounds take longer than the prefill already


def replace_round(fit: Fit, each: float) -> Fit:
    return fit._replace(one_1=each, one_0=0.0)


def test_the_fit_finds_the_coefficients_it_is_made_of() -> None:
    seconds = [PAPER[0] * s**2 + PAPER[1] * s + PAPER[2] for s in LENGTHS]
    assert polynomial(LENGTHS, seconds, 2) == pytest.approx(PAPER, rel=1e-3)
    falling = polynomial(LENGTHS, [0.4, 0.3, 0.2, 0.1], 1)
    assert falling[0] == 0  # no machine clusters more tokens in less time
    assert falling[1] > 0


class OnDevice(torch.Tensor):
    """Keys that lie with the model, until they are asked for on the CPU."""

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model's prefill over its layers; the same keys in 3 and in 9 rounds, none ended early, by the CPU."""
    now, clustered = [0.0], []
    monkeypatch.setattr(kmeans_iterations, "perf_counter", lambda: now[0])

    def observe(tokens: int) -> Iterator[AttnInput]:
        now[0] += 10 * tokens * 1e-3
        empty = torch.empty(0)
        yield AttnInput(empty, torch.empty(1, 2, tokens, 16).as_subclass(OnDevice), empty, empty, empty, empty, 0)

    def cluster(keys: Any, count: int) -> None:
        assert not isinstance(keys, OnDevice)
        clustered.append((keys.shape[2], count))
        now[0] += keys.shape[2] * count * 1e-6

    fit = measure(10, observe, cluster)
    assert fit == pytest.approx((0, 1e-3, 0, 3e-6, 0, 1e-6, 0), abs=1e-9)
    assert set(clustered) == {(length, count) for length in LENGTHS for count in (3, 9)}


def limits(monkeypatch: pytest.MonkeyPatch, method: PQCache, **how: Any) -> list[int]:
    """How many rounds the layers of a 90-token prompt were allowed."""
    made: list[int] = []
    kmeans = ops.kmeans
    monkeypatch.setattr(ops, "kmeans", lambda x, i, count, tolerance: made.append(count) or kmeans(x, i, 2, tolerance))
    with attached(tiny("llama"), method, budget=0.4, **how) as kv, torch.inference_mode():
        made.clear()
        cache = kv.cache(capacity=100)
        kv.model(prompt(90), past_key_values=cache, use_cache=True)
        cache.seal()
    monkeypatch.setattr(ops, "kmeans", kmeans)
    return made


def test_a_fixed_number_is_kept_whatever_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, replace(PQ, iterations=7)) == [7] * 3


def test_a_fit_is_timed_once_and_serves_both_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    text = prompt(max(LENGTHS))
    first = limits(monkeypatch, AUTO, calibration=text)
    assert len(set(first)) == 1
    assert 3 <= first[0] <= 300

    def refuse(*arguments: object) -> None:
        raise AssertionError("timed again")

    monkeypatch.setattr("methods.pqcache.measure", refuse)
    assert limits(monkeypatch, AUTO, calibration=text, placement="host") == first
    with attached(tiny("llama"), AUTO, budget=0.2) as kv:
        elsewhere = replace(AUTO, **AUTO.measured(kv.prepared))
    assert limits(monkeypatch, elsewhere) == first  # no calibration text: nothing is timed


def test_a_fit_from_a_yaml_can_be_hashed() -> None:
    assert hash(replace(PQ, iterations=list(SLOW))) == hash(replace(PQ, iterations=tuple(SLOW)))
