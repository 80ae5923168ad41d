"""Plans against throughputs and batches that others published, and the constants that were fitted to them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from harness.machines.fitting import bandwidth, layer_s
from harness.machines.machine import known
from harness.machines.plan import first_times
from tests import published_points as published

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
pytestmark = pytest.mark.skipif(not published.FILE.is_file(), reason="the published points lie outside the repository")


def test_what_was_modelled_never_counts() -> None:
    assert {row["kind"] for row in published.rows()}.isdisjoint({"modelled"})
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
    """Of one layer of Llama 2 7B on an RTX 4090, by the curve that PQCache's authors fitted to their times."""
    missed = []
    for row in published.rows():
        if row["metric"] == "prefill time of one layer" and row["model"] == "llama 7B":
            point = published.PublishedPoint("full", "Llama-2-7B", int(row["prompt_tokens"]), 1)
            first = first_times(known()["RTX-4090"], published.info_of(point.model), published.load_of(point))
            assert first
            missed.append(first.token_s[0] / 32 / (float(row["value"]) / 1e3) - 1)
    assert [round(100 * share) for share in missed] == [-6, -4, -2, -1]


def test_the_page_has_these_errors() -> None:
    assert published.trust_table() in PAGE.read_text(), "python -m tests.published_points prints the table"
