"""Peak memory of this process and of its CUDA device, per example."""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMeter:
    """`start` resets the peaks; `host_bytes` and `device_bytes` read them. Null before `start`, and where the
    system keeps none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = self._device = False

    def start(self) -> None:
        try:
            _RESET.write_text("5")
            self._host = True
        except OSError:  # without a reset, the peak would be that of an earlier example
            self._host = False
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._device = True

    @property
    def host_bytes(self) -> int | None:
        """The most resident memory of the process since `start`."""
        if not self._host:
            return None
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    @property
    def device_bytes(self) -> int | None:
        """The most memory torch had allocated on the CUDA device since `start`; null on the CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self._device else None
