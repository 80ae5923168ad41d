"""Pinned host memory that is there before its rows come: how much, whom it serves, and when it goes."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from methods.tiers import pinned_memory as pinned
from methods.tiers.pinned_memory import PinnedMemory, PinnedPool, PinnedReservation, registered, reservation_bytes
from methods.tiers.rows import HostRows, Place
from methods.tiers.traffic import Traffic

CPU = torch.device("cpu")


class Pins:
    """Counts what would be pinned."""

    def __init__(self) -> None:
        self.held = list[int]()
        self.made = 0

    def __call__(self, memory: Tensor) -> Callable[[], None]:
        assert memory.data_ptr() % 4096 == 0
        assert memory.nbytes  # else cudaHostRegister says "invalid argument"
        self.made += 1
        self.held.append(memory.nbytes)
        return lambda: self.held.remove(memory.nbytes)


def rows(reservation: PinnedReservation, layer: int, count: int) -> HostRows:
    return HostRows((1, 2, count, 8), torch.float32, Place(CPU, None, reservation.regions[layer]))


def test_nothing_is_registered_for_rows_of_no_bytes() -> None:
    """As those of a prompt that a method keeps whole on the device."""
    assert 3 * 2**30 <= reservation_bytes([2**30] * 3) <= 3 * 2**30 + 2**13  # not rounded to a power of two
    pins = Pins()
    pinned_memory = PinnedMemory(pins)
    reservation, (memory, _) = pinned_memory.reserve([0, 0]), pinned_memory.lend(0)
    assert (pins.made, memory.nbytes, reservation.memory.nbytes, reservation.spare({})) == (0, 0, 0, 0)
    assert rows(reservation, 1, 0).stored.shape == (1, 2, 0, 8)
    pinned_memory.close()


def test_a_layer_starts_anew_once_its_rows_are_gone_and_what_has_no_room_takes_other_memory() -> None:
    reservation = PinnedMemory(Pins()).reserve([64 * 30])
    first = rows(reservation, 0, 30)
    place, beside = first.stored.data_ptr(), rows(reservation, 0, 20)
    assert reservation.regions[0].cut((20, 16), torch.float32) is None
    del first, beside
    gc.collect()
    assert rows(reservation, 0, 25).stored.data_ptr() == place


def test_a_slab_serves_one_cache_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = Pins()
    pinned_memory = PinnedMemory(pins)
    reservation = pinned_memory.reserve([6400])
    held = rows(reservation, 0, 100)
    del reservation
    gc.collect()
    other = pinned_memory.reserve([6400])  # rows are still in the first
    assert pins.made == 2
    del other, held
    gc.collect()
    smaller, same = pinned_memory.reserve([3200]), pinned_memory.reserve([6400])
    assert pins.made == 2
    del smaller, same
    gc.collect()
    larger = pinned_memory.reserve([64000])
    assert pins.held == [reservation_bytes([64000])]  # what was too small is unpinned first
    pinned_memory.close()
    with monkeypatch.context() as patch:
        for name in ("is_initialized", "is_current_stream_capturing"):  # where nothing may wait for the device
            patch.setattr(torch.cuda, name, lambda: True)
        del larger
        gc.collect()
        assert pins.held == [reservation_bytes([64000])]
    pinned_memory.close()
    assert pins.held == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_a_gpu_reads_registered_memory_in_place() -> None:
    device, pinned_memory = torch.device("cuda"), PinnedMemory()
    reservation = pinned_memory.reserve([64 * 2 * 8 * 4])
    held = HostRows((1, 2, 64, 8), torch.float32, Place(device, None, reservation.regions[0]))
    assert held.stored.is_pinned()
    x = torch.randn(1, 2, 64, 8)
    held.take(x, 0)
    chosen = torch.randint(64, (1, 2, 5), device=device)
    at = chosen.cpu().unsqueeze(3).expand(-1, -1, -1, 8)
    assert torch.equal(held.gather(chosen, Traffic()).cpu(), x.gather(2, at))
    assert torch.equal(held.first(40, Traffic()).cpu(), x[:, :, :40])
    del held, reservation
    pinned_memory.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_an_error_of_a_gpu_is_not_left_for_the_next_call() -> None:
    with pytest.raises(RuntimeError, match="pin 0 bytes"):
        registered(torch.empty(0, dtype=torch.uint8))
    assert torch.ones(4, device="cuda").sum().item() == 4


KB = 1024


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "STEP_BYTES", 64 * KB)


def cut(pool: PinnedPool, size: int) -> Tensor:
    return pool.cut((size,), torch.uint8)


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
