"""Reads what a compiled Triton kernel asks of a GPU out of its machine code: registers, stack, widths of loads.

The tools that take the code apart, cuobjdump and nvdisasm, come with Triton.
"""

from __future__ import annotations

import re
import subprocess
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
KIB = 1024
# of a multiprocessor, by compute capability: warps, and bytes of shared memory (CUDA C++ programming guide, table 27)
WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
SHARED = {80: 164 * KIB, 89: 100 * KIB, 90: 228 * KIB, 100: 228 * KIB, 120: 100 * KIB}
REGISTERS = 65536
PROGRAMS = 32

NARROW_GLOBAL = re.compile(r"\bLDG\.E\.(U8|S8|U16|S16)\b")
NARROW_SHARED = re.compile(r"\b(LDS|STS)\.(U8|S8|U16|S16)\b")
CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*);")
LABEL = re.compile(r"^(\.L_x_\d+):")
BRANCH = re.compile(r"\bBRA .*`\((\.L_x_\d+)\)")
LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[1, 1\], threadsPerWarp = \[(\d+), \d+\].*order = \[0, 1\]\}>"
)
READ = re.compile(r"(tt\.load|ttg\.local_load) .*, (#\w+)> loc\(")


class MachineCode:
    """What a kernel asks of a multiprocessor, and what its loops read in pieces that are too small.

    Of a kernel without a loop, all instructions count as those of one.
    """

    def __init__(self, kernel: Any, capability: int) -> None:
        """Take a kernel that Triton compiled for this compute capability."""
        self._kernel = kernel
        self.warps: int = kernel.metadata.num_warps
        self.shared: int = kernel.metadata.shared  # bytes of a program
        usage = self._output_of("cuobjdump", "-res-usage")
        self.registers, self.stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
        self.programs = programs_at_a_time(capability, self.warps, self.registers, self.shared)

    @property
    def instructions(self) -> int:
        return len(self._code[0])

    @property
    def looped(self) -> int:
        """Return how many of the instructions stand in a loop."""
        return len(self._code[1])

    @property
    def narrow_global(self) -> int:
        """Return how many loads from global memory fetch one or two bytes."""
        return _count(NARROW_GLOBAL, self._code[1])

    @property
    def narrow_shared(self) -> int:
        """Return how many loads and stores of shared memory move one or two bytes."""
        return _count(NARROW_SHARED, self._code[1])

    @property
    def columns(self) -> int:
        """Return how many tiles a thread reads one number at a time, down a column."""
        return column_reads(self._kernel.asm["ttgir"])

    @cached_property
    def _code(self) -> tuple[list[str], list[str]]:
        code, looped = instructions(self._output_of("nvdisasm", "-ndf", "-c").splitlines())
        return code, looped or code

    def _output_of(self, tool: str, *options: str) -> str:
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self._kernel.asm["cubin"])
            file.flush()
            words = [TOOLS / tool, *options, file.name]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def programs_at_a_time(capability: int, warps: int, registers: int, shared: int) -> int:
    """Return how many programs a multiprocessor holds. Registers are given to warps by 8 a thread, and each program
    takes 1 KiB of shared memory besides its own."""
    by_registers = REGISTERS // (32 * warps * -(-registers // 8) * 8)
    return min(PROGRAMS, WARPS[capability] // warps, by_registers, SHARED[capability] // (shared + KIB))


def instructions(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the instructions of a kernel that nvdisasm has printed, and those of them that stand in a loop: between
    a label and a later branch back to it."""
    code: list[str] = []
    labels: dict[str, int] = {}
    looped: set[int] = set()
    for line in lines:
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := CODE.match(line):
            code.append(found[1])
            branch = BRANCH.search(found[1])
            if branch and branch[1] in labels:
                looped |= {*range(labels[branch[1]], len(code))}
    looped = {at for at in looped if not code[at].startswith("NOP")}
    endless = {at for at, text in enumerate(code) if (to := BRANCH.search(text)) and labels.get(to[1]) == at}
    return code, [code[at] for at in sorted(looped - endless)]


def column_reads(layouts: str) -> int:
    """Count the reads of tiles, in Triton's own form of a kernel, in which the threads of a warp stand in different
    rows and each takes one number: from shared memory without swizzling, all of them then ask the same bank."""
    lines = layouts.splitlines()
    down = {found[1] for line in lines if (found := LAYOUT.match(line)) and int(found[2]) > 1}
    return sum(1 for line in lines if (read := READ.search(line)) and read[2] in down)


def _count(pattern: re.Pattern[str], code: list[str]) -> int:
    return sum(1 for line in code if pattern.search(line))
