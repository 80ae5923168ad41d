"""Forecasts the bytes of a run, and checks that they fit before weights load: the system would kill it without a word.

They are counted where they are most: while a chunk of the longest prompt passes through a layer, or a layer seals, with
the other examples of a batch sealed beside it, or while a step brings rows. What layers hold is in cache_bytes.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from harness.config.settings import WRITE_BUFFER, Settings, SettingsError
from harness.jobs.planning.cache_bytes import (
    CacheBytes,
    CacheSpec,
    PeakBytes,
    States,
    by_blocks,
    cache_bytes,
    cases,
    slots_of,
    steps_captured,
    steps_together,
)
from harness.jobs.planning.examples import PreparedExample
from harness.jobs.planning.machine import free_here
from harness.models.base import DTYPE_BYTES, ModelInfo, torch_dtype
from harness.terminal.tables import BYTES, scaled
from kernels.block import TOKENS_AT_ONCE, fits_compiled
from kernels.step_inputs import MOST_KEPT_BYTES
from methods.base import Cost
from methods.tiers.pinned_memory import pinned_bytes
from methods.tiers.tier import DEVICE, HOST

MOST_SEQUENCES = 4096  # that are looked for to fit together


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes that a run takes on its device when they are most, and in host memory beside a GPU. `kv`: what layers hold
    which have sealed, and keys and values of the prompt in the others; `method`: what these take beside; `activations`
    are 0 where most is held behind the prefill."""

    weights: int
    kv: int
    activations: int
    method: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.method

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv, "activations": self.activations}
        parts["the method's own"] = self.method
        beside = f" and {size(self.host)} of host memory" if self.host else ""
        told = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part)
        return f"{size(self.total)} ({told}){beside}"


def size(count: int) -> str:
    (value,), unit = scaled([float(count)], BYTES)
    return f"{value} {unit}"


def needed(
    info: ModelInfo,
    cache_spec: CacheSpec,
    items: Sequence[PreparedExample],
    *,
    loaded: bool = False,
    beside: Sequence[CacheSpec] = (),
) -> MemoryForecast:
    """Forecast the bytes of a run. `loaded`: the weights are there already. `beside`: the jobs that share the
    prefill."""
    settings, cache_specs = cache_spec.settings, [cache_spec, *beside]
    running, states = _longest(items, settings.batch), states_of(info, settings, _prompt(items))
    of_jobs = []
    for one in cache_specs:
        known = {id(item): cache_bytes(one, info, item, states) for item in running}  # the same one may stand often
        of_jobs.append([known[id(item)] for item in running])
    on_cpu = settings.device == "cpu"
    moments = _shared(of_jobs) if settings.shared_prefill else _alone(of_jobs[0], settings)
    more = stored(info, settings, items) * len(cache_specs)
    # Jobs that share a prefill have Full's own cache beside them; fidelity compares with an exact one
    if any(one.settings.shared_prefill or one.settings.fidelity for one in cache_specs):
        more += side_by_side(info, settings, items)
    host = max(sum(cache.host for cache in of_job) for of_job in of_jobs)
    host += 0 if on_cpu else max(cache.staging.gathered for of_job in of_jobs for cache in of_job)
    host += stored(info, settings, items, host=True) * len(cache_specs)
    weights = 0 if loaded else info.weight_bytes(settings.dtype)
    most = max(moments, key=lambda moment: moment.total)
    return MemoryForecast(weights, most.kv + more, most.states, most.kept + most.more, host)


def needed_by(
    info: ModelInfo, cache_spec: CacheSpec, item: PreparedExample, count: int, *, loaded: bool = False
) -> MemoryForecast:
    """Return what `count` sequences like `item` take that run together."""
    together = cache_spec._replace(settings=replace(cache_spec.settings, batch=count))
    return needed(info, together, [item] * count, loaded=loaded)


def largest_batch(
    info: ModelInfo,
    cache_spec: CacheSpec,
    item: PreparedExample,
    free: int | None,
    free_host: int | None = None,
    *,
    loaded: bool = False,
) -> tuple[int, str]:
    """Return how many sequences like `item` fit into `free` bytes of the device and `free_host` of the host, at most
    MOST_SEQUENCES, and which of the two ends there. Unknown memory holds all."""

    def ended(count: int) -> str | None:
        return lacking(needed_by(info, cache_spec, item, count, loaded=loaded), free, free_host)

    most = bisect_left(range(1, MOST_SEQUENCES + 1), True, key=lambda count: ended(count) is not None)
    return most, ended(most + 1) or DEVICE


def lacking(need: MemoryForecast, free: int | None, free_host: int | None = None) -> str | None:
    """Return which memory is too small, the device's or the host's; None where both hold `need`, or nobody knows."""
    if free is not None and need.total > free:
        return DEVICE
    return HOST if free_host is not None and need.host > free_host else None


def _alone(caches: Sequence[CacheBytes], settings: Settings) -> list[PeakBytes]:
    """Return the peaks of a run by itself: the last of these caches is filled with the others there, which are sealed
    and have taken a step together; or all take one, in each layer together or one after the other."""
    *others, longest = caches
    sealed = sum(cache.sealed for cache in others)
    before = _stepping(others, settings, whole=steps_captured(settings)) if others else 0
    return [
        longest.prefill._replace(kv=longest.prefill.kv + sealed, more=longest.prefill.more + before),
        longest.seal._replace(kv=longest.seal.kv + sealed, more=longest.seal.more + before),
        PeakBytes(longest.sealed + sealed, 0, _stepping(caches, settings, whole=True), 0),
    ]


def _stepping(caches: Sequence[CacheBytes], settings: Settings, *, whole: bool) -> int:
    """Return the bytes that a step of these sequences takes; without `whole` those that stay after it. Who steps
    together has as much room as the longest each. Captured steps of half as many sequences, of a quarter, and so on,
    stay beside."""
    *_, longest = caches
    on_cpu, free = settings.device == "cpu", slots_of(settings, len(caches)) - len(caches)
    joint = sum(cache.joint for cache in caches) + free * longest.joint
    taken = joint + sum(cache.staging.arriving for cache in caches) + free * longest.staging.arriving
    if whole:
        read = max(cache.staging.read + (cache.staging.gathered if on_cpu else 0) for cache in caches)
        taken += read * (len(caches) + free if steps_together(settings) else 1)
    if steps_captured(settings) and len(caches) > 1:
        taken += min(joint, MOST_KEPT_BYTES)
    return taken


def _shared(of_jobs: Sequence[Sequence[CacheBytes]]) -> list[PeakBytes]:
    """Return the peaks of jobs that share a prefill: nothing is sealed before all is prefilled."""
    caches = [cache for of_job in of_jobs for cache in of_job]
    kv, kept = (sum(getattr(cache.prefill, name) for cache in caches) for name in ("kv", "kept"))
    return [
        PeakBytes(kv, kept, max(moment.more for moment in moments), moments[0].states)
        for moments in ([cache.prefill for cache in caches], [cache.seal for cache in caches])
    ]


def states_of(info: ModelInfo, settings: Settings, prompt: int) -> States:
    """Return the hidden states of a prompt of so many tokens. Layer by layer, those of all its chunks are there, and
    their angles; a model that runs its own forward has those of one chunk."""
    rows = min(prompt, settings.prefill_chunk or prompt)
    waiting = prompt - rows if by_blocks(info) else 0
    angles, size = 2 * info.head_dim * (rows + waiting), DTYPE_BYTES[settings.dtype]
    passing = _in_layer(info, settings, rows) + waiting * info.hidden_size + angles
    return States(passing * size, ((rows + waiting) * info.hidden_size + angles) * size)


def _in_layer(info: ModelInfo, settings: Settings, rows: int) -> int:
    """Return how many numbers there are while so many tokens pass through a layer: in attention the residual, its norm,
    queries, keys, values and what they attend to live together; around the MLP two residuals and what was attended
    to."""
    hidden, heads, groups = info.hidden_size, info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    return max(rows * 2 * (hidden + heads + groups), rows * (2 * hidden + heads) + _in_mlp(info, settings, rows))


def _in_mlp(info: ModelInfo, settings: Settings, rows: int) -> int:
    """Return how many numbers an MLP holds between its products: of some tokens at once, or of all where the model runs
    its own forward, which an expert of GPT-OSS takes in nine steps."""
    hidden, inner = info.hidden_size, info.inner_size
    if not by_blocks(info):
        return rows * (info.chosen_experts * (hidden + 9 * inner) or hidden + 3 * inner)
    widths = (info.num_heads * info.head_dim, hidden, info.num_kv_heads * info.head_dim)
    dtype = torch_dtype(settings.dtype)
    compiled = settings.device == "cpu" and fits_compiled(widths, inner, dtype) and _multiplies_fast(dtype)
    at_once = (0 if compiled else TOKENS_AT_ONCE["cpu"]) if settings.device == "cpu" else TOKENS_AT_ONCE["cuda"]
    return min(rows, at_once) * (3 * hidden + 2 * inner)


def _multiplies_fast(dtype: torch.dtype) -> bool:
    """Say whether compiled products of a prompt are taken on this CPU."""
    try:
        from kernels.cpu.block import FAST  # which builds compiled code
    except ImportError:
        return False
    return FAST.get(dtype, False)


def _longest(items: Sequence[PreparedExample], count: int) -> list[PreparedExample]:
    return sorted(items, key=lambda item: item.room)[-count:]


def _prompt(items: Sequence[PreparedExample]) -> int:
    return max(len(item.prompt.ids) for item in items)


def side_by_side(info: ModelInfo, settings: Settings, items: Sequence[PreparedExample]) -> int:
    """Return the bytes of keys and values that `batch` examples hold together, at most, under Full."""
    return sum(info.kv_bytes(settings.dtype, item.room) for item in _longest(items, settings.batch))


def sealed(cache_spec: CacheSpec, info: ModelInfo, items: Sequence[PreparedExample]) -> Cost:
    """Return the bytes that `batch` examples hold in each tier once they are sealed, at most, by the formula of the
    method; raises `CostError` where it declares none. The layers that slide hold their windows beside."""
    settings, total = cache_spec.settings, Cost(0)
    whole = info.num_whole_layers == info.num_layers
    for item in _longest(items, settings.batch):
        total += Cost(0 if whole else info.kv_bytes(settings.dtype, item.room, slide=True))
        for case in cases(cache_spec, info, item):
            total += cache_spec.method.cost(case)
    return total


def stored(info: ModelInfo, settings: Settings, items: Sequence[PreparedExample], *, host: bool = False) -> int:
    """Return the bytes that a store of conversations holds on a CPU at most, or with `host` those that it pins in host
    memory for a GPU."""
    on_cpu = settings.device == "cpu"
    if settings.history != "store" or host == on_cpu:
        return 0
    expected, room = of_conversations(info, settings, items), settings.store.capacities[HOST]
    return min(expected, room) if on_cpu else pinned_bytes(expected, room + WRITE_BUFFER)


def of_conversations(info: ModelInfo, settings: Settings, items: Iterable[PreparedExample]) -> int:
    """Return the bytes of all keys and values of those that are kept between turns."""
    return sum(info.kv_bytes(settings.dtype, item.room) for item in items if item.further)


def refusal(need: MemoryForecast, settings: Settings, free: int | None, free_host: int | None = None) -> str | None:
    """Return why `need` does not fit into `free` bytes of the device, and `free_host` of the host, and what helps; None
    where it fits, or where nobody knows."""
    tier = lacking(need, free, free_host)
    if tier == DEVICE:
        assert free is not None
        return (
            f"The run needs {need} in {settings.dtype} but only {size(free)} are free on {settings.device}: use "
            f"{' or '.join(_advice(need, settings, free))}."
        )
    if tier == HOST:
        assert free_host is not None
        helps = [
            *(["placement=disk"] if settings.placement == HOST else []),
            *(["a smaller store.host"] if settings.history == "store" else []),
            "a smaller batch" if settings.batch > 1 else "fewer tokens",
        ]
        return (
            f"The run needs {size(need.host)} of host memory beside {settings.device} but only {size(free_host)} are "
            f"free: use {' or '.join(helps)}."
        )
    return None


def refuse(need: MemoryForecast, settings: Settings) -> None:
    if reason := refusal(need, settings, *free_here(settings.device)):
        raise SettingsError(reason)


def _advice(need: MemoryForecast, settings: Settings, free: int) -> Iterator[str]:
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
        if settings.device != "cpu" and settings.placement == DEVICE:
            yield "placement=host"  # of the others: one that is prefilled lies on the device
    if settings.history == "store":
        yield "a smaller store"
    if settings.prefill_chunk is None and need.activations > need.kv:
        yield "prefill_chunk=2048"
    yield "fewer tokens"
