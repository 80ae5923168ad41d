"""How rows travel from host memory to the device: by the size and the number of their pieces, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import ops
from methods.tiers.rows import HostRows, Place
from methods.tiers.traffic import Traffic
from methods.tiers.transfer.copy_strategy import CopyStrategy, copy_strategy
from tests.dispatched import DispatchRecorder

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
    ("pieces", "size", "in_place", "how"),
    [
        (1, 10, True, CopyStrategy.BLOCKS),
        (1, 10, False, CopyStrategy.BLOCKS),
        (2, 100, True, CopyStrategy.BLOCKS),
        (2, 100, False, CopyStrategy.BLOCKS),
        (2, 99, True, CopyStrategy.KERNEL),
        (2, 99, False, CopyStrategy.COLLECTED),
        (0, 0, False, CopyStrategy.COLLECTED),
    ],
)
def test_the_rule(pieces: int, size: int, in_place: bool, how: CopyStrategy) -> None:
    assert copy_strategy(pieces, size, 100, in_place=in_place) is how


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


def test_beside_a_cpu_nothing_is_copied() -> None:
    rows = HostRows((2, 3, ROOM, WIDTH), torch.float32, Place(torch.device("cpu")))
    rows.take(torch.randn(2, 3, ROOM, WIDTH), 0)
    assert rows.first(40, Traffic()).untyped_storage().data_ptr() == rows.stored.untyped_storage().data_ptr()
