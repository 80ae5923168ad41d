"""Checks a run against its machine: the device, a folder of results that can be written, and enough
free memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.config.settings import Settings, SettingsError
from harness.jobs.memory import MemoryForecast, lacking, size
from harness.models.devices import check_device
from harness.results.files import unwritable
from methods.tiers.tier import DEVICE, HOST

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def check_machine(settings: Settings) -> None:
    """Raise if this machine lacks the device that the settings name, or if the folder of results
    cannot be written."""
    root = settings.results.root
    if settings.device != "auto":
        check_device(settings.device)
    if why := unwritable(Path(root)):
        raise SettingsError(
            f"results.root={root} cannot be written, for {why}: choose another folder."
        )


def free_here(device: str, *, spread: bool = False) -> tuple[int | None, int | None]:
    """Return the free bytes of `device`, or with `spread` of all GPUs, and those of the host if the
    device is a GPU; None where a number is unknown or does not apply."""
    if spread:
        import torch

        each = [free_bytes(f"cuda:{number}") or 0 for number in range(torch.cuda.device_count())]
        return sum(each), free_bytes("cpu")
    return free_bytes(device), free_bytes("cpu") if device != "cpu" else None


def free_bytes(device: str) -> int | None:
    """Return the bytes that can be allocated on `device` now, within the limits of our control
    groups (cgroups); None if unknown."""
    if device != "cpu":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    available = [
        int(line.split()[1]) * 1024 for line in _lines(MEMINFO) if line.startswith("MemAvailable:")
    ]
    return min((*available, *_room_in_groups()), default=None)


def _room_in_groups() -> Iterator[int]:
    """Yield the free bytes of each control group (cgroup, version 1 or 2) that this process is in.
    Cached file pages count as free, because the system takes them back when needed."""
    for line in _lines(OWN_CGROUP):
        _, controllers, path = line.split(":", 2)
        names = {
            "": ("memory.max", "memory.current"),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        }
        if controllers not in names:
            continue
        own = CGROUPS / controllers / path.lstrip("/")
        for folder in (own, *own.parents):
            limit, used = ("".join(_lines(folder / name)) for name in names[controllers])
            # "max": no limit
            if folder.is_relative_to(CGROUPS) and limit.isdigit() and used.isdigit():
                kept = dict(line.split() for line in _lines(folder / "memory.stat"))
                yield (
                    int(limit)
                    - int(used)
                    + int(kept.get("total_inactive_file") or kept.get("inactive_file") or 0)
                )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def refuse(need: MemoryForecast, settings: Settings, free: tuple[int | None, int | None]) -> None:
    """Raise `SettingsError` if a run needs more memory than is `free` now, on its device and on the
    host."""
    if reason := refusal(need, settings, *free):
        raise SettingsError(reason)


def refusal(
    need: MemoryForecast, settings: Settings, free: int | None, free_host: int | None = None
) -> str | None:
    """Return a sentence that says why `need` does not fit into `free` bytes of the device and
    `free_host` bytes of the host, and which settings would help; None if it fits, or if the free
    bytes are unknown."""
    tier = lacking(need, free, free_host)
    if tier is None:
        return None
    if tier == HOST:
        helps = {
            "placement=disk": settings.placement == HOST,
            "a smaller store.host": settings.history == "store",
        }
        needs, there = f"{size(need.host)} of host memory beside {settings.device}", free_host
    else:
        halves = settings.dtype == "fp32"
        fits = need.weights <= (free or 0)  # otherwise nothing but dtype and model helps
        helps = {
            f"dtype=bf16 ({size(need.total // 2)})": halves,
            "a smaller model": need.weights // (1 + halves) > (free or 0),
            "shared_prefill=false, which holds one cache at a time": fits
            and settings.shared_prefill,
            "placement=host": fits
            and settings.batch > 1
            and settings.device != "cpu"
            and settings.placement == DEVICE,
            "a smaller store": fits and settings.history == "store",
            "prefill_chunk=2048": fits
            and settings.prefill_chunk is None
            and need.activations > need.kv,
        }
        needs, there = f"{need} in {settings.dtype}", free
    if tier == HOST or fits:
        helps |= {"a smaller batch": settings.batch > 1, "fewer tokens": True}
    advice = " or ".join(words for words, applies in helps.items() if applies)
    return f"The run needs {needs} but only {size(there or 0)} are free: use {advice}."
