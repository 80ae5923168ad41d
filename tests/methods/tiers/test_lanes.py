"""Lanes: what they do in which order, behind what, and what they never do."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from methods.tiers.traffic import Traffic
from methods.tiers.transfer.engine import TransferEngine
from methods.tiers.transfer.lanes import INLINE, TransferLane
from tests.methods.tiers.test_transfer_engine import CPU


def test_what_waits_for_something_keeps_nothing_else_waiting() -> None:
    lane, (first, second) = TransferLane("test", 1), (Future[None](), Future[None]())
    late = lane.submit(lambda: "late", after=[first, second])
    assert lane.submit(lambda: "at once").result(10) == "at once"
    first.set_result(None)
    assert not late.done()
    second.set_exception(OSError("it ends all the same"))
    assert late.result(10) == "late"
    lane.close()


def test_what_was_cancelled_before_it_began_is_not_done() -> None:
    lane, going, done = TransferLane("test", 1), threading.Event(), list[str]()
    blocking = lane.submit(lambda: going.wait(10))
    given_up, kept = (lane.submit(lambda name=name: done.append(name)) for name in ("given up", "kept"))  # type: ignore[misc]
    assert given_up.cancel()
    going.set()
    lane.close()
    assert (blocking.result(), kept.done(), done) == (True, True, ["kept"])


def test_closing_waits_for_what_waits_for_something_else() -> None:
    lane, ends, done = TransferLane("test", 1), Future[None](), list[str]()
    late = lane.submit(lambda: done.append("late"), after=[ends])
    given_up = lane.submit(lambda: done.append("given up"), after=[Future()])  # waits for what never ends
    closing = threading.Thread(target=lane.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    ends.set_result(None)
    late.result(10)
    closing.join(0.1)
    assert closing.is_alive()
    assert given_up.cancel()
    closing.join(10)
    assert (closing.is_alive(), done) == (False, ["late"])


def test_without_threads_the_caller_does_it_at_once() -> None:
    lane = INLINE
    assert lane.submit(threading.get_ident).result() == threading.get_ident()

    def fail() -> None:
        raise OSError("the disk is gone")

    assert isinstance(lane.submit(fail).exception(), OSError)


def test_rows_that_nobody_can_wait_for_any_more_do_not_move() -> None:
    engine, going, moved = TransferEngine(threads=1), threading.Event(), list[str]()

    def read(name: str, traffic: Traffic) -> str:
        going.wait(10)
        moved.append(name)
        return name

    first, dropped, last = (
        engine.begin(lambda traffic, name=name: read(name, traffic), Traffic(), CPU, ahead=True)  # type: ignore[misc]
        for name in ("first", "dropped", "last")
    )
    del dropped
    going.set()
    assert (first.wait(), last.wait(), moved) == ("first", "last", ["first", "last"])
    engine.close()


def test_closing_an_engine_drains_all_of_its_lanes() -> None:
    engine, going, done = TransferEngine(), threading.Event(), list[int]()
    lanes = [engine.lane(name, 1) for name in ("read", "write")]
    for number, lane in enumerate(lanes):
        lane.submit(going.wait)
        lane.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    threading.Timer(0.05, going.set).start()
    engine.close()
    assert sorted(done) == [0, 1]


def test_what_is_submitted_behind_a_close_starts_new_threads() -> None:
    lane = TransferLane("test", 1)
    first = lane.submit(threading.current_thread).result(10)
    lane.close()
    assert not first.is_alive()
    second = lane.submit(threading.current_thread).result(10)
    assert second not in (first, threading.current_thread())
    lane.close()
    assert not second.is_alive()
