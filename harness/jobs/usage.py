"""What a stretch of work used: backends of operations, peak memory of this process and of its CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch

from kernels import ops

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Usage:
    """Of what runs inside `with`. A peak is null where the system keeps none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backends: dict[str, list[str]] = {}
        self.host_bytes: int | None = None  # the most resident memory of the process
        self.device_bytes: int | None = None  # the most that torch had allocated on the CUDA device; null on the CPU

    def __enter__(self) -> Self:
        ops.forget_used()
        self._knows_host = _reset_host()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        self.backends = ops.used_backends()
        self.host_bytes = _host_peak() if self._knows_host else None
        if self.device.type == "cuda":
            self.device_bytes = torch.cuda.max_memory_allocated(self.device)

    def after(self, earlier: Usage) -> None:
        """Counts what ran before as well."""
        for name, found in earlier.backends.items():
            self.backends[name] = sorted({*self.backends.get(name, ()), *found})
        self.host_bytes = _larger(self.host_bytes, earlier.host_bytes)
        self.device_bytes = _larger(self.device_bytes, earlier.device_bytes)


def _larger(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _reset_host() -> bool:
    """Without a reset, the peak would be that of something earlier."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def _host_peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
