"""Checks that a run fits into memory before weights load: the system would kill it without a word.

Weights, Full's KV cache at its longest and the most that a store of conversations holds are exact; the activations of a
prefill are estimated from below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from harness.config.settings import Settings, SettingsError
from harness.jobs.planning.alignment import shapes
from harness.jobs.planning.items import Item
from harness.models.base import DTYPE_BYTES, ModelInfo
from harness.terminal.tables import BYTES, scaled
from methods.base import Budget, Case, Cost, Method
from methods.tiers import codecs
from methods.tiers.tier import DEVICE, TIERS

MEMINFO, CGROUPS, OWN_CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
STREAMS = 2  # of hidden states that live together in a prefill: the residual and its norm


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run takes on its device."""

    weights: int
    kv: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv, "activations": self.activations}
        return f"{size(self.total)} ({', '.join(f'{name} {size(part)}' for name, part in parts.items())})"


def size(count: int) -> str:
    (value,), unit = scaled([float(count)], BYTES)
    return f"{value} {unit}"


def needed(
    info: ModelInfo,
    settings: Settings,
    items: Sequence[Item],
    *,
    loaded: bool = False,
    beside: Sequence[Settings] = (),
) -> Need:
    """`loaded`: the weights are there already. `beside`: settings of the jobs that share the prefill."""
    stores = (1 + len(beside)) * stored(info, settings, items)
    kv = caches([settings, *beside]) * side_by_side(info, settings, items) + stores
    prompt = max(len(item.prompt.ids) for item in items)
    rows = min(prompt, settings.prefill_chunk or prompt)
    width = STREAMS * info.hidden_size + 2 * (info.num_heads + info.num_kv_heads + 1) * info.head_dim
    weights = 0 if loaded else info.weight_bytes(settings.dtype)
    return Need(weights, kv, rows * width * DTYPE_BYTES[settings.dtype])


def side_by_side(info: ModelInfo, settings: Settings, items: Sequence[Item]) -> int:
    """Bytes of keys and values that `batch` examples hold together, at most, under Full."""
    longest = sorted(item.room for item in items)[-settings.batch :]
    return sum(info.kv_bytes(settings.dtype, tokens) for tokens in longest)


def sealed(settings: Settings, method: Method, budget: Budget | None, info: ModelInfo, items: Sequence[Item]) -> Cost:
    """Bytes that `batch` examples hold in each tier once they are sealed, at most, by the formula of `method`; raises
    `CostError` where it declares none. The layers that slide hold their windows beside."""
    codec = None if settings.codec is None else codecs.codec_of(settings.codec)
    whole = info.num_whole_layers == info.num_layers
    total = Cost(0)
    for item in sorted(items, key=lambda item: item.room)[-settings.batch :]:
        prompt = item.sealed(settings.protocol)[-1]
        how = (settings.placement, DTYPE_BYTES[settings.dtype], item.room - prompt, codec)
        for spec in shapes(info):
            tokens = prompt if budget is None else budget.tokens(prompt, spec.index)
            total += method.cost(Case(spec, prompt, tokens, *how))
        total += Cost(0 if whole else info.kv_bytes(settings.dtype, item.room, slide=True))
    return total


def stored(info: ModelInfo, settings: Settings, items: Sequence[Item]) -> int:
    """Bytes that a store of conversations holds on the device at most; other memory counts where that is the CPU."""
    if settings.history != "store":
        return 0
    sizes = settings.store.capacities
    here = [tier == DEVICE or (settings.device == "cpu" and not TIERS[tier].in_files) for tier in sizes]
    room = sum(compress(sizes.values(), here))
    return min(room, sum(info.kv_bytes(settings.dtype, item.room) for item in items if item.further))


def caches(group: Sequence[Settings]) -> int:
    """KV caches on the device while one prompt is run. Jobs that share a prefill hold one each, and its own is there
    beside them; so is the exact one that fidelity compares with. On a GPU placement=host makes it the host's matter."""
    own = sum(settings.device == "cpu" or settings.placement == DEVICE for settings in group)
    return own + any(settings.shared_prefill or settings.fidelity for settings in group)


def refusal(need: Need, settings: Settings, free: int | None) -> str | None:
    """Why `need` does not fit into `free` bytes and what helps; None where it fits, or where nobody knows."""
    if free is None or need.total <= free:
        return None
    return (
        f"The run needs {need} in {settings.dtype} but only {size(free)} are free on {settings.device}: use "
        f"{' or '.join(_advice(need, settings, free))}; memory_check=off tries anyway."
    )


def refuse(need: Need, settings: Settings) -> None:
    if settings.memory_check == "on" and (reason := refusal(need, settings, free_bytes(settings.device))):
        raise SettingsError(reason)


def _advice(need: Need, settings: Settings, free: int) -> Iterator[str]:
    halves = settings.dtype == "fp32"
    if halves:
        yield f"dtype=bf16 ({size(need.total // 2)})"
    if need.weights > free:
        if need.weights // (1 + halves) > free:
            yield "a smaller model"
        return  # nothing below makes the weights smaller
    if settings.shared_prefill:
        yield "shared_prefill=false, which holds one cache at a time"
    if settings.batch > 1:
        yield "a smaller batch"
    if settings.history == "store":
        yield "a smaller store"
    if settings.device != "cpu" and need.kv:
        yield "placement=host"
    if settings.prefill_chunk is None and need.activations > need.kv:
        yield "prefill_chunk=2048"
    yield "fewer tokens"


def free_bytes(device: str) -> int | None:
    """What can be allocated on `device` now, by the system and the limits of our control groups; None: unknown."""
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
    """Version 2 has one tree; under version 1 memory is a tree of its own. Pages of files can be given back."""
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
