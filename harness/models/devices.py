"""Chooses the device of a model: what `auto` means on this machine, and why a device cannot be
used. Also waits for a device before a clock is read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DRIVER = Path("/proc/driver/nvidia/version")  # its first line names the version
PREFILL_CHUNK = 8192  # tokens of a prompt that pass through a layer at once on a GPU by default
# those of the model that was attached last, if it lies on several GPUs
_several: list[torch.device] = []
NODES = (Path("/dev/nvidia0"), Path("/dev/dxg"))  # device files of a GPU under Linux, and under WSL


class DeviceError(ValueError):
    """Report that the device a user asked for cannot be used; the message says why, and what to do
    instead."""


def choose_device(asked: str) -> str:
    """Return the device that `asked` stands for; `auto` is the GPU if there is one.

    Raises `DeviceError` for `auto` if there is an NVIDIA GPU that torch cannot use: a run that
    silently took the CPU would also take another dtype, and hours."""
    import torch

    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "cuda"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if gpu_is_there() and not hidden:
        raise DeviceError(
            f"This machine has an NVIDIA GPU ({driver()}) that torch cannot use: {why_unusable()}. Install a newer "
            "driver, or a torch built for the one you have (README, Two commands); device=cpu runs without the GPU."
        )
    return "cpu"


def usual_chunk(device: str, dense_prefill: bool = True) -> int | None:
    """Return how many tokens of a prompt pass through a layer at once by default; None: all.

    On a GPU chunks limit the memory that intermediate results take. A method whose prefill is not
    dense attention (`dense_prefill`) would compute something else if its prompt were split, so it
    is split only on request."""
    return PREFILL_CHUNK if device.startswith("cuda") and dense_prefill else None


def check_device(name: str) -> str:
    """Return `name`, if this machine has that device; raise `DeviceError` otherwise."""
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise DeviceError(
            f"device={name} is not supported: use cpu, cuda or cuda:N, or model.device_map=auto for all GPUs."
        )
    if name == "cpu":
        return name
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(match[1] or 0) >= count:
        reason = f" ({why_unusable()})" if not count and gpu_is_there() else ""
        raise DeviceError(
            f"device={name} is not available: torch sees {count} CUDA devices{reason}; use another, or device=cpu."
        )
    return name


def gpu_is_there() -> bool:
    """Return whether the system shows an NVIDIA GPU, even if torch cannot use it."""
    return any(node.exists() for node in (DRIVER, *NODES))


def driver() -> str:
    """Return the version of NVIDIA's kernel driver as words for a message, such as "driver
    550.54"."""
    with suppress(OSError):
        if version := re.search(r"\s(\d+\.[\d.]+)\s", DRIVER.read_text().splitlines()[0]):
            return f"driver {version[1]}"
    return "driver unknown"


def why_unusable() -> str:
    """Return the reason why torch has no CUDA device here, as a sentence without its full stop."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs alone"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__} wants CUDA {torch.version.cuda}; {str(error).split('. ')[0].rstrip('.')}"
    return f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds none"


def note_devices(devices: set[torch.device]) -> None:
    """Remember the devices on which the model lies that is being attached, for clocks and peaks of
    memory from now on."""
    _several[:] = sorted(devices, key=str) if len(devices) > 1 else ()


def parts_of(device: torch.device) -> list[torch.device]:
    """Return all devices of the model that was attached last, whose first weights lie on `device`."""
    return list(_several) or [device]


def current(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the one on which kernels are launched, for work of a layer that lies there."""
    import torch

    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def wait_for(device: torch.device) -> None:
    """Wait until all operations launched on `device`, and on the others of a model that lies on
    several, are done; return at once on a CPU. A GPU's operations are launched, but not done, when a
    call returns."""
    for part in parts_of(device):
        if part.type == "cuda":
            import torch

            torch.cuda.synchronize(part)


def read_later(x: torch.Tensor) -> Callable[[], list[Any]]:
    """Begin to copy `x` to the host. Return a function that waits for this copy, and for nothing
    that is launched on the device after it, and returns the numbers as `Tensor.tolist` does."""
    import torch

    host = x.to("cpu", non_blocking=True, copy=True)  # pinned memory, if x is on a GPU
    if x.device.type != "cuda":
        return host.tolist
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(x.device))

    def read() -> list[Any]:
        done.synchronize()
        return host.tolist()

    return read
