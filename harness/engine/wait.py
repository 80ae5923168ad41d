"""Clocks on a GPU: operations are launched, not done, when a call returns."""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Until all that was launched on `device` is done; at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
