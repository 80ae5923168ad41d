"""Plans say what fits and how fast it is, by closed forms where a machine is made up, and refuse what cannot be."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.commands import plan as command
from harness.config.settings import Settings
from harness.jobs.planning.alignment import shapes
from harness.jobs.planning.cache_bytes import Holder
from harness.jobs.planning.capacity import needed
from harness.jobs.planning.items import blank
from harness.machines.machine import KNOWN, Machine, MachineError, MethodConstants, known, machine
from harness.machines.plan import BYTES_ALONE, PlanError, Workload, planned, row_times
from harness.machines.schedule import Submitted
from harness.machines.steps import steps
from harness.models.base import ModelInfo
from harness.models.random import Random
from methods.base import Budget, BudgetError, Case, Cost, CostError
from methods.full import Full
from methods.pqcache import PQCache
from methods.shadowkv import ShadowKV

GB = 10**9
MADE_UP = Machine(
    name="made up",
    device="cuda",
    device_bytes=40 * GB,
    host_bytes=100 * GB,
    read_gb_s=1000,
    to_device_gb_s=10,
    methods={"shadowkv": MethodConstants(1e-3, hits=0.5, placement="host")},
    basis="published",
    source="nobody",
)
FULL = Workload(method=Full(), name="full", budget=None, placement="device", tokens=30_000, new=100)
SHADOWKV = replace(FULL, method=ShadowKV(), name="shadowkv", budget=2464, placement="host")
KV = 2 * 32 * 8 * 128 * 2  # bytes of a token of Llama 3.1 8B


@cache
def info() -> ModelInfo:
    return Random("llama-3.1-8b", None, 0, "bytes").describe()


def test_a_step_of_full_is_its_bytes() -> None:
    """Weights without the embedding table, and of each sequence the prompt and half of the answer, once each."""
    row = planned(MADE_UP, info(), FULL, 3)
    weights = 2 * (info().num_parameters - 128_256 * 4096)
    assert row.tpot_s == pytest.approx((weights + 3 * (30_000 + 50) * KV) / 1e12)
    assert row.rate == 3 / row.tpot_s
    assert (row.bytes_tpot_s, row.basis) == (row.tpot_s, BYTES_ALONE)


def test_what_was_fitted_comes_on_top_and_hits_are_not_fetched() -> None:
    """A layer more costs a millisecond more, and half of the chosen values cross the link."""
    row = planned(MADE_UP, info(), SHADOWKV, 2)
    assert row.tpot_s - row.bytes_tpot_s == pytest.approx(32 * 1e-3)
    assert row.basis == "published"
    assert planned(MADE_UP, info(), replace(SHADOWKV, placement="device"), 2).basis == "extrapolated"
    every = planned(MADE_UP, info(), replace(SHADOWKV, hits=0.0), 2)
    chosen = 32 * 2 * 2048 * KV // 32 // 2  # bytes of the values of 2048 tokens, two sequences
    assert every.tpot_s - row.tpot_s == pytest.approx(chosen / 2 / 10e9)
    assert row_times(every).exposed_s("to device") == pytest.approx(3 * chosen / 10e9)


def test_nothing_is_known_of_a_fitted_method_with_other_parameters() -> None:
    """Neither its hits nor its time per layer."""
    without = replace(SHADOWKV, method=ShadowKV(hit_cache=False), name="shadowkv:hit_cache=false")
    row = planned(MADE_UP, info(), without, 2)
    assert (row.bytes_tpot_s, row.basis) == (row.tpot_s, BYTES_ALONE)
    assert row_times(row).exposed_s("to device") > 1.9 * row_times(planned(MADE_UP, info(), SHADOWKV, 2)).exposed_s(
        "to device"
    )


def test_the_batch_is_what_the_forecast_leaves() -> None:
    """Device - weights - reserve - one prompt's transient, by bytes per sequence, as a run of that batch is refused."""
    row = planned(MADE_UP, info(), FULL)
    assert (row.batch, row.limit) == (row.most, "device")
    settings = Settings(device="cuda", dtype="bf16", prefill_chunk=2048, batch=row.most)
    items = [blank(30_000, 100)] * row.most
    need = needed(info(), Holder(settings, Full(), None), items).total + row.most * row.sequence.rounding
    one = row.sequence.device + row.sequence.rounding
    assert need <= MADE_UP.device_bytes < need + one
    assert planned(replace(MADE_UP, reserve_bytes=one), info(), FULL).most == row.most - 1


def test_a_time_per_token_ends_a_batch_too() -> None:
    """A sequence more of Full takes its keys and values more."""
    one, two = (planned(MADE_UP, info(), FULL, batch).tpot_s for batch in (1, 2))
    row = planned(MADE_UP, info(), FULL, most_tpot_s=one + 1.5 * (two - one))
    assert (row.batch, row.limit, row.most > 2) == (2, "TPOT", True)
    assert row.tpot_s == two
    assert planned(MADE_UP, info(), FULL, 1, most_tpot_s=one).limit == "asked"
    with pytest.raises(
        PlanError, match=r"does not decode 3 at a time in .* ms per token on made up: a batch of 2 is fast"
    ):
        planned(MADE_UP, info(), FULL, 3, most_tpot_s=1.01 * two)
    with pytest.raises(PlanError, match="one sequence alone takes longer"):
        planned(MADE_UP, info(), FULL, most_tpot_s=0.9 * one)


def test_host_memory_ends_a_batch_too() -> None:
    """Pinned memory is not rounded up: values of 2048 bytes of all 30,100 tokens that a cache may come to hold."""
    row = planned(replace(MADE_UP, host_bytes=9 * 2**31), info(), SHADOWKV)
    assert row.sequence.host == pytest.approx(32 * 30_100 * 2048, rel=2e-3)
    assert (row.most, row.limit) == (9, "host")
    endless = planned(replace(MADE_UP, host_bytes=None), info(), SHADOWKV)
    assert (endless.limit, endless.most > 9) == ("device", True)


def test_a_prompt_whose_rows_leave_holds_few_layers() -> None:
    """Where they go to the host, a layer seals before the next begins, so not all keys and values are there at once."""
    passing = planned(MADE_UP, info(), SHADOWKV).sequence.passing
    assert passing < 0.3 * 30_100 * KV < planned(MADE_UP, info(), FULL).sequence.device


@pytest.mark.parametrize("placement", ["host", "disk"])
def test_a_machines_file_says_which_pieces_travel_by_themselves(placement: str) -> None:
    """All tokens of a head lie in one piece, and each chosen one in its own, of 256 bytes."""
    case = Case(shapes(info())[0], 1000, 200, placement, 2)
    chosen = PQCache().cost(case).moved_bytes_per_step // 256
    for method, pieces, nbytes in ((Full(offload=True), 2 * 8, 256_000), (PQCache(), chosen, 256)):
        for block_bytes, gathered in ((nbytes, False), (nbytes + 1, placement == "host")):
            how: dict[str, Any] = {"overlap": False, "block_bytes": block_bytes}
            schedule = steps(info(), method, [case], 1, "bf16", MethodConstants(), **how)
            moves = [event for event in schedule if isinstance(event, Submitted) and event.lane == "to device"]
            assert {move.gather for move in moves} == {gathered}
            assert {move.pieces for move in moves} == {pieces if placement == "host" else 1}


def test_rounding_is_the_allocators() -> None:
    """Keys of a layer are 30,100 rows of 2048 bytes: 29.4 steps of 2 MiB, and tensors below 10 MiB are not rounded."""
    long, short = (planned(MADE_UP, info(), replace(FULL, tokens=tokens)).sequence for tokens in (30_000, 1_000))
    assert long.device + long.rounding == 32 * 2 * 30 * 2**21
    assert short.rounding == 0


def test_a_cpu_has_one_memory() -> None:
    """What lies on the host takes the device's memory, and nothing is pinned or rounded."""
    cpu = replace(MADE_UP, device="cpu", host_bytes=None)
    on_host = planned(cpu, info(), SHADOWKV).sequence
    on_device = planned(cpu, info(), replace(SHADOWKV, placement="device")).sequence
    assert on_host.host == on_host.rounding == 0
    assert on_host.device == pytest.approx(on_device.device, rel=0.01)


@pytest.mark.parametrize("gb_s", [0.5, 500.0])
def test_a_method_that_asks_ahead_hides_its_rows(gb_s: float) -> None:
    """On a GPU the longer of a layer's work and its transfer counts, and on a CPU their sum: of Full's whole prompt."""
    load = replace(FULL, method=Full(offload=True), name="full_offloaded", placement="host")
    gpu = replace(MADE_UP, to_device_gb_s=gb_s)
    one_by_one = planned(replace(gpu, device="cpu"), info(), load, 1).tpot_s
    transfer_s = 32 * 30_000 * KV / 32 / (1e9 * gb_s)
    compute_s = one_by_one - transfer_s
    longer = transfer_s if gb_s < 1 else compute_s
    assert planned(gpu, info(), load, 1).tpot_s == pytest.approx(longer, rel=0.02)


def test_rows_on_disk_pass_through_two_links() -> None:
    slow = replace(MADE_UP, disk_gb_s=1.0)
    load = replace(SHADOWKV, method=PQCache(cache_tokens=0), name="pqcache", budget=3000)
    disk, host = (planned(slow, info(), replace(load, placement=place), 1) for place in ("disk", "host"))
    moved = (host.tpot_s - planned(slow, info(), replace(load, placement="device"), 1).tpot_s) * 10e9
    assert disk.tpot_s - host.tpot_s == pytest.approx(moved / 1e9)


@pytest.mark.parametrize(
    ("load", "batch", "error", "message"),
    [
        (
            FULL,
            64,
            PlanError,
            "A batch of 64 does not fit on made up: full with placement=device at 30000 tokens takes",
        ),
        (replace(FULL, tokens=130_000), 9, PlanError, "A batch of 9 does not fit"),
        (replace(FULL, tokens=131_000), 1, PlanError, "more than the window of random/llama-3.1-8b, 131072"),
        (replace(SHADOWKV, budget=20), 1, BudgetError, "set budget to at least"),
        (replace(SHADOWKV, budget=None), 1, BudgetError, "shadowkv needs a budget"),
        (replace(SHADOWKV, placement="disk"), 1, MachineError, "made up has no disk_gb_s, which placement=disk needs"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(load: Workload, batch: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(MADE_UP, info(), load, batch)


def test_a_prompt_that_does_not_fit_says_by_how_much() -> None:
    small = replace(MADE_UP, device_bytes=18 * GB)
    with pytest.raises(PlanError, match=r"does not fit on made up: beside 15\.0 GiB of weights one sequence takes"):
        planned(small, info(), FULL)


def test_a_method_that_does_not_say_what_it_reads_is_refused() -> None:
    class Silent(Full):
        def cost(self, case: Case) -> Cost:
            return Cost(case.dense_bytes)

    with pytest.raises(CostError, match="Silent does not say what a step reads: its cost needs read_bytes_per_step"):
        planned(MADE_UP, info(), replace(FULL, method=Silent()), 1)


def test_a_model_with_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="has experts, of which a step reads a part"):
        planned(
            replace(MADE_UP, device_bytes=100 * GB),
            Random("gpt-oss-20b", None, 0, "bytes").describe(),
            replace(FULL, tokens=2000),
        )


def test_known_machines_say_where_their_facts_come_from() -> None:
    machines = known()
    assert set(machines) == {"A100-80G", "RTX-6000-Ada", "RTX-4090", "A6000", "H100", "H200"}
    bases = {name: there.basis for name, there in machines.items()}
    assert {name for name, basis in bases.items() if basis == "published"} == {"A100-80G", "RTX-6000-Ada"}
    assert set(bases.values()) == {"published", "extrapolated"}
    assert all(there.source for there in machines.values())


def test_a_machine_is_read_from_a_file_or_a_benchmarks_folder(tmp_path: Path) -> None:
    text = "here:\n  device: cpu\n  device_bytes: 8e9\n  read_gb_s: 20\n  basis: measured\n  source: here\n"
    (tmp_path / "machine.yaml").write_text(text.replace("8e9", "8000000000"))
    there = machine(str(tmp_path))
    assert there == machine(str(tmp_path / "machine.yaml"))
    assert (there.name, there.basis, there.device_bytes) == ("here", "measured", 8 * GB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 3}, "here.speed is no fact of a machine: choose among basis, block_bytes,"),
        ({"read_gb_s": -1}, "here.read_gb_s=-1 should be a number above 0"),
        ({"read_gb_s": None}, "here.read_gb_s=None should be a number above 0"),
        ({"read_gb_s": "fast"}, "here.read_gb_s=fast should be a number above 0"),
        ({"matmul_gflop_s": {"bf16": 0}}, "here.bf16=0 should be a number above 0"),
        ({"basis": "felt"}, r"needs a basis \(published, extrapolated, measured\)"),
        ({"device": "tpu"}, r"and a device \(cuda or cpu\)"),
        ({"methods": {"full": {"layer": 1}}}, "here is not complete .*'layer'"),
        ({"methods": {"full": {"hits": 1}}}, "here.methods.full needs a layer_s and a token_s from 0, hits from 0"),
        ({"methods": {"full": {"placement": "tape"}}}, r"a placement \(device, host, disk\)"),
        ({"methods": ["full"]}, "here.methods should name methods, each with what was fitted of it"),
    ],
    ids=str,
)
def test_a_wrong_file_of_a_machine_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    facts = {"device": "cpu", "device_bytes": GB, "read_gb_s": 20, "basis": "measured", "source": "here"}
    file = tmp_path / "machine.yaml"
    file.write_text(json.dumps({"here": facts | changes}))
    with pytest.raises(MachineError, match=message):
        machine(str(file))


def test_a_file_lacks_nothing_and_holds_one_machine(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("here: {device: cpu}\n")
    with pytest.raises(MachineError, match="here is not complete"):
        machine(str(file))
    file.write_text("here: 3\n")
    with pytest.raises(MachineError, match="here has no facts"):
        machine(str(file))
    with pytest.raises(MachineError, match="describes 6 machines: leave one in it"):
        machine(str(KNOWN))


SHORT = ("--machine", "RTX-4090", "--model", "smollm2", "--tokens", "4096", "--budget", "512")


def test_the_command_writes_a_table_a_picture_and_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    methods = ("full", "quest:page_size=32", "shadowkv")
    words = [*SHORT, "--methods", *methods, "--batch", "4", "--hits", "0.25", "--timelines", "--out", str(tmp_path)]
    assert not command.main(words)
    told = capsys.readouterr().out
    assert "smollm2, 4096 prompt and 128 new tokens, bf16, on RTX-4090" in told
    assert "extrapolated: carried over" in told
    with (tmp_path / "plan.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == set(methods)
    assert [float(row["throughput_tok_s"]) for row in rows] == sorted(
        (float(row["throughput_tok_s"]) for row in rows), reverse=True
    )
    assert len(rows) == 5  # Quest and ShadowKV on the device and on the host
    assert (tmp_path / "table.md").read_text().count("| 4 |") == 5
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    traces = sorted(path.stem for path in tmp_path.glob("*.json"))
    assert len(traces) == 5
    assert all((tmp_path / f"{name}.png").is_file() for name in traces)


def test_rows_that_do_not_fit_are_said_below_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """One does not fit on the device, and another's sinks and windows do not fit into the budget."""
    words = ["--machine", "RTX-4090", "--tokens", "65536", "--budget", "40", "--methods", "full", "shadowkv", "pqcache"]
    assert not command.main(words)
    told = capsys.readouterr().out
    assert "full with placement=device at 65536 tokens does not fit on RTX-4090" in told
    assert "set budget to at least" in told


def test_a_method_that_does_not_suit_the_model_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert not command.main([*SHORT, "--methods", "full", "shadowkv:rank=1000"])
    assert "rank=1000 is more than the 192 channels of this model's keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "A100"], "The machine A100 is unknown"),
        ([*SHORT, "--model", "llama-9b"], "--model llama-9b is unknown: choose one of"),
        ([*SHORT, "--methods", "pqcash"], "--methods pqcash is unknown; did you mean pqcache?"),
        ([*SHORT, "--methods", "quest:page_size"], "quest:page_size gives a parameter no value: write quest:"),
        ([*SHORT, "--config-dir", "nowhere"], "--config-dir nowhere is not a folder"),
        ([*SHORT, "--methods", "full", "--batch", "4000"], "A batch of 4000 does not fit on RTX-4090"),
        ([*SHORT, "--methods", "shadowkv", "--budget", "8"], "set budget to at least"),
        ([*SHORT, "--tokens", "9000"], "more than the window of random/smollm2, 8192"),
        ([*SHORT, "--methods", "pqcache", "--placement", "disk"], "RTX-4090 has no disk_gb_s"),
        ([*SHORT, "--timelines"], "--timelines needs --out"),
    ],
    ids=lambda words: " ".join(words[-2:]) if isinstance(words, list) else "",
)
def test_the_command_refuses_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(words) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err


def test_lengths_are_written_as_the_papers_write_them() -> None:
    parser = command._parser()
    words = ["--machine", "H100", "--tokens"]
    assert parser.parse_args([*words, "122K", "500"]).tokens == [124_928, 500]
    for wrong in ("0K", "1.5K", "K", "1M"):
        with pytest.raises(SystemExit):
            parser.parse_args([*words, wrong])


@pytest.mark.parametrize(
    "words", [["--tpot", "0"], ["--host", "much"], ["--hits", "2"], ["--budget", "0"], ["--batch", "0"]]
)
def test_options_are_checked(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([*SHORT, *words])
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_a_method_of_ones_own_is_planned_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("_target_: methods.snapkv.SnapKV\nwindow: 16\n")
    assert not command.main(
        [*SHORT, "--methods", "mine", "full", "--placement", "device", "--config-dir", str(tmp_path)]
    )
    assert "mine" in capsys.readouterr().out


def test_a_method_that_keeps_nothing_elsewhere_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert not command.main([*SHORT, "--methods", "full", "shadowkv", "--placement", "host"])
    assert "full keeps everything on the device: add --placement device for its row." in capsys.readouterr().out


def test_host_memory_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SHORT, "--methods", "shadowkv", "--placement", "host"]
    assert not command.main([*words, "--host", "1GB"])
    limited = capsys.readouterr().out
    assert " host " in limited.replace("in host", "")
    assert "not limited" not in limited
    assert not command.main(words)
    assert re.search(r"Host memory is not limited here, and rows take up to [\d.e-]+ TiB", capsys.readouterr().out)


def test_budgets_are_of_methods_that_use_them() -> None:
    assert planned(MADE_UP, info(), replace(FULL, budget=0.1), 1).tpot_s == planned(MADE_UP, info(), FULL, 1).tpot_s
    share = planned(MADE_UP, info(), replace(SHADOWKV, budget=0.1), 1)
    assert share.tpot_s == planned(MADE_UP, info(), replace(SHADOWKV, budget=Budget(0.1).tokens(30_000, 0)), 1).tpot_s
