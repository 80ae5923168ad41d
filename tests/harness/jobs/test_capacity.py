"""What does not fit is refused before anything is loaded or written, with the setting that helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import Results, Settings, SettingsError, StoreSettings
from harness.jobs import machine
from harness.jobs.evaluate import evaluate, evaluate_together
from harness.jobs.examples import prepare
from harness.jobs.job import Job
from harness.jobs.machine import refusal
from harness.jobs.memory import CacheSpec, MemoryForecast, needed, sealed_cost
from methods.base import Method
from methods.full import Full
from methods.h2o import H2O
from methods.tiers.pinned_memory import reservation_bytes
from methods.tiers.tier import bytes_key
from tests.fast import MODEL, PQ, STREAMING, niah, run
from tests.harness.jobs.test_questions import Balances

GIB = 2**30
EIGHT_B = replace(MODEL, shape="llama-3.1-8b", layers=None)
Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.usefixtures("no_weights")
def test_8b_in_fp32_is_refused_before_it_is_loaded(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with 21.6 GiB; the dry run says the same."""
    monkeypatch.setattr("harness.jobs.machine.free_bytes", lambda device: int(21.6 * GIB))
    for shared in (False, True):
        settings = Settings(results=Results(root=str(tmp_path)), device="cpu", shared_prefill=shared)
        with pytest.raises(SettingsError, match=r"weights 29\.9 GiB.* 21\.6 GiB .*dtype=bf16 \(15"):
            evaluate(PQ, niah(), EIGHT_B, settings)
    assert list(tmp_path.iterdir()) == []
    code, out, err = cli("model.shape=llama-3.1-8b", "model.layers=null", "dry_run=true", "device=cpu")
    assert (code, "weights 29.9 GiB" in out, "dtype=bf16" in out) == (0, True, True), err


def test_a_finished_run_needs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(results=Results(root=str(tmp_path)), device="cpu")
    first = evaluate(Full(), niah(), MODEL, settings)
    monkeypatch.setattr("harness.jobs.machine.free_bytes", lambda device: 0)
    assert evaluate(Full(), niah(), MODEL, settings) == first
    with pytest.raises(SettingsError, match="model"):
        evaluate(Full(), niah(depths=2), MODEL, replace(settings, dtype="bf16"))


@pytest.mark.parametrize(
    ("need", "changes", "helps"),
    [
        (MemoryForecast(10, 0, 0), {"dtype": "fp32"}, {"dtype=bf16"}),
        (MemoryForecast(10, 0, 0), {"dtype": "bf16"}, {"a smaller model"}),
        (MemoryForecast(1, 9, 0), {"dtype": "bf16", "device": "cuda"}, {"fewer tokens"}),
        (
            MemoryForecast(1, 9, 0),
            {"dtype": "bf16", "device": "cuda", "batch": 2},
            {"a smaller batch", "placement=host", "fewer tokens"},
        ),
        (MemoryForecast(1, 2, 9), {"dtype": "bf16"}, {"prefill_chunk=2048", "fewer tokens"}),
        (MemoryForecast(1, 2, 3, host=10), {"device": "cuda", "placement": "host"}, {"placement=disk", "fewer tokens"}),
    ],
)
def test_the_advice_is_what_helps(need: MemoryForecast, changes: dict, helps: set[str]) -> None:
    settings = Settings(**{"device": "cpu"} | changes)
    assert refusal(need, settings, need.total, need.host) is None
    assert refusal(need, settings, None) is None
    words = str(refusal(need, settings, 8, 9)).rpartition("use ")[2].rstrip(".").split(" or ")
    assert {word.partition(" (")[0] for word in words} == helps


def full(settings: Settings) -> CacheSpec:
    return CacheSpec(settings, Full(), None)


def test_what_is_there_or_elsewhere_is_not_counted() -> None:
    info, settings = MODEL.describe(), Settings(device="cuda", dtype="fp32")
    items = prepare(niah(), MODEL, settings)
    whole = needed(info, full(settings), items)
    longest = max(len(item.prompt.ids) + item.new_tokens for item in items)
    assert (whole.weights, whole.kv) == (info.weight_bytes("fp32"), info.kv_bytes("fp32", longest))
    assert needed(info, full(settings), items, loaded=True) == replace(whole, weights=0)
    longer = [replace(items[0], new_tokens=items[0].new_tokens + more) for more in (0, 70, 20)]
    both = sum(info.kv_bytes("fp32", item.tokens) for item in longer[1:])  # the longest of them may run side by side
    assert needed(info, full(replace(settings, batch=2)), longer).kv == both
    prompt, chunk = len(items[0].prompt.ids), 100
    chunked = needed(info, full(replace(settings, prefill_chunk=chunk)), items)
    waiting = (prompt - chunk) * (info.hidden_size + 2 * info.head_dim) * 4  # of the other chunks, with their angles
    assert chunked.activations - waiting == pytest.approx(whole.activations * chunk / prompt)


def test_a_layer_whose_rows_leave_the_device_is_whole_there_alone() -> None:
    info, device = MODEL.describe(), Settings(device="cuda", dtype="fp32", batch=2)
    items = prepare(niah(), MODEL, device)[:2]
    one, tokens = (info.kv_bytes("fp32", count) for count in (items[0].room, len(items[0].prompt.ids)))
    pinned = reservation_bytes([one // info.num_layers] * info.num_layers)  # as if the prompt took all of the room
    for placement, host in (("host", pinned), ("disk", 0)):
        elsewhere = CacheSpec(replace(device, placement=placement), Full(offload=True), None)
        need = needed(info, elsewhere, items)
        sealed = one - tokens  # room for the answer, in all layers
        assert need.kv == pytest.approx(2 * sealed + tokens / info.num_layers)  # the other example is sealed as well
        assert need.host == 2 * host
    on_cpu = CacheSpec(replace(device, device="cpu", placement="host"), Full(offload=True), None)
    assert needed(info, on_cpu, items).kv == 2 * one
    assert needed(info, on_cpu, items).host == 0


def test_a_shared_prefill_holds_a_cache_per_job_and_its_own() -> None:
    info, alone = MODEL.describe(), Settings(device="cuda", dtype="fp32")
    items, shared = prepare(niah(), MODEL, alone), replace(alone, shared_prefill=True)
    one = needed(info, full(alone), items).kv
    assert needed(info, full(shared), items, beside=[full(shared)] * 2).kv == 4 * one
    assert needed(info, full(shared), items, beside=[full(replace(shared, placement="host"))]).kv == 3 * one
    assert needed(info, full(replace(alone, fidelity=4)), items).kv == 2 * one


def test_a_store_on_the_device_counts_up_to_its_room() -> None:
    info, plain = MODEL.describe(), Settings(device="cuda", dtype="fp32")
    items = prepare(Balances(talks=True), MODEL, plain)
    all_of_them = sum(info.kv_bytes("fp32", item.room) for item in items)
    for device, store, more in (
        ("cuda", StoreSettings(), 0),
        ("cpu", StoreSettings(host="1TB"), all_of_them),
        ("cpu", StoreSettings(host=500, disk="1TB"), 500),
    ):
        settings = replace(plain, device=device, history="store", store=store)
        assert needed(info, full(settings), items).kv == needed(info, full(plain), items).kv + more


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_jobs_that_run_at_once_must_fit_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    settings = Settings(results=Results(root=str(tmp_path)), device="cpu", shared_prefill=shared)
    wanted = [Job.plan(method, niah(depths=2), MODEL, settings) for method in (PQ, STREAMING)]
    need = Job.plan(PQ, niah(depths=2), MODEL, replace(settings, shared_prefill=False)).need()
    monkeypatch.setattr("harness.jobs.machine.free_bytes", lambda device: need.total + need.kv)
    if shared:
        with pytest.raises(SettingsError, match="shared_prefill=false"):
            evaluate_together(wanted)
        assert list(tmp_path.iterdir()) == []
    else:
        assert len(evaluate_together(wanted)) == 3  # with Full, one after the other


@pytest.mark.parametrize(
    ("controller", "limit", "usage", "cached"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_the_smallest_limit_above_this_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controller: str, limit: str, usage: str, cached: str
) -> None:
    inner = tmp_path / "cgroup" / controller / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, most in ((inner.parent, "3000"), (inner, "max")):
        (folder / limit).write_text(most)
        (folder / usage).write_text("2500")
        (folder / "memory.stat").write_text(f"anon 7\n{cached} 100\n")
    (tmp_path / "own").write_text(f"5:{controller}:/outer/inner\n")
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   50 kB\n")
    for name, place in (("CGROUPS", "cgroup"), ("OWN_CGROUP", "own"), ("MEMINFO", "meminfo")):
        monkeypatch.setattr(machine, name, tmp_path / place)
    assert machine.free_bytes("cpu") == 600
    (inner.parent / limit).write_text("max")
    assert machine.free_bytes("cpu") == 50 * 1024
    (tmp_path / "meminfo").unlink()
    assert machine.free_bytes("cpu") is None


# What a dry run says of budget, bytes and folders.


def row(cli: Cli, name: str, *words: str) -> list[str]:
    code, out, err = cli("dry_run=true", *words)
    assert code == 0, err
    return [line.removeprefix(name).strip() for line in out.splitlines() if line.startswith(f"{name} ")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["budget=0.5", "task.lengths=[300,400]"], "150 to 200 of 300 to 400"),
        (["dense_layers=[1]"], "80 of 400"),
        (["method=full"], "all of 400"),
        (["budget=60000B"], "117 of 400"),
        (["method=oracle", "budget=0.5", "budget_mass=0.9"], "at most 200 of 400"),
    ],
)
def test_the_budget_is_said_in_tokens(cli: Cli, words: list[str], says: str) -> None:
    assert says in row(cli, "budget", "method=streaming", *words)[0]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (PQ, {"placement": "host"}),
        (PQ, {"placement": "disk", "codec": "int8", "batch": 2}),
        (STREAMING, {"protocol": "context"}),
        (H2O(), {"budget": 100}),
        (Full(), {}),
    ],
    ids=["host", "disk", "context", "h2o", "full"],
)
def test_the_bytes_are_those_that_a_run_measures(tmp_path: Path, method: Method, changes: dict[str, Any]) -> None:
    done = run(tmp_path, method, niah(), **changes | {"batch": 1})
    settings = replace(Settings(results=Results(root=str(tmp_path))), **changes)
    job = Job.plan(method, niah(), MODEL, settings)
    cost = sealed_cost(job.cache_spec, MODEL.describe(), job.items)
    for tier, count in cost.held.items():
        largest = max(one[bytes_key(tier)] for one in done.records)
        assert count == pytest.approx(settings.batch * largest, rel=0.02)


def test_fulls_folder_says_whether_it_runs_too(cli: Cli) -> None:
    words = ["task.depths=1", "method=streaming"]
    [full] = row(cli, "Full", *words)
    assert full.endswith(", runs too")
    assert cli("task.depths=1", "method=full")[0] == 0
    assert row(cli, "Full", *words) == [full.replace("runs too", "finished already")]
