"""Waits for a GPU before a clock is read: its operations are launched, but not done, when a call
returns."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Wait until all operations launched on `device` are done; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
