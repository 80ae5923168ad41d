"""The trace simulator: by hand on small traces, against the paper's constants on large ones."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from harness.cachedattention.simulation import costs
from harness.cachedattention.simulation.costs import Costs, Hardware, Prices, Served
from harness.cachedattention.simulation.outcome import simulated
from harness.cachedattention.simulation.paper import FILE, figure
from harness.cachedattention.simulation.scenario import Scenario, scenarios
from harness.cachedattention.simulation.server import ServedTurn, Server
from harness.cachedattention.simulation.trace import TracedConversation, TurnLengths
from harness.commands.simulate import main
from harness.results.files import read_yaml

GB = 10**9


def priced(window: int = 1000, batch: int = 2) -> Costs:
    """1 GB per token, 10 tokens per second over PCIe and 2 from disk, 0.1 s per token of prefill, 1 s per step."""
    model = Served(
        kv_bytes_per_token=GB, window=window, gpus=2, batch=batch, prefill_s_per_token=0.1, decode_step_s=1.0
    )
    prices = Prices(gpu_usd_per_hour=5.0, dram_usd_per_gb_hour=0.0088, ssd_usd_per_gb_hour=0.000082)
    return Costs(Hardware(pcie_bytes_per_s=10 * GB, disk_bytes_per_s=2 * GB), prices, {"toy": model})


def served(trace: list[TracedConversation], prices: Costs | None = None, **settings: object) -> list[ServedTurn]:
    scenario = Scenario(
        model="toy", **{"host": "1TB", "disk": "1TB", "copies": False, "write_buffer": "1000TB"} | settings
    )  # type: ignore[arg-type]
    return Server(scenario, prices or priced()).serve(trace)


def talk(name: str, start_s: float, *turns: tuple[int, int], think_s: float = 5.0) -> TracedConversation:
    return TracedConversation(name, start_s, tuple(TurnLengths(*turn) for turn in turns), (think_s,) * (len(turns) - 1))


def test_two_turns_by_hand() -> None:
    """Turn 1: 10 tokens in 1 s, an answer of 4. Turn 2 comes 5 s later: 6 new tokens, 14 stored."""
    first, second = served([talk("a", 2.0, (10, 4), (6, 3))], preload="off")
    assert (first.tier, first.history, first.wait_s) == (None, 0, 0.0)
    assert first.prefill_s == pytest.approx(1.0)
    assert (second.tier, second.history) == ("host", 14)
    assert second.load_s == second.exposed_s == pytest.approx(1.4)
    assert second.prefill_s == pytest.approx(0.6 + 1.4)
    assert second.busy_s == pytest.approx(4 + 2.0)  # the answer before, and this prefill: no idle time


def test_loading_hides_behind_computing_and_with_a_buffer_behind_the_job_before() -> None:
    """a comes again at 19 s, while b computes from 15 to 21 s; 10.4 s of loading, 0.6 s of computing."""
    trace = [talk("a", 0.0, (100, 4), (6, 3)), talk("b", 15.0, (60, 40))]
    exposed = {}
    for preload in ("off", "layerwise", "buffered"):
        again = next(job for job in served(trace, preload=preload) if job.turn == 1)
        assert (again.start_s, again.load_s) == pytest.approx((21.0, 10.4))
        exposed[preload] = again.exposed_s
    assert exposed["off"] == pytest.approx(10.4)
    assert exposed["layerwise"] == pytest.approx(10.4 - 0.6)
    assert exposed["buffered"] == pytest.approx(10.4 - 0.6 - 2.0)


def test_the_read_buffer_holds_what_computing_will_not_hide() -> None:
    """b has 10 s of loading and 8 of computing: 2 s come before its job, so that c's loading can begin 8 s later."""
    trace = [
        talk("b", 0.0, (60, 40), (80, 3), think_s=20.0),
        talk("c", 0.1, (60, 40), (5, 3), think_s=20.1),
        talk("d", 70.0, (100, 3)),
    ]
    jobs = served(trace, priced(batch=3), preload="buffered")
    b, c = (job for job in jobs if job.turn == 1)
    assert (b.session, c.session) == ("b", "c")
    assert b.exposed_s == 0.0
    assert c.start_s - b.start_s == pytest.approx(8.0)
    assert c.exposed_s == pytest.approx(10.0 - 0.5)


@pytest.mark.parametrize(("duplex", "waits_s"), [(False, 2.0), (True, 0.0)])
def test_writing_occupies_the_disk_unless_it_reads_meanwhile(duplex: bool, waits_s: float) -> None:
    """a comes again at 25 s, while the 14 GB of b are written from 20 to 27."""
    prices = replace(priced(), hardware=replace(priced().hardware, disk_duplex=duplex))
    trace = [talk("a", 0.0, (10, 4), (6, 3), think_s=20.0), talk("b", 15.0, (10, 4))]
    again = next(job for job in served(trace, prices, host=0, preload="off") if job.turn == 1)
    assert again.exposed_s == pytest.approx(waits_s + 7 + 1.4)


def test_a_session_that_comes_back_from_disk_is_written_no_second_time_while_there_is_room() -> None:
    """Memory holds one of two sessions, which grow from 14 to 16 to 18 GB: every turn moves both. Each is written once,
    then what is new of it. A disk of 30 GB has no room for 32: there the copy of a goes, and its 18 GB are written."""
    trace = [talk(name, at, (10, 4), (1, 1), (1, 1), think_s=50.0) for name, at in (("a", 0.0), ("b", 25.0))]
    written = {}
    for disk in ("30GB", "40GB"):
        server = Server(
            Scenario(model="toy", policy="lru", host="18GB", disk=disk, copies=False, write_buffer="1000TB"), priced()
        )
        server.serve(trace)
        written[disk] = server.disk.written_bytes / GB
    assert written == {"40GB": 14 + 14 + 2 + 2 + 2, "30GB": 14 + 14 + 2 + 2 + 18}


def test_an_overflow_cuts_the_stored_history_unless_positions_are_in_it() -> None:
    trace = [talk("a", 0.0, (40, 30), (40, 5))]
    decoupled = served(trace, priced(window=100))[1]
    assert (decoupled.tier, decoupled.history) == ("host", 35)
    assert decoupled.prefill_s == pytest.approx(4.0 + decoupled.exposed_s)
    coupled = served(trace, priced(window=100), positions="coupled")[1]
    assert (coupled.tier, coupled.history) == (None, 35)
    assert coupled.prefill_s == pytest.approx(4.0 + 3.5)


def test_a_time_to_live_ends_while_the_user_thinks() -> None:
    trace = [talk("a", 0.0, (10, 4), (6, 3), think_s=100.0)]
    assert served(trace, ttl_s=99.0)[1].tier is None
    assert served(trace, ttl_s=101.0)[1].tier == "host"


def test_where_a_queue_builds_up_looking_ahead_wins() -> None:
    """The regime of the paper: more turns come than are served, and the store holds a part of the sessions."""
    shape = {"sessions": 600, "warmup": 600, "rate": 2.0, "host": "20GB", "disk": "200GB"}
    known, rates = costs.load(), {}
    for policy in ("scheduler_aware", "lru", "fifo", "recompute"):
        figures = simulated(Scenario(policy=policy, **shape), known)["figures"]  # type: ignore[arg-type]
        rates[policy] = figures["hit_rate"]
        if policy == "scheduler_aware":
            assert figures["hit_rate_host"] > 0.5 * figures["hit_rate"]
        else:
            assert figures["hit_rate_host"] < 0.1
    assert rates["scheduler_aware"] > 1.5 * max(rates["lru"], rates["fifo"])
    assert rates["recompute"] == 0


def test_a_key_with_several_values_makes_several_runs() -> None:
    runs = list(scenarios(["policy=lru,fifo", "disk=2TB,10TB", "rate=2"]))
    assert [(run.policy, run.disk, run.rate) for run in runs] == [
        ("lru", "2TB", 2), ("lru", "10TB", 2), ("fifo", "2TB", 2), ("fifo", "10TB", 2)
    ]  # fmt: skip
    assert runs[0].capacities == {"device": 0, "host": 128 * GB, "disk": 2000 * GB}
    assert [run.preload for run in scenarios(["preload=off,layerwise"])] == ["off", "layerwise"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("polcy=lru", "policy"),
        ("policy=lur", "lru"),
        ("policy=[lru", "policy=[lru"),
        ("disk=100GB", "copies=false"),
        ("disk=10XB", "disk=10XB"),
        ("truncation_ratio=1.0", "truncation_ratio"),
        ("model=llama-13", "llama-13b"),
        ("warmup=9999", "warmup="),
    ],
)
def test_errors_name_what_is_legal(word: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sessions=20", word, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_costs_of_ones_own_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(costs.FILE.read_text().replace("gpus: 2", "gpus: 0"))
    assert main(["sessions=20", "--costs", str(path), "--out", str(tmp_path)]) == 2
    assert "gpus=0" in capsys.readouterr().err
    path.write_text(costs.FILE.read_text().replace("gpu_usd_per_hour: 5.0", "gpu_usd_per_hour: 10.0"))
    paid = {}
    for name, words in (("usual", []), ("twice", ["--costs", str(path)])):
        out = tmp_path / name
        assert main([*words, "policy=recompute,lru", "sessions=30", "warmup=0", "--out", str(out)]) == 0
        made = json.loads((out / "simulation.json").read_text())["runs"]
        with open(out / "simulation.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["hit_rate"]) for row in rows] == [run["figures"]["hit_rate"] for run in made]
        assert rows[1]["policy"] == "lru"
        assert float(rows[1]["hit_rate"]) > 0
        paid[name] = made[0]["figures"]["cost_usd"]
    assert paid["twice"] == pytest.approx(2 * paid["usual"])
    assert "recompute" in capsys.readouterr().out


# The paper's figures: each claim means one run, and its number is one that the paper prints.

REFERENCE = Path(__file__).parents[4] / "results" / "paper" / "paper_reference.csv"
DERIVED = {0.40, 0.095, 0.857}  # from LRU's tiers and its distance to the others, and from a share of hits
NUMBERS = list(read_yaml(FILE))


@pytest.fixture(scope="module")
def printed() -> set[float]:
    with open(REFERENCE, newline="") as file:
        ours = [row for row in csv.DictReader(file) if row["source"].startswith("CachedAttention")]
    return {round(float(row["value"]), 3) for row in ours}


@pytest.mark.parametrize("number", NUMBERS)
def test_each_claim_means_one_run_and_a_printed_number(number: str, printed: set[float]) -> None:
    one = figure(number)
    rows = [{"settings": asdict(run), "figures": {claim.of: 0.5 for claim in one.claims}} for run in one.scenarios([])]
    for claim in one.claims:
        assert claim.ours(rows) in (0.5, 0.0, 1.0)
        known = {round(abs(claim.paper), 3), round(100 * abs(claim.paper), 1)}
        assert known & printed or claim.paper in DERIVED or round(claim.paper, 3) == 0.129, claim.name


def test_a_figure_has_the_papers_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--figure", "25", "sessions=40", "warmup=10", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "82.0 %" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"simulation.json", "simulation.csv"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["99"], "choose one of 13, 14"),
        (["21", "policy=lru"], "leave out policy=lru"),
        (["25", "seed=0,1"], "leave out seed"),
    ],
)
def test_what_a_figure_cannot_do(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--figure", *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
