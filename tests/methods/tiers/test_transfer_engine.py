"""The engine that brings rows to the device, its lanes and its ways to copy: when rows move, and what it costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ops
from methods.tiers import transfer
from methods.tiers.lanes import INLINE, TransferLane
from methods.tiers.rows import HostRows, Place
from methods.tiers.traffic import Traffic
from methods.tiers.transfer import TransferEngine
from tests.dispatched import DispatchRecorder

CPU = torch.device("cpu")
ROWS = torch.arange(12.0)


def moving(size: int) -> Callable[[Traffic], Tensor]:
    def read(traffic: Traffic) -> Tensor:
        traffic.to_device_bytes += size
        return ROWS

    return read


def test_rows_come_while_the_caller_computes_and_the_rest_is_exposed() -> None:
    begun, going, traffic = threading.Event(), threading.Event(), Traffic()
    engine = TransferEngine(threads=1)

    def late(moved: Traffic) -> Tensor:
        begun.set()
        assert going.wait(600)
        time.sleep(0.02)
        return moving(200)(moved)

    arrival = engine.begin(late, traffic, CPU, ahead=True)
    assert begun.wait(600)
    time.sleep(0.02)
    going.set()
    assert arrival.wait() is ROWS
    assert traffic.exposed_s >= 0.0199
    assert traffic.hidden_s >= 0.0199
    assert traffic.to_device_bytes == 200
    engine.begin(late, traffic, CPU).wait()  # not before it is waited for
    assert traffic.exposed_s >= 0.0398
    waited = engine.begin(moving(5), traffic, CPU, ahead=True)
    assert waited.wait() is waited.wait()
    engine.begin(moving(7), traffic, CPU, ahead=True)  # nobody waits for these rows
    assert traffic.to_device_bytes == 405
    engine.close()


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


def test_rows_of_host_memory_leave_the_models_stream_and_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's stream waits for the rows that are asked for, and not for those after them; a capture is joined at
    its end, if there is something to join. No thread takes part, and each stream of a model has one beside it."""
    noted, device, capturing = list[str](), torch.device("cuda", 0), {"model": True, "side": True}

    class Event:
        def __init__(self) -> None:
            self.behind = ""

        def record(self, stream: Stream) -> None:
            self.behind = noted[-1]

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, on: Any = None, priority: int = 0) -> None:
            self.name = "side" if priority < 0 else "model"

        def wait_stream(self, other: Stream) -> None:
            noted.append(f"{self.name} behind {other.name}")

        def wait_event(self, event: Event) -> None:
            noted.append(f"{self.name} behind {event.behind}")

    current = [Stream()]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    fakes: dict[str, Any] = {
        "Stream": Stream, "Event": Event, "stream": entered, "current_stream": lambda on: current[-1],
        "is_current_stream_capturing": lambda: capturing[current[-1].name],
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(TransferLane, "submit", None)
    engine, traffic = TransferEngine(threads=1), Traffic()

    def reads(name: str) -> Callable[[Traffic], str]:
        def read(moved: Traffic) -> str:
            noted.append(name)
            moved.to_device_bytes += 8
            return name

        return read

    first, second = (engine.begin(reads(x), traffic, device, ahead=True, by_device=True) for x in ("first", "second"))
    assert (first.wait(), first.wait(), second.wait()) == ("first", "first", "second")
    transfer.join(device)
    capturing["side"] = False
    transfer.join(device)
    engine.close()
    asked = ["side behind model", "first", "side behind model", "second"]
    assert noted == [*asked, "model behind first", "model behind second", "model behind side"]
    assert traffic.to_device_bytes == 16
    one, same, other = map(transfer.second_stream, (current[0], current[0], Stream()))  # type: ignore[arg-type]
    assert one is same is not other


def test_what_waits_for_something_keeps_nothing_else_waiting() -> None:
    lane, (first, second) = TransferLane("test", 1), (Future[None](), Future[None]())
    late = lane.submit(lambda: "late", after=[first, second])
    assert lane.submit(lambda: "at once").result(10) == "at once"
    first.set_result(None)
    assert not late.done()
    second.set_exception(OSError("it ends all the same"))
    assert late.result(10) == "late"
    lane.close()


def test_an_error_is_raised_where_its_rows_are_waited_for() -> None:
    assert INLINE.submit(threading.get_ident).result() == threading.get_ident()

    def fail() -> None:
        raise OSError("the disk is gone")

    for engine in (TransferEngine(), TransferEngine(threads=1)):
        assert isinstance(engine.copy_lane.submit(fail).exception(), OSError)
        with pytest.raises(OSError, match="disk"):
            engine.begin(lambda traffic: fail(), Traffic(), CPU, ahead=True).wait()
        engine.close()


ELSEWHERE = torch.device("meta")  # a device that is not the CPU, and computes nothing
ROOM, WIDTH, PAIRS = 64, 16, 6


class Copies(DispatchRecorder):
    """Counts copies to the other device, and what is first collected in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.collected = list[int](), 0

    def has_run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: list[Tensor]
    ) -> None:
        name = func.overloadpacket.__name__
        if name == "copy_" and args[0].device == ELSEWHERE:
            self.sizes.append(args[1].nbytes)
        elif name == "_to_copy" and out.device == ELSEWHERE:
            self.sizes.append(out.nbytes)
            self.collected += not args[0].is_contiguous()


@pytest.mark.parametrize(
    ("count", "block_bytes", "pinned", "counts"),  # copies, those of what was collected, kernels
    [
        (ROOM, 10**9, True, (1, 0, 0)),  # one piece
        (40, 40 * WIDTH * 4, True, (PAIRS, 0, 0)),  # each head's rows are large enough
        (40, 40 * WIDTH * 4 + 1, True, (0, 0, 1)),
        (40, 40 * WIDTH * 4 + 1, False, (1, 1, 0)),  # no kernel reads memory that is not pinned
    ],
)
def test_the_first_rows_travel_by_it(
    count: int, block_bytes: int, pinned: bool, counts: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, traffic, asked = HostRows((2, 3, ROOM, WIDTH), torch.float32, Place(ELSEWHERE)), Traffic(), list[torch.Size]()
    monkeypatch.setattr("methods.tiers.rows.BLOCK_BYTES", block_bytes)

    def gathered(far: Tensor, chosen: Tensor, held: object, slots: object) -> Tensor:
        asked.append(chosen.shape)
        return torch.empty(*chosen.shape, WIDTH, device=ELSEWHERE)

    monkeypatch.setattr(ops, "gather_tiers", gathered)
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: pinned)
    with Copies() as counted:
        moved = rows.first(count, traffic)
    assert (moved.shape, moved.device) == ((2, 3, count, WIDTH), ELSEWHERE)
    assert traffic.to_device_bytes == moved.nbytes
    assert (len(counted.sizes), counted.collected, len(asked)) == counts
    assert sum(counted.sizes) == (0 if asked else moved.nbytes)
