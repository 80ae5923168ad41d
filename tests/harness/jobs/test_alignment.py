"""A budget may make bytes equal, `comm` sets how much scoring may move; neither hides from identity."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import Engine, attached, evaluate
from harness.commands.report import main as report
from harness.config.settings import CommonWindows, Results, Settings, SettingsError
from harness.engine.batch.running_sequence import never
from harness.jobs.alignment import AlignedBudget, AlignedBytes, shapes
from harness.jobs.job import Job
from harness.jobs.resolve import codec_of, resolve
from harness.models.probe import Heads
from methods.base import BudgetError, Method
from methods.full import Full
from methods.oracle import Oracle
from methods.quest import Quest
from methods.sparq import SparQ
from methods.tiers.codec import IntCodec
from methods.tova import TOVA
from tests.fast import MODEL, PQ, STREAMING, niah
from tests.methods.test_contract import in_places, small
from tests.tiny import prompt, tiny

INFO = MODEL.describe()
LENGTH = 400


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(results=Results(root=str(folder)), baseline="off", **changes)


def plan(folder: Path, method: Method = PQ, **changes: Any) -> Job:
    return Job.plan(method, niah(), MODEL, settings(folder, **changes))


@pytest.mark.parametrize(
    ("name", "placement", "measure"),
    [
        (name, place, measure)
        for name, place in in_places("device", "host")
        for measure in ("moved_bytes", "device_bytes")
        if small(name).uses_budget and (measure, place) != ("moved_bytes", "device")
    ],
)
@pytest.mark.parametrize("asked", [40, 200])
def test_the_solution_costs_what_was_asked_for_and_no_more(
    name: str, placement: Any, measure: AlignedBytes, asked: int
) -> None:
    method = small(name)
    how = {"measure": measure, "method": method, "specs": shapes(INFO), "placement": placement, "element_bytes": 2}
    budget = AlignedBudget(asked, **how)
    tokens, target = budget.solve(LENGTH, asked), budget.target(asked)
    try:
        budget.refuse(LENGTH)
    except BudgetError:
        assert tokens in (method.smallest_budget, LENGTH - 1)
        return
    assert budget.paid(LENGTH, tokens) <= target
    assert tokens == LENGTH - 1 or budget.paid(LENGTH, tokens + 1) > target


@pytest.mark.parametrize("name", ["pqcache", "sparq", "infinigen"])
def test_measured_traffic_is_equal(name: str) -> None:
    """The traffic of a step is that of 80 tokens, whatever a method spends it on; InfiniGen's two layers are dense."""
    method = small(name)
    if name == "infinigen":
        method = replace(method, alpha=1e9)  # type: ignore[call-arg]
    info = replace(INFO, num_layers=3, layer_heads=(Heads(8, 2, 16, 16),) * 3, layer_windows=(None,) * 3)
    limit = resolve(Settings(device="cpu", budget_rule="moved_bytes", placement="host"), method, info).budget
    with attached(tiny("llama"), method, budget=limit, placement="host", calibration=prompt(64, seed=9)) as kv:
        made = Engine(kv).generate(prompt(LENGTH), max_new_tokens=4, stops=[never])
    assert made.measured["moved_bytes_per_step"] == pytest.approx(80 * 3 * 2 * 2 * 16 * 4, rel=0.02)


@pytest.mark.parametrize(
    ("method", "codec", "placement"),
    [(PQ, "int2g16", "device"), (PQ, None, "host"), (PQ, "int8", "disk"), (STREAMING, None, "device")],
    ids=str,
)
def test_equal_bytes_on_the_device_in_any_codec_and_tier(
    method: Method, codec: str | None, placement: str, tmp_path: Path
) -> None:
    asked = 200 * INFO.kv_bytes("fp32", 1)
    job = evaluate(method, niah(), MODEL, settings(tmp_path, budget=f"{asked}B", codec=codec, placement=placement))
    for record in job.records:
        reserved = INFO.kv_bytes("fp32", 6)  # for generated tokens
        assert 0.97 * asked <= record["kv_device_bytes"] - reserved <= asked
    assert job.summary["budget"]["bytes"] == asked


def test_a_budget_of_bytes_is_for_all_layers(tmp_path: Path) -> None:
    assert plan(tmp_path, budget="100KB", placement="host").config["budget"] == "100000B"
    assert plan(tmp_path, Full(), budget="100KB").config["budget"] is None
    for wrong in ({"dense_layers": [0]}, {"budget_rule": "paper"}, {"budget_rule": "moved_bytes"}):
        with pytest.raises(SettingsError, match="budget=100000B"):
            settings(tmp_path, budget="100KB", **wrong)


def test_a_codec_is_its_bits_and_its_group(tmp_path: Path) -> None:
    made = [codec_of(settings(tmp_path, codec=name)) for name in (None, "int4", "int2g64", "int4+4/int2g64")]
    pair = IntCodec(bits=4, group=64, value_bits=2, kept=4)
    assert made == [None, IntCodec(bits=4), IntCodec(bits=2, group=64), pair]
    for wrong in ("int3", "int4g0", "fp4", "int4+0", "int4/int3", "int4/tq2", "int4+4h", "nvfp4g32"):
        with pytest.raises(SettingsError, match=re.escape(f"codec={wrong}")):
            settings(tmp_path, codec=wrong)
    with pytest.raises(SettingsError, match="codec=int4g7"):
        plan(tmp_path, codec="int4g7")
    with pytest.raises(SettingsError, match="16 channels in full do not suit a head size of 16"):
        plan(tmp_path, codec="int4+16")
    assert len({plan(tmp_path, codec=name).folder for name in (None, "int4", "int4g64", "int4/int2", "int4+1")}) == 5
    assert len({plan(tmp_path, TOVA(), codec=name).folder for name in (None, "int4")}) == 1  # has no use for one


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (STREAMING, {"budget_rule": "moved_bytes"}),
        (PQ, {"budget_rule": "moved_bytes", "placement": "host", "budget": 0.9}),
        (PQ, {"budget": "100KB"}),
    ],
)
def test_what_nothing_can_reach_is_refused(tmp_path: Path, method: Method, changes: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match=f"{next(iter(changes))}="):
        plan(tmp_path, method, **changes)


def test_comm_is_a_short_name_for_parameters(tmp_path: Path) -> None:
    short = plan(tmp_path, comm=4 / (2 * INFO.head_dim))
    spelled = plan(tmp_path, replace(PQ, m=4, b=8))
    assert short.method == spelled.method
    assert short.identity == spelled.identity
    assert plan(tmp_path, Full(), comm=1 / 128).folder == plan(tmp_path, Full()).folder


# `budget_rule=paper` and `windows`: what runs, what its identity holds, and what a table says of it.


def test_sinks_come_on_top_and_a_table_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = evaluate(PQ, niah(), MODEL, settings(tmp_path, budget_rule="paper"))
    for record in paper.records:
        assert record["attended_prompt"] == PQ.sinks + int(0.2 * (record.prompt_tokens - PQ.sinks))
    evaluate(STREAMING, niah(), MODEL, settings(tmp_path, budget_rule="paper"))
    capsys.readouterr()
    report([str(tmp_path), "--details"])
    out = capsys.readouterr().out
    assert "pqcache budget_rule=paper" in out
    assert "streaming budget_rule" not in out  # its paper counts as we do


@pytest.mark.parametrize("method", [Full(), STREAMING, Quest(), SparQ(r=4), Oracle(sinks=0), PQ], ids=repr)
def test_the_rule_is_part_of_the_identity_where_a_paper_counts_otherwise(method: Any, tmp_path: Path) -> None:
    read, paper = (
        Job.plan(method, niah(), MODEL, settings(tmp_path, budget_rule=rule)).folder for rule in ("read", "paper")
    )
    assert (read == paper) == (method != PQ)


def test_a_common_split_is_a_short_name_for_parameters(tmp_path: Path) -> None:
    common = settings(tmp_path, windows=CommonWindows(sinks=6, recent_ratio=0.25))
    short = Job.plan(PQ, niah(), MODEL, common)
    spelled = Job.plan(replace(PQ, sinks=6, recent_ratio=0.25), niah(), MODEL, settings(tmp_path))
    assert short.method == spelled.method
    assert short.identity == spelled.identity
    assert (
        Job.plan(Quest(), niah(), MODEL, common).folder == Job.plan(Quest(), niah(), MODEL, settings(tmp_path)).folder
    )
