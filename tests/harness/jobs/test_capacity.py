"""What does not fit is refused before anything is loaded or written, with the setting that helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.settings import Results, Settings, SettingsError, StoreSettings
from harness.jobs.evaluate import evaluate, evaluate_together
from harness.jobs.job import Job
from harness.jobs.planning import machine
from harness.jobs.planning.cache_bytes import CacheSpec
from harness.jobs.planning.capacity import MemoryForecast, needed, refusal
from methods.full import Full
from methods.tiers.pinned_memory import STEP_BYTES, reservation_bytes
from tests.fast import MODEL, PQ, STREAMING, niah

GIB = 2**30
EIGHT_B = replace(MODEL, shape="llama-3.1-8b", layers=None)
Cli = Callable[..., tuple[int, str, str]]
both = pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the report: 21.6 GiB."""
    monkeypatch.setattr("harness.jobs.planning.machine.free_bytes", lambda device: int(21.6 * GIB))
    monkeypatch.setattr("harness.jobs.dry_run.free_here", lambda device: (int(21.6 * GIB), None))


def never(*_: object) -> None:
    raise AssertionError("weights were loaded")


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize("shared", [False, True])
def test_8b_in_fp32_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr("harness.models.random.Random.build", never)
    settings = Settings(results=Results(root=str(tmp_path)), device="cpu", shared_prefill=shared)
    with pytest.raises(
        SettingsError, match=r"weights 29\.9 GiB.* in fp32 but only 21\.6 GiB are free.*dtype=bf16 \(15"
    ):
        if shared:
            evaluate_together([Job.plan(PQ, niah(), EIGHT_B, settings)])
        else:
            evaluate(PQ, niah(), EIGHT_B, settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("free")
def test_the_dry_run_says_the_same(cli: Cli) -> None:
    code, out, err = cli("model.shape=llama-3.1-8b", "model.layers=null", "dry_run=true", "device=cpu")
    assert code == 0, err
    assert "weights 29.9 GiB" in out
    assert "use dtype=bf16" in out
    code, out, err = cli("dry_run=true", "device=cpu")
    assert "21.6 GiB free" in out
    assert re.search(r"batch +at most \d+ sequences of \d+ tokens fit at once, by the memory of the device", out)


def test_a_finished_run_needs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(results=Results(root=str(tmp_path)), device="cpu")
    first = evaluate(Full(), niah(), MODEL, settings)
    monkeypatch.setattr("harness.jobs.planning.machine.free_bytes", lambda device: 0)
    assert evaluate(Full(), niah(), MODEL, settings) == first
    with pytest.raises(SettingsError, match="a smaller model"):
        evaluate(Full(), niah(depths=2), MODEL, replace(settings, dtype="bf16"))


@pytest.mark.parametrize(
    ("need", "changes", "helps"),
    [
        (MemoryForecast(10, 0, 0), {"dtype": "fp32"}, "use dtype=bf16 (5.00 B)."),
        (MemoryForecast(10, 0, 0), {"dtype": "bf16"}, "use a smaller model."),
        (MemoryForecast(1, 9, 0), {"dtype": "bf16", "batch": 2}, "use a smaller batch or fewer tokens."),
        (MemoryForecast(1, 9, 0), {"dtype": "bf16", "device": "cuda"}, "use fewer tokens."),
        (
            MemoryForecast(1, 9, 0),
            {"dtype": "bf16", "device": "cuda", "batch": 2},
            "use a smaller batch or placement=host or fewer tokens.",
        ),
        (MemoryForecast(1, 2, 9), {"dtype": "bf16"}, "use prefill_chunk=2048 or fewer tokens."),
    ],
)
def test_the_advice_is_what_helps(need: MemoryForecast, changes: dict, helps: str) -> None:
    settings = Settings(**{"device": "cpu"} | changes)
    assert refusal(need, settings, need.total) is None
    assert refusal(need, settings, None) is None
    assert helps in str(refusal(need, settings, 8))


def test_host_memory_beside_a_gpu_is_checked_too() -> None:
    settings, need = Settings(device="cuda", dtype="bf16", placement="host", batch=2), MemoryForecast(1, 2, 3, host=10)
    assert refusal(need, settings, 100, 10) is None
    assert refusal(need, settings, 100, None) is None
    told = "needs 10.0 B of host memory beside cuda but only 9.00 B are free: use placement=disk or a smaller batch."
    assert told in str(refusal(need, settings, 100, 9))
    assert str(need).endswith(" and 10.0 B of host memory")


def full(settings: Settings) -> CacheSpec:
    return CacheSpec(settings, Full(), None)


def test_what_is_there_or_elsewhere_is_not_counted() -> None:
    from harness.jobs.planning.examples import prepare

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
    from harness.jobs.planning.examples import prepare

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
    from harness.jobs.planning.examples import prepare

    info, alone = MODEL.describe(), Settings(device="cuda", dtype="fp32")
    items, shared = prepare(niah(), MODEL, alone), replace(alone, shared_prefill=True)
    one = needed(info, full(alone), items).kv
    assert needed(info, full(shared), items, beside=[full(shared)] * 2).kv == 4 * one
    assert needed(info, full(shared), items, beside=[full(replace(shared, placement="host"))]).kv == 3 * one
    assert needed(info, full(replace(alone, fidelity=4)), items).kv == 2 * one
    assert "shared_prefill=false" in str(refusal(MemoryForecast(1, 9, 0), shared, 8))


def test_a_store_on_the_device_counts_up_to_its_room() -> None:
    from harness.jobs.planning.examples import prepare
    from tests.harness.jobs.test_questions import Balances

    info, plain = MODEL.describe(), Settings(device="cuda", dtype="fp32")
    items = prepare(Balances(talks=True), MODEL, plain)
    all_of_them = sum(info.kv_bytes("fp32", item.room) for item in items)
    for device, store, more in (
        ("cuda", StoreSettings(), 0),
        ("cpu", StoreSettings(host="1TB"), all_of_them),
        ("cpu", StoreSettings(host=500, disk="1TB"), 500),
    ):
        settings = replace(plain, device=device, history="store", store=store)
        cache_spec = full(settings)
        assert needed(info, cache_spec, items).kv == needed(info, full(plain), items).kv + more
        together = needed(info, cache_spec, items, beside=[cache_spec])
        assert together.kv == needed(info, full(plain), items, beside=[full(plain)]).kv + 2 * more
    assert "a smaller store" in str(refusal(MemoryForecast(1, 9, 0), settings, 8))


def test_what_a_store_pins_beside_a_gpu_counts_as_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.jobs.planning.examples import prepare
    from tests.harness.jobs.test_questions import Balances

    info, plain = MODEL.describe(), Settings(device="cuda", dtype="fp32", history="store")
    items = prepare(Balances(talks=True), MODEL, plain)
    assert needed(info, full(plain), items).host == STEP_BYTES  # no more at once than a step has
    monkeypatch.setattr("harness.jobs.planning.capacity.WRITE_BUFFER", 300)
    for store, pinned in (
        (StoreSettings(host=0, disk="1TB"), 300),
        (StoreSettings(host=500), 800),
    ):
        assert needed(info, full(replace(plain, store=store)), items).host == pinned
        assert needed(info, full(replace(plain, store=store, device="cpu")), items).host == 0
    for history in ("recompute", "device_prefix"):
        assert needed(info, full(replace(plain, history=history)), items).host == 0


@both
def test_jobs_that_run_at_once_must_fit_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    settings = Settings(results=Results(root=str(tmp_path)), device="cpu", shared_prefill=shared)
    wanted = [Job.plan(method, niah(depths=2), MODEL, settings) for method in (PQ, STREAMING)]
    need = Job.plan(PQ, niah(depths=2), MODEL, replace(settings, shared_prefill=False)).need()
    monkeypatch.setattr("harness.jobs.planning.machine.free_bytes", lambda device: need.total + need.kv)
    if shared:
        with pytest.raises(SettingsError, match="shared_prefill=false"):
            evaluate_together(wanted)
        assert list(tmp_path.iterdir()) == []
    else:
        assert len(evaluate_together(wanted)) == 3  # with Full, one after the other


@pytest.mark.parametrize(("version", "controller"), [(2, ""), (1, "memory")])
def test_the_smallest_limit_above_this_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, controller: str
) -> None:
    names = ("memory.max", "memory.current", "inactive_file") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    )  # fmt: skip
    root = tmp_path / "cgroup"
    inner = root / controller / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, limit in ((inner.parent, "3000"), (inner, "max")):
        (folder / names[0]).write_text(limit)
        (folder / names[1]).write_text("2500")
        (folder / "memory.stat").write_text(f"anon 7\n{names[2]} 100\n")
    (tmp_path / "own").write_text(f"5:{controller}:/outer/inner\n")
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   50 kB\n")
    monkeypatch.setattr(machine, "CGROUPS", root)
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    assert machine.free_bytes("cpu") == 600
    (inner.parent / names[0]).write_text("max")
    assert machine.free_bytes("cpu") == 50 * 1024
    (tmp_path / "meminfo").unlink()
    assert machine.free_bytes("cpu") is None
