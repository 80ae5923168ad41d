"""Replayed schedules take what their closed forms say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.machines.costs import CostTable, LinkCost
from harness.machines.replay import ScheduleTimes, replay
from harness.machines.schedule import (
    COMPUTE,
    DISK_LANE,
    TO_DEVICE,
    TO_HOST,
    WORKERS,
    Lane,
    LayerBorder,
    Operation,
    ScheduleEvent,
    Submitted,
    TokenOut,
    Waited,
    launches,
)
from harness.machines.timeline import chrome_trace, picture, write_trace

LAYERS, TOKENS = 7, 5


def seconds(count: float) -> Any:
    return pytest.approx(count, abs=1e-9)


def computed(milliseconds: int, name: str = "attend") -> Operation:
    """By a table that reads a million bytes per second."""
    return Operation(name, read=1000 * milliseconds)


def sent(key: int, lane: Lane, nbytes: int, **more: Any) -> Submitted:
    return Submitted(key, lane, lane, nbytes, **more)


def test_one_operation_after_the_other() -> None:
    """A step of L layers is L launches, and the longer of bytes and arithmetic of each; nothing is submitted."""
    step: list[ScheduleEvent] = []
    for layer in range(LAYERS):
        step += [LayerBorder(layer), Operation("bytes", 3000, 1000, 10), Operation("flop", 10, 0, 5000)]
    costs = CostTable(read_bytes_s=1e6, flop_s=1e6, launch_s=2e-3, layer_s=1e-3)
    times = replay([*step, TokenOut()] * TOKENS, costs)
    per_token = LAYERS * (1e-3 + 2e-3 + 4e-3 + 2e-3 + 5e-3)
    assert times.tpot_s == seconds(per_token)
    assert times.tt2t_s == seconds(2 * per_token)
    assert times.end_s == seconds(TOKENS * per_token)
    assert times.exposed_s(TO_DEVICE) == times.hidden_s(TO_DEVICE) == 0


@pytest.mark.parametrize(("compute_ms", "transfer_ms"), [(4, 2), (4, 4), (2, 5)])
def test_the_next_layer_is_loaded_under_this_one(compute_ms: int, transfer_ms: int) -> None:
    """x + (L - 1) max(c, x) + c: what is longer than a layer's work is exposed, and the first transfer always is."""
    schedule: list[ScheduleEvent] = [sent(0, TO_DEVICE, transfer_ms * 1000)]
    for layer in range(LAYERS):
        schedule += [LayerBorder(layer), Waited(layer)]
        schedule += [sent(layer + 1, TO_DEVICE, transfer_ms * 1000)] if layer + 1 < LAYERS else []
        schedule += [computed(compute_ms)]
    times = replay(schedule, CostTable(read_bytes_s=1e6, to_device=LinkCost(1e6)))
    compute_s, transfer_s = compute_ms / 1e3, transfer_ms / 1e3
    assert times.end_s == seconds(transfer_s + (LAYERS - 1) * max(compute_s, transfer_s) + compute_s)
    assert times.exposed_s(TO_DEVICE) == seconds(transfer_s + (LAYERS - 1) * max(0.0, transfer_s - compute_s))
    assert times.hidden_s(TO_DEVICE) == seconds((LAYERS - 1) * min(compute_s, transfer_s))


def test_a_link_serves_in_order_and_directions_are_independent() -> None:
    """Three transfers of a direction end behind one another: latency + pieces x a piece + bytes / bandwidth each."""
    link, back = LinkCost(1e6, latency_s=1e-3, piece_s=1e-4), LinkCost(2e6, latency_s=5e-4)
    of_one = 1e-3 + 20 * 1e-4 + 6e-3
    schedule = [
        sent(1, TO_DEVICE, 6000, pieces=20),
        sent(2, TO_HOST, 6000),
        sent(3, TO_DEVICE, 6000, pieces=20),
        sent(4, TO_DEVICE, 6000, pieces=20),
        Waited(2),
        TokenOut(),
        computed(1),
        Waited(4),
        TokenOut(),
    ]
    times = replay(schedule, CostTable(read_bytes_s=1e6, to_device=link, to_host=back))
    assert times.token_s == [seconds(5e-4 + 3e-3), seconds(3 * of_one)]
    assert times.hidden_s(TO_DEVICE) == seconds(1e-3)
    assert times.exposed_s(TO_HOST) == seconds(3.5e-3)


def test_rows_from_a_disk_pass_through_two_links() -> None:
    """Reads go on while what was read before is sent: D + max(D, T) + T for two of them behind one another."""
    disk_s, link_s = 1e-4 + 8e-3, 4e-3
    schedule: list[ScheduleEvent] = []
    for key in (0, 2):
        schedule += [sent(key, DISK_LANE, 8000), sent(key + 1, TO_DEVICE, 8000, after=(key,))]
    times = replay([*schedule, Waited(3)], CostTable(to_device=LinkCost(2e6), disk=LinkCost(1e6, latency_s=1e-4)))
    assert times.end_s == seconds(disk_s + max(disk_s, link_s) + link_s)


def test_a_gather_slows_the_device_and_workers_fall_behind() -> None:
    """Half of a 10 ms operation's time lies under a gather that makes it 1.5 times as slow: 10 + 4 - 4/1.5 ms. Two
    workers share the clustering of L layers, and the second token waits for their backlog."""
    schedule: list[ScheduleEvent] = [sent(0, TO_DEVICE, 4000, gather=True), computed(10), TokenOut()]
    for layer in range(LAYERS):
        schedule += [sent(1 + layer, WORKERS, 3000, flop=1)]
    schedule += [computed(2), *(Waited(1 + layer) for layer in range(LAYERS)), TokenOut()]
    costs = CostTable(read_bytes_s=1e6, to_device=LinkCost(1e6), workers=2, worker_bytes_s=1e6, gather_slows=1.5)
    times = replay(schedule, costs)
    ttft_s = 10e-3 + 4e-3 - 4e-3 / 1.5
    assert times.token_s[0] == seconds(ttft_s)
    assert times.tt2t_s == seconds(ttft_s + -(-LAYERS // 2) * 3e-3)  # TTFT + the backlog
    assert times.tpot_s is None
    assert times.hidden_s(WORKERS) == seconds(2e-3)


def test_a_device_that_copies_its_rows_itself_computes_later_and_the_link_does_not_wait() -> None:
    """2 ms of copies run beside 8 ms of the link, and what comes behind the wait is 1 ms."""
    schedule = [sent(1, TO_DEVICE, 8000), Waited(1), Operation("x", 1000)]
    costs = CostTable(read_bytes_s=1e6, to_device=LinkCost(1e6), copied_bytes_s=4e6)
    assert replay(schedule, costs).end_s == pytest.approx(9e-3)
    away = [sent(1, TO_HOST, 8000), Operation("x", 1000)]
    assert replay(away, costs).end_s == pytest.approx(1e-3)
    slow = replay(schedule, CostTable(read_bytes_s=1e6, to_device=LinkCost(4e6), copied_bytes_s=1e6))
    assert slow.end_s == pytest.approx(9e-3)


def test_a_schedule_that_waits_for_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="waits for work 3, which nothing before has submitted"):
        replay([Waited(3)], CostTable())
    with pytest.raises(ValueError, match="waits for work 2"):
        replay([sent(1, TO_DEVICE, 8, after=(2,))], CostTable())


def drawn() -> ScheduleTimes:
    schedule = [LayerBorder(0), sent(0, TO_DEVICE, 2000), computed(3), Waited(0), computed(1, "logits"), TokenOut()]
    return replay(schedule, CostTable(read_bytes_s=1e6, to_device=LinkCost(1e6)))


def test_a_timeline_is_a_trace_that_browsers_load(tmp_path: Path) -> None:
    """Complete events with a time and a duration in microseconds, on threads that are named."""
    write_trace(tmp_path / "trace.json", drawn())
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == chrome_trace(drawn())
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    bars = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert bars == [
        (TO_DEVICE, TO_DEVICE, 0, seconds(2000)),
        (COMPUTE, "attend", 0, seconds(3000)),
        (COMPUTE, "logits", seconds(3000), seconds(1000)),
    ]
    assert [event["ts"] for event in trace["traceEvents"] if event["ph"] == "i"] == [seconds(4000)]


def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture(tmp_path / "line.png", drawn(), "A step")
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")


def test_launches_are_counted_by_name() -> None:
    assert launches([computed(1), LayerBorder(0), computed(2), Operation("top_k"), TokenOut()]) == {
        "attend": 2,
        "top_k": 1,
    }
