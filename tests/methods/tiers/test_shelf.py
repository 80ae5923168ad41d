"""A shelf lends pinned memory to tensors that come and go in any order, and pins none when they come."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch
from torch import Tensor

from methods.tiers import shelf as shelves
from methods.tiers.shelf import Shelf, pinned_bytes
from methods.tiers.slabs import Slabs
from tests.methods.tiers.test_slabs import Pins

KB = 1024


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelves, "STEP_BYTES", 64 * KB)


def cut(shelf: Shelf, size: int) -> Tensor:
    return shelf.cut((size,), torch.uint8)


def test_it_pins_what_is_expected_in_steps_and_up_to_its_limit() -> None:
    pins = Pins()
    shelf = Shelf(Slabs(pins), limit=200 * KB)
    for expected, held in (
        (10, [64]),
        (64 * KB - 10, [64]),
        (1, [64, 64]),
        (10**9, [64, 64, 72]),
        (10**9, [64, 64, 72]),
    ):
        shelf.expect(expected)
        assert [size // KB for size in pins.held] == held
        assert shelf.bytes == sum(pins.held)
    assert (pinned_bytes(1, 10**6), pinned_bytes(64 * KB, 10**6), pinned_bytes(10**6, 5)) == (64 * KB, 64 * KB, 5)


def test_rows_share_no_memory_and_what_is_gone_makes_room() -> None:
    """Cut and let go of at random: no two overlap, and in the end there is room for one as large as a slab."""
    pins, drawn, held = Pins(), random.Random(0), list[tuple[int, Tensor]]()
    shelf = Shelf(Slabs(pins), limit=256 * KB)
    shelf.expect(256 * KB)
    [slab] = [memory.data_ptr() for memory in [cut(shelf, 256 * KB)]]
    pinned, outside = range(slab, slab + 256 * KB), 0
    for number in range(600):
        x = cut(shelf, drawn.randrange(1, 16 * KB)).fill_(number % 251)
        outside += x.data_ptr() not in pinned
        held.append((number, x))
        if len(held) > 24:
            for _ in range(drawn.randrange(1, 12)):
                held.pop(drawn.randrange(len(held)))
        assert all(int(one[0]) == int(one[-1]) == at % 251 for at, one in held)
    assert outside < 30
    del x
    held.clear()
    assert cut(shelf, 256 * KB).data_ptr() == slab
    assert pins.made == 1


def test_a_tensor_without_room_lies_in_ordinary_memory_and_nothing_is_pinned_for_it() -> None:
    pins = Pins()
    shelf = Shelf(Slabs(pins), limit=64 * KB)
    shelf.expect(1)
    first, second, none = cut(shelf, 40 * KB), cut(shelf, 40 * KB), shelf.cut((3, 0), torch.float16)
    assert (first.nbytes, second.nbytes, none.shape, pins.made) == (40 * KB, 40 * KB, (3, 0), 1)
    other = Shelf(None, limit=64 * KB)
    other.expect(10)
    assert (other.bytes, other.cut((2, 3), torch.bfloat16).shape) == (0, (2, 3))


def test_threads_cut_side_by_side() -> None:
    shelf, wrong = Shelf(Slabs(Pins()), limit=64 * KB), list[int]()
    shelf.expect(1)

    def many(number: int) -> None:
        for _ in range(300):
            held = [cut(shelf, size).fill_(number) for size in (100, 700, 3000)]
            wrong.extend(number for x in held if int(x.min()) != number or int(x.max()) != number)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cut(shelf, 64 * KB).untyped_storage().nbytes() == 64 * KB


def test_memory_goes_back_once_no_row_lies_there_and_serves_a_cache_then() -> None:
    pins = Pins()
    slabs = Slabs(pins)
    shelf = Shelf(slabs, limit=128 * KB)
    for _ in range(2):
        shelf.expect(64 * KB)
    first, second = cut(shelf, 40 * KB), cut(shelf, 60 * KB)
    shelf.close()
    assert cut(shelf, 10).nbytes == 10  # in ordinary memory
    shelf.expect(10**6)
    del first
    gc.collect()
    slab = slabs.slab([32 * KB])
    assert pins.made == 2
    slabs.close()
    assert len(pins.held) == 2
    del second, slab
    gc.collect()
    assert pins.held == []
