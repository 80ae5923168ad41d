"""Plans against throughputs and batches that others published, and the constants that were fitted to them."""

from __future__ import annotations

from statistics import median

import pytest

from harness.machines.fitting import bandwidth, layer_s
from harness.machines.machine import known
from tests import published_points as published


def test_what_was_modelled_never_counts() -> None:
    assert {row["kind"] for row in published.rows()} == {"measured", "hand-picked", "authors' fit"}
    assert [len(published.shadowkv_points(metric)) for metric in ("decode throughput", "batch used")] == [22, 22]


def test_the_batches_of_full_are_equal_and_shadowkvs_within_one() -> None:
    """With one reserve for both."""
    a100, missed = known()["A100-80G"], dict[str, list[int]](full=[], shadowkv=[])
    for point in published.shadowkv_points("batch used"):
        missed[point.method].append(published.batch_of(a100, point) - point.batch)
    assert missed["full"] == [0] * 11
    assert len(missed["shadowkv"]) == 11
    assert max(map(abs, missed["shadowkv"])) <= 1


def test_rates_that_were_left_out_are_met() -> None:
    errors = published.errors()
    full = errors["A100-80G", "full", "bandwidth"]
    shadowkv = errors["A100-80G", "shadowkv", "seconds per layer"]
    assert len(full) == len(shadowkv) == 11
    assert max(map(abs, full)) <= 0.05
    assert median(map(abs, shadowkv)) <= 0.08
    assert max(map(abs, shadowkv)) <= 0.15
    assert max(map(abs, errors["RTX-6000-Ada", "quest", "nothing: bytes alone"])) <= 0.08


def test_the_constants_of_the_machines_are_those_fits() -> None:
    steps, machines = published.published_steps(), known()
    for name in published.LINES:
        assert machines[name].read_gb_s == round(bandwidth(machines[name], steps[name, "full"]))
    a100 = machines["A100-80G"]
    constants = a100.methods["shadowkv"]
    fitted = layer_s(a100, steps["A100-80G", "shadowkv"], constants.hits)
    assert constants.layer_s == pytest.approx(fitted, abs=5e-7)


def test_a_prompt_takes_its_products() -> None:
    assert [round(100 * share) for *_, share in published.prefill_misses()] == [-6, -4, -2, -1]
