"""`align` makes bytes equal in place of tokens, `comm` sets how much scoring may move; neither hides from identity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.compose import built, composed
from harness.config.settings import Results, Settings, SettingsError
from harness.engine.attach import attached
from harness.engine.batch.generation import never
from harness.engine.engine import Engine
from harness.jobs.evaluate import evaluate
from harness.jobs.job import Job
from harness.jobs.planning.alignment import AlignedBytes, Alignment, aligned, shapes
from harness.jobs.planning.effective import codec_of
from harness.reports.labels import budget
from methods.base import Budget, BudgetError, Method
from methods.full import Full
from methods.tiers.codec import IntCodec
from tests.fast import MODEL, PQ, STREAMING, niah
from tests.methods.test_contract import NAMES, small
from tests.tiny import prompt, tiny

INFO = MODEL.describe()
LENGTH = 400


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(results=Results(root=str(folder)), baseline="off", **changes)


@pytest.mark.parametrize("name", [name for name in NAMES if small(name).uses_budget])
@pytest.mark.parametrize(
    ("measure", "placement"), [("moved_bytes", "host"), ("device_bytes", "host"), ("device_bytes", "device")]
)
@pytest.mark.parametrize("asked", [40, 80, 200])
def test_the_solution_costs_what_was_asked_for_and_no_more(
    name: str, measure: AlignedBytes, placement: Any, asked: int
) -> None:
    method = small(name)
    if placement == "host" and not method.offloads:
        pytest.skip("keeps nothing on the host")
    alignment = Alignment(measure, method, shapes(INFO), placement, element_bytes=2)
    tokens, target = alignment.solve(LENGTH, asked), alignment.target(asked)
    try:
        alignment.refuse(LENGTH, asked)
    except BudgetError:
        assert tokens in (method.smallest_budget, LENGTH - 1)
        return
    assert alignment.paid(LENGTH, tokens) <= target
    assert tokens == LENGTH - 1 or alignment.paid(LENGTH, tokens + 1) > target


@pytest.mark.parametrize("name", ["pqcache", "sparq", "infinigen"])
def test_measured_traffic_is_equal(name: str) -> None:
    """The traffic of a step is that of 80 tokens, whatever a method spends it on; InfiniGen's two layers are dense."""
    method = small(name)
    if name == "infinigen":
        method = replace(method, alpha=1e9)  # type: ignore[call-arg]
    model = tiny("llama")
    info = replace(INFO, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16, layer_windows=(None,) * 3)
    limit = aligned(Budget(0.2), "moved_bytes", method, info, "fp32", "host")
    with attached(model, method, budget=limit, placement="host", calibration=prompt(64, seed=9)) as kv:
        made = Engine(kv).generate(prompt(LENGTH), max_new_tokens=4, stops=[never])
    assert made.measured["moved_bytes_per_step"] == pytest.approx(80 * 3 * 2 * 2 * 16 * 4, rel=0.02)


def test_a_run_reads_more_of_the_prompt_where_its_window_does_not_move(tmp_path: Path) -> None:
    made = evaluate(PQ, niah(), MODEL, settings(tmp_path, align="moved_bytes", placement="host", budget=0.2))
    row = INFO.kv_bytes("fp32", 1)
    for record in made.records:
        asked = int(0.2 * record.prompt_tokens)
        assert record.measured["moved_bytes_per_step"] == pytest.approx(asked * row, rel=0.02)
        assert record.measured["attended_prompt"] > 1.9 * asked
    plain = evaluate(PQ, niah(), MODEL, settings(tmp_path, placement="host", budget=0.2))
    assert plain.folder != made.folder


@pytest.mark.parametrize(
    ("method", "codec", "placement"),
    [
        (PQ, "int4", "device"),
        (PQ, "int2g16", "device"),
        (PQ, None, "host"),
        (PQ, "int8", "disk"),
        (STREAMING, None, "device"),
    ],
    ids=str,
)
def test_equal_bytes_on_the_device_in_any_codec_and_tier(
    method: Method, codec: str | None, placement: str, tmp_path: Path
) -> None:
    asked = 200 * INFO.kv_bytes("fp32", 1)
    job = evaluate(method, niah(), MODEL, settings(tmp_path, budget_bytes=asked, codec=codec, placement=placement))
    for record in job.records:
        reserved = INFO.kv_bytes("fp32", 6)  # for generated tokens
        assert record.kv["device"] - reserved == pytest.approx(asked, rel=0.03)
        assert record.kv["device"] - reserved <= asked
    assert job.summary["budget"]["bytes"] == asked
    assert budget(job.summary).endswith("KiB")


def test_bytes_take_the_place_of_the_budget(tmp_path: Path) -> None:
    asked = settings(tmp_path, budget_bytes=10**5)
    assert Job.plan(PQ, niah(), MODEL, replace(asked, placement="host")).config["budget"] is None
    assert Job.plan(Full(), niah(), MODEL, asked).config["budget_bytes"] is None
    with pytest.raises(BudgetError, match="PQCache holds"):
        Job.plan(PQ, niah(), MODEL, asked)
    for more in ({"dense_layers": [0]}, {"budget_rule": "paper"}):
        with pytest.raises(SettingsError, match="budget_bytes="):
            replace(asked, **more)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="align=moved_bytes"):
        replace(asked, align="moved_bytes")
    with pytest.raises(SettingsError, match="budget_bytes=0"):
        replace(asked, budget_bytes=0)


def test_a_codec_is_its_bits_and_its_group(tmp_path: Path) -> None:
    made = [codec_of(settings(tmp_path, codec=name)) for name in (None, "int4", "int2g64")]
    assert made == [None, IntCodec(bits=4), IntCodec(bits=2, group=64)]
    for wrong in ("int3", "4", "int4g", "int4g0", "fp4"):
        with pytest.raises(SettingsError, match=f"codec={wrong} is unknown"):
            settings(tmp_path, codec=wrong)
    with pytest.raises(ValueError, match="divides it"):
        Job.plan(PQ, niah(), MODEL, settings(tmp_path, codec="int4g7"))
    kept = [Job.plan(PQ, niah(), MODEL, settings(tmp_path, codec=name)).folder for name in (None, "int4", "int4g64")]
    assert len(set(kept)) == 3
    left = [Job.plan(STREAMING, niah(), MODEL, settings(tmp_path, codec=name)).folder for name in (None, "int4")]
    assert len(set(left)) == 1  # it has no use for one


def test_what_nothing_can_reach_is_refused_with_the_range(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="Streaming moves"):
        Job.plan(STREAMING, niah(), MODEL, settings(tmp_path, align="moved_bytes"))
    with pytest.raises(BudgetError, match=r"PQCache moves the keys and values of 1 to 1\d\d .* budget asks for 3\d\d"):
        Job.plan(PQ, niah(), MODEL, settings(tmp_path, align="moved_bytes", placement="host", budget=0.9))


def test_a_method_without_a_budget_is_one_run_whatever_is_aligned(tmp_path: Path) -> None:
    folders = {
        Job.plan(Full(), niah(), MODEL, settings(tmp_path, **changes)).folder
        for changes in ({}, {"align": "device_bytes"}, {"comm": 1 / 128})
    }
    assert len(folders) == 1


def test_comm_is_a_short_name_for_parameters(tmp_path: Path) -> None:
    short = Job.plan(PQ, niah(), MODEL, settings(tmp_path, comm=4 / (2 * INFO.head_dim)))
    spelled = Job.plan(replace(PQ, m=4, b=8), niah(), MODEL, settings(tmp_path))
    assert short.method == spelled.method
    assert short.config["method"]["m"] == 4
    assert short.identity == spelled.identity
    with pytest.raises(SettingsError, match="comm=2"):
        settings(tmp_path, comm=2.0)


def test_the_command_line_takes_both() -> None:
    *_, made = built(composed(["comm=0.0078125", "align=device_bytes"]))
    assert (made.comm, made.align) == (1 / 128, "device_bytes")
