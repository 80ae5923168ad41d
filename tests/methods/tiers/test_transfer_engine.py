"""The engine that brings rows to the device: when they begin to move, when they are there, and what that costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.tiers.traffic import Traffic
from methods.tiers.transfer import streams
from methods.tiers.transfer.engine import TransferEngine, shared_engine

CPU = torch.device("cpu")
ROWS = torch.arange(12.0)


def moving(size: int) -> Callable[[Traffic], Tensor]:
    def read(traffic: Traffic) -> Tensor:
        traffic.to_device_bytes += size
        return ROWS

    return read


def test_rows_come_while_the_caller_computes_and_the_rest_is_exposed() -> None:
    going, traffic = threading.Event(), Traffic()
    engine = TransferEngine(threads=1)

    def late(moved: Traffic) -> Tensor:
        assert going.wait(600)
        time.sleep(0.02)
        return moving(200)(moved)

    arrival = engine.begin(late, traffic, CPU, ahead=True)
    time.sleep(0.02)
    going.set()
    assert arrival.wait() is ROWS
    assert traffic.exposed_s >= 0.0199
    assert traffic.hidden_s >= 0.0199
    assert traffic.to_device_bytes == 200
    engine.begin(late, traffic, CPU).wait()  # not before it is waited for
    assert traffic.exposed_s >= 0.0398
    engine.close()


def test_rows_that_nobody_waits_for_count_nowhere_and_waiting_twice_counts_once() -> None:
    traffic = Traffic()
    engine = TransferEngine()
    engine.begin(moving(7), traffic, CPU, ahead=True)
    arrival = engine.begin(moving(5), traffic, CPU, ahead=True)
    assert arrival.wait() is arrival.wait()
    assert traffic.to_device_bytes == 5


def test_a_thread_moves_rows_in_order_and_in_the_mode_of_its_caller() -> None:
    traffic, order, going = Traffic(), [], threading.Event()
    engine = TransferEngine(threads=1)

    def read(name: str) -> Callable[[Traffic], tuple[threading.Thread, bool]]:
        def run(moved: Traffic) -> tuple[threading.Thread, bool]:
            assert going.wait(600)
            order.append(name)
            return threading.current_thread(), torch.is_inference_mode_enabled()

        return run

    with torch.inference_mode():
        first = engine.begin(read("first"), traffic, CPU, ahead=True)
    second = engine.begin(read("second"), traffic, CPU, ahead=True)
    going.set()
    (thread, inference), (_, plain) = first.wait(), second.wait()
    assert thread is not threading.current_thread()
    assert (inference, plain) == (True, False)
    assert order == ["first", "second"]
    engine.close()
    assert not thread.is_alive()


def test_an_error_of_a_thread_is_raised_where_its_rows_are_waited_for() -> None:
    engine = TransferEngine(threads=1)

    def fail(moved: Traffic) -> Tensor:
        raise OSError("the disk is gone")

    arrival = engine.begin(fail, Traffic(), CPU, ahead=True)
    with pytest.raises(OSError, match="disk is gone"):
        arrival.wait()
    engine.close()


def test_rows_that_come_within_a_step_leave_the_models_stream_and_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph wants it: each branch begins behind what its step has done, and ends in it."""
    noted, device = list[str](), torch.device("cuda", 0)

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other: Stream) -> None:
            noted.append(f"{self.name} behind {other.name}")

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        noted.append(f"on {stream.name}")
        yield
        noted.append("back")

    model = Stream("model")
    for name, fake in (("Stream", Stream), ("stream", entered), ("current_stream", lambda on: model)):
        monkeypatch.setattr(torch.cuda, name, fake)
    streams._side.cache_clear()
    engine, traffic = TransferEngine(threads=1), Traffic()

    def read(moved: Traffic) -> int:
        noted.append("read")
        moved.to_device_bytes += 8
        return 5

    try:
        arrival = engine.branch(read, traffic, device, ahead=True)
        noted.append("computes")
        assert arrival.wait() == 5
    finally:
        engine.close()
        streams._side.cache_clear()
    assert noted == ["side behind model", "on side", "read", "back", "computes", "model behind side"]
    assert traffic.to_device_bytes == 8


def test_a_device_has_one_engine_whoever_asks() -> None:
    engine = shared_engine(CPU)
    assert shared_engine(CPU) is engine
    assert shared_engine(torch.device("meta")) is not engine


def test_an_engine_that_one_user_closes_has_drained_all_and_serves_the_others() -> None:
    engine, going, traffic = shared_engine(CPU), threading.Event(), Traffic()

    def read(moved: Traffic) -> str:
        assert going.wait(10)
        return threading.current_thread().name

    before = set(threading.enumerate())
    arrival = engine.begin(read, traffic, CPU, ahead=True)
    timer = threading.Timer(0.05, going.set)
    timer.start()
    shared_engine(CPU).close()
    timer.join()
    assert set(threading.enumerate()) <= before
    assert arrival.wait().startswith("transfer-move")
    assert engine.begin(read, traffic, CPU, ahead=True).wait().startswith("transfer-move")
    engine.close()
    assert set(threading.enumerate()) <= before
