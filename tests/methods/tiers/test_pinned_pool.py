"""A pool lends pinned memory to tensors that come and go in any order, and pins none when they come."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
from torch import Tensor

from methods.tiers import pinned_pool
from methods.tiers.pinned_memory import PinnedMemory
from methods.tiers.pinned_pool import PinnedPool, pinned_bytes
from tests.methods.tiers.test_pinned_memory import Pins

KB = 1024


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_pool, "STEP_BYTES", 64 * KB)


def cut(pool: PinnedPool, size: int) -> Tensor:
    return pool.cut((size,), torch.uint8)


def test_it_pins_what_is_expected_in_steps_and_up_to_its_limit() -> None:
    pins = Pins()
    pool = PinnedPool(PinnedMemory(pins), limit=200 * KB)
    for expected, held in (
        (10, [64]),
        (64 * KB - 10, [64]),
        (1, [64, 64]),
        (10**9, [64, 64, 72]),
        (10**9, [64, 64, 72]),
    ):
        pool.expect(expected)
        assert [size // KB for size in pins.held] == held
        assert pool.bytes == sum(pins.held)
    assert (pinned_bytes(1, 10**6), pinned_bytes(64 * KB, 10**6), pinned_bytes(10**6, 5)) == (64 * KB, 64 * KB, 5)


def test_rows_share_no_memory_and_what_is_gone_makes_room() -> None:
    """Cut and let go of at random: no two overlap, and in the end there is room for one as large as a reservation."""
    pins, drawn, held = Pins(), random.Random(0), list[tuple[int, Tensor]]()
    pool = PinnedPool(PinnedMemory(pins), limit=256 * KB)
    pool.expect(256 * KB)
    [reservation] = [memory.data_ptr() for memory in [cut(pool, 256 * KB)]]
    pinned, outside = range(reservation, reservation + 256 * KB), 0
    for number in range(600):
        x = cut(pool, drawn.randrange(1, 16 * KB)).fill_(number % 251)
        outside += x.data_ptr() not in pinned
        held.append((number, x))
        if len(held) > 24:
            for _ in range(drawn.randrange(1, 12)):
                held.pop(drawn.randrange(len(held)))
        assert all(int(one[0]) == int(one[-1]) == at % 251 for at, one in held)
    assert outside < 30
    del x
    held.clear()
    assert cut(pool, 256 * KB).data_ptr() == reservation
    assert pins.made == 1


def test_a_tensor_without_room_lies_in_ordinary_memory_and_nothing_is_pinned_for_it() -> None:
    pins = Pins()
    pool = PinnedPool(PinnedMemory(pins), limit=64 * KB)
    pool.expect(1)
    first, second, none = cut(pool, 40 * KB), cut(pool, 40 * KB), pool.cut((3, 0), torch.float16)
    assert (first.nbytes, second.nbytes, none.shape, pins.made) == (40 * KB, 40 * KB, (3, 0), 1)
    other = PinnedPool(None, limit=64 * KB)
    other.expect(10)
    assert (other.bytes, other.cut((2, 3), torch.bfloat16).shape) == (0, (2, 3))


def test_threads_cut_side_by_side() -> None:
    pool, wrong = PinnedPool(PinnedMemory(Pins()), limit=64 * KB), list[int]()
    pool.expect(1)

    def many(number: int) -> None:
        for _ in range(300):
            held = [cut(pool, size).fill_(number) for size in (100, 700, 3000)]
            wrong.extend(number for x in held if int(x.min()) != number or int(x.max()) != number)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cut(pool, 64 * KB).untyped_storage().nbytes() == 64 * KB


def test_memory_goes_back_once_no_row_lies_there_and_serves_a_cache_then() -> None:
    pins = Pins()
    pinned_memory = PinnedMemory(pins)
    pool = PinnedPool(pinned_memory, limit=128 * KB)
    for _ in range(2):
        pool.expect(64 * KB)
    first, second = cut(pool, 40 * KB), cut(pool, 60 * KB)
    pool.close()
    assert cut(pool, 10).nbytes == 10  # in ordinary memory
    pool.expect(10**6)
    del first
    gc.collect()
    reservation = pinned_memory.reserve([32 * KB])
    assert pins.made == 2
    pinned_memory.close()
    assert len(pins.held) == 2
    del second, reservation
    gc.collect()
    assert pins.held == []
