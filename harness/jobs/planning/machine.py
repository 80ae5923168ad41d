"""What a run finds on its machine: threads, a device, a folder that can be written, and free memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from harness.config.settings import Settings, SettingsError
from harness.models.devices import check_device
from harness.results.files import unwritable

MEMINFO, CGROUPS, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def check_machine(settings: Settings) -> None:
    """Raise `SettingsError` or `DeviceError` for threads, a device or a folder that this machine has not."""
    cpus = os.cpu_count() or 1
    if settings.threads is not None and settings.threads > cpus:
        raise SettingsError(
            f"threads={settings.threads} is too many: this machine has {cpus} CPUs, choose at most {cpus}."
        )
    if settings.device != "auto":
        check_device(settings.device)


def check_results(settings: Settings) -> None:
    """Raise `SettingsError` where no run could be written."""
    if why := unwritable(Path(settings.results.root)):
        raise SettingsError(
            f"results.root={settings.results.root} cannot be written, for {why}: choose another folder."
        )


def free_here(device: str) -> tuple[int | None, int | None]:
    """Return what can be allocated on `device` now, and in host memory where that is another; None: unknown."""
    return free_bytes(device), free_bytes("cpu") if device != "cpu" else None


def free_bytes(device: str) -> int | None:
    """Return what can be allocated on `device` now, by the system and the limits of our control groups; None:
    unknown."""
    if device == "cpu":
        known = [_available(), *_room_in_groups()]
        return min((found for found in known if found is not None), default=None)
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _available() -> int | None:
    for line in _text(MEMINFO).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _room_in_groups() -> Iterator[int]:
    """Yield what is left in each of our control groups. Version 2 has one tree; under version 1 memory is a tree of its
    own. Pages of files can be given back."""
    for line in _text(OWN_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            names = ("memory.max", "memory.current") if not controllers else (
                "memory.limit_in_bytes", "memory.usage_in_bytes",
            )  # fmt: skip
            own = root / path.lstrip("/")
            ours = [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
            yield from (room for folder in ours if (room := _room(folder, *names)) is not None)


def _room(folder: Path, limit: str, usage: str) -> int | None:
    most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not most.isdigit() or not used.isdigit():  # "max": no limit
        return None
    fields = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    cached = int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)
    return int(most) - int(used) + cached


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
