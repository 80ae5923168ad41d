"""Prints how many programs of decode attention a multiprocessor holds, by its rule and as compiled:
`python -m tests.kernels.programs_at_once 80 90 120`.

Llama-3.1-8B's heads in bf16: all of 131,072 tokens, as many of a captured step, and 2048 chosen between sinks and late
ones. The rule says into how many pieces tokens are cut, so that all run at once, and is asked before there is a kernel.
"""

from __future__ import annotations

import sys
from itertools import starmap
from typing import Any

import torch

torch.cuda.is_available = lambda: True

from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from kernels.gpu import common, decode  # noqa: E402
from kernels.reference import Segment  # noqa: E402
from tests.kernels.compile_for_gpus import Driver, Multiprocessors  # noqa: E402
from tests.kernels.machine_code import MachineCode  # noqa: E402

TOKENS = 131_072


class DriverOf(Driver):
    """One device per capability: Triton keeps kernels by device."""

    def get_current_device(self) -> int:
        return self.capability


def steps() -> dict[str, list[Segment]]:
    store = torch.empty(1, 8, TOKENS + 64, 128, dtype=torch.bfloat16)
    live, rows = torch.ones(1, dtype=torch.int64), torch.zeros(1, 8, 2048, dtype=torch.int64)

    def part(first: int, end: int, *which: Any) -> Segment:
        return Segment(store[:, :, first:end], store[:, :, first:end], *which)

    chosen = [part(0, 32), part(32, TOKENS, rows), part(TOKENS, TOKENS + 64, None, live)]
    return {"all": [part(0, TOKENS)], "captured": [part(0, TOKENS + 64, None, live)], "chosen": chosen}


def compared(capability: int, name: str, segments: list[Segment]) -> tuple[str, int, int]:
    """Return a step's name, and how many programs fit by the rule and as compiled."""
    asked: list[tuple[int, ...]] = []
    kernels: list[Any] = []
    places, run = common.places, JITFunction.run

    def noted(*needs: int) -> int:
        asked.append(needs)
        return places(*needs)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    decode.places, JITFunction.run = noted, compile_only
    try:
        decode.segment_attention(torch.empty(1, 32, 1, 128, dtype=torch.bfloat16), segments, 0.1)
    finally:
        decode.places, JITFunction.run = places, run
    programs = MachineCode(kernels[0], capability).programs
    return name, places(*asked[0]) // Multiprocessors.multi_processor_count, programs


def main(words: list[str]) -> None:
    for capability in map(int, words):
        driver.set_active(DriverOf(capability))
        card = Multiprocessors(capability)
        common._device = lambda card=card: card
        counted = (compared(capability, *step) for step in steps().items())
        print(f"sm_{capability}", *starmap("{} {} {}".format, counted), sep=", ")


if __name__ == "__main__":
    main(sys.argv[1:])
