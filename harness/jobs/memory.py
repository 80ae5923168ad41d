"""Forecasts the bytes of a run, and refuses before weights load what does not fit: the system would kill it without a
word.

The bytes of one example come from the formula of its method (`Method.cost`), else from Full's. A layer takes memory
when the prompt reaches it. Where rows leave the device, a layer seals as soon as the prompt is through it, so that one
layer at a time holds the whole prompt; where they stay, all layers seal after the prefill. What prefill, seal and steps
take for a moment is a margin.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from harness.config.settings import WRITE_BUFFER, Settings
from harness.jobs.alignment import shapes
from harness.jobs.examples import PreparedExample
from harness.jobs.resolve import codec_of
from harness.models.base import ARCHITECTURES, DTYPE_BYTES, ModelInfo
from harness.terminal.tables import BYTES, scaled
from kernels.block import TOKENS_AT_ONCE
from kernels.rope import table_bytes
from kernels.windowed import queries_at_once
from methods.abilities import ability
from methods.abilities.repeat import Repeat
from methods.base import Budget, Cost, CostError, LayerWorkload, Method
from methods.tiers.pinned_memory import pinned_bytes, reservation_bytes
from methods.tiers.tier import DEVICE, HOST, TIERS

MOST_SEQUENCES = 4096  # that are looked for to fit together
# What prefill, seal and steps take for a moment is a margin: a share of caches and hidden states, some layers' keys and
# values where a method with a budget seals them or a step brings them to the device, and a constant for work on a block
# of queries. On the CPU it was enough for every method of conf/method, with two small models, prompts of 2,400 and
# 2,800 tokens in one and in ten chunks, and rows on the device and in host memory; only presses of kvpress took more,
# on the model of four layers. For Llama 3.1 8B at 4,096 to 131,072 tokens it covers formulas that were held to
# measurements within 10 %, except that of ShadowKV at large budgets, whose hit caches a step of several sequences
# copies: such a batch may not fit, and its examples then run alone.
SHARE, LAYERS, CONSTANT = 0.1, 2, 16 * 2**20


def size(count: int) -> str:
    (value,), unit = scaled([float(count)], BYTES)
    return f"{value} {unit}"


class CacheSpec(NamedTuple):
    """Holds all that determines the size of a job's caches."""

    settings: Settings
    method: Method
    budget: Budget | None


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """The bytes of a run at its peak, on its device and (with a GPU) in host memory. `kv`: the keys
    and values of the prompt in layers that the method has not digested yet, and what sealed layers
    hold; `activations`: 0 where the peak comes after the prefill; `margin`: what is taken for a
    moment."""

    weights: int
    kv: int
    activations: int
    margin: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.margin

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "KV cache": self.kv,
            "activations": self.activations,
            "margin": self.margin,
        }
        named = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part)
        return f"{size(self.total)} ({named})" + (
            f" and {size(self.host)} of host memory" if self.host else ""
        )


def needed(
    info: ModelInfo,
    cache_spec: CacheSpec,
    items: Sequence[PreparedExample],
    *,
    loaded: bool = False,
    beside: Sequence[CacheSpec] = (),
) -> MemoryForecast:
    """Forecast the peak bytes of a run over `items`. `loaded`: the weights are in memory already
    and are not counted. `beside`: the jobs that share the prefill with this one."""
    settings, specs = cache_spec.settings, [cache_spec, *beside]
    running = _longest(items, settings.batch)
    longest = max(len(item.prompt.ids) for item in items)
    states = max(_states(info, spec, longest) for spec in specs)
    caches = []  # by job, of each example that runs
    for spec in specs:
        distinct = {id(item): item for item in running}  # one may stand there often
        known = {key: cache_bytes(spec, info, item) for key, item in distinct.items()}
        caches.append([known[id(item)] for item in running])
    # the prompt of the last example of the batch comes while the caches of the others are there, or
    # all take a decode step
    *others, last = caches[0]
    sealed = sum(cache.sealed for cache in others)
    peaks = [(last.filled + sealed, states), (last.sealed + sealed, 0)]
    # nothing is sealed before the whole prompt is prefilled, for all jobs
    if settings.shared_prefill:
        peaks = [(sum(cache.filled for of_job in caches for cache in of_job), states)]
    kv, activations = max(peaks, key=sum)
    more = stored_bytes(info, settings, items) * len(specs)
    if settings.shared_prefill or any(spec.settings.fidelity for spec in specs):
        # of Full's own cache, which fills the others or is compared with
        more += full_bytes(info, settings, items)
        more += len(running) * info.state_bytes(settings.dtype)
    # of the joint states with which several sequences take a step
    if len(running) > 1:
        more += len(running) * info.state_bytes(settings.dtype)
    # cos and sin of all positions, where steps take theirs
    if settings.graphs == "on" and _by_blocks(info):
        more += table_bytes(info.trained_window, info.rotary_dim, DTYPE_BYTES[settings.dtype])
    host = max(sum(cache.host for cache in of_job) for of_job in caches)
    host += stored_bytes(info, settings, items, host=True) * len(specs)
    weights = 0 if loaded else info.weight_bytes(settings.dtype)
    widest = max(cache.widest for of_job in caches for cache in of_job)
    brought = max(sum(cache.brought for cache in of_job) for of_job in caches)
    margin = int(SHARE * (kv + activations)) + LAYERS * (widest + brought) + CONSTANT
    margin += _in_plain_torch(info, longest)
    return MemoryForecast(weights, kv + more, activations, margin, host)


def needed_by(
    info: ModelInfo,
    cache_spec: CacheSpec,
    item: PreparedExample,
    count: int,
    *,
    loaded: bool,
) -> MemoryForecast:
    """Forecast the peak bytes of `count` sequences like `item` that run together. `loaded`: the
    weights are in memory already and are not counted."""
    together = cache_spec._replace(settings=replace(cache_spec.settings, batch=count))
    return needed(info, together, [item] * count, loaded=loaded)


def largest_batch(
    info: ModelInfo,
    cache_spec: CacheSpec,
    item: PreparedExample,
    free: int | None,
    free_host: int | None,
    *,
    loaded: bool = False,
) -> tuple[int, str]:
    """Return how many sequences like `item` fit into `free` bytes of the device and `free_host` of
    the host, and the tier that is full first. Where the free bytes are unknown (None), all fit."""

    def ended(count: int) -> str | None:
        return lacking(needed_by(info, cache_spec, item, count, loaded=loaded), free, free_host)

    most = bisect_left(
        range(1, MOST_SEQUENCES + 1), True, key=lambda count: ended(count) is not None
    )
    return most, ended(most + 1) or DEVICE


def lacking(need: MemoryForecast, free: int | None, free_host: int | None) -> str | None:
    """Return the tier that is too small for `need`, the device or the host; None if both suffice,
    or if their free bytes are unknown."""
    if free is not None and need.total > free:
        return DEVICE
    return HOST if free_host is not None and need.host > free_host else None


def full_bytes(info: ModelInfo, settings: Settings, items: Sequence[PreparedExample]) -> int:
    """Return the bytes of the keys and values of the `batch` longest examples under Full, which
    keeps them all."""
    return sum(info.kv_bytes(settings.dtype, item.room) for item in _longest(items, settings.batch))


def sealed_cost(cache_spec: CacheSpec, info: ModelInfo, items: Sequence[PreparedExample]) -> Cost:
    """Return what the caches of the `batch` longest examples hold in each tier (device, host, disk)
    after the seal, when the method has digested the prompt, by the method's own formula. Raise
    `CostError` if the method declares none."""
    settings, total = cache_spec.settings, Cost(0)
    for item in _longest(items, settings.batch):
        total += Cost(_sliding_bytes(info, settings, item))
        for case in _workloads(cache_spec, info, item):
            total += cache_spec.method.cost(case)
    return total


def conversation_bytes(
    info: ModelInfo, settings: Settings, items: Iterable[PreparedExample]
) -> int:
    """Return the bytes of the keys and values, and states, of all examples with several turns, whose
    caches are kept between turns."""
    rooms = [item.room for item in items if item.further]
    states = len(rooms) * info.state_bytes(settings.dtype)
    return states + sum(info.kv_bytes(settings.dtype, room) for room in rooms)


def stored_bytes(
    info: ModelInfo, settings: Settings, items: Sequence[PreparedExample], *, host: bool = False
) -> int:
    """Return the most bytes of memory that the store of conversations (history=store) takes: on a
    CPU run those of its host tier, or with `host` those that it pins in host memory beside a
    GPU."""
    on_cpu = settings.device == "cpu"
    if settings.history != "store" or host == on_cpu:
        return 0
    expected, room = conversation_bytes(info, settings, items), settings.store.capacities[HOST]
    return min(expected, room) if on_cpu else pinned_bytes(expected, room + WRITE_BUFFER)


def _longest(items: Sequence[PreparedExample], count: int) -> list[PreparedExample]:
    distinct = {id(item): item for item in items}  # one may stand there thousands of times
    rooms = {key: item.room for key, item in distinct.items()}
    return sorted(items, key=lambda item: rooms[id(item)])[-count:]


def _sliding_bytes(info: ModelInfo, settings: Settings, item: PreparedExample) -> int:
    """Return the bytes that sliding-window layers hold, which no method serves."""
    return (
        info.kv_bytes(settings.dtype, item.room, slide=True)
        if info.num_whole_layers < info.num_layers
        else 0
    )


class CacheBytes(NamedTuple):
    """The bytes of one example's cache and states, and of what passes through the device."""

    filled: int  # on the device, the most while its prompt comes and is sealed
    sealed: int  # on the device
    host: int  # beside a GPU
    brought: int  # the most that a decode step brings to the device for one layer
    widest: int  # keys and values of the largest layer that a method with a budget seals


def cache_bytes(cache_spec: CacheSpec, info: ModelInfo, item: PreparedExample) -> CacheBytes:
    """Return the bytes of one example's cache."""
    settings, method = cache_spec.settings, cache_spec.method
    on_cpu = settings.device == "cpu"
    cases = _workloads(cache_spec, info, item)
    try:
        costs = [method.cost(case) for case in cases]
    except CostError:
        costs = [Cost(case.dense_bytes) for case in cases]
    near = [tier for tier in TIERS if tier == DEVICE or (on_cpu and not TIERS[tier].in_files)]
    sealed = [sum(cost.held[tier] for tier in near) for cost in costs]
    growth = [max(case.dense_bytes - size, 0) for case, size in zip(cases, sealed, strict=True)]
    early = settings.placement != DEVICE and _by_blocks(info) and not settings.shared_prefill
    held = sum(sealed) + _sliding_bytes(info, settings, item) + info.state_bytes(settings.dtype)
    return CacheBytes(
        held + (max(growth) if early else sum(growth)),
        held,
        0 if on_cpu else _pinned(cache_spec, info, item),
        brought=max(cost.moved_bytes_per_step for cost in costs),
        widest=max(case.dense_bytes for case in cases) if cache_spec.budget else 0,
    )


def _workloads(
    cache_spec: CacheSpec, info: ModelInfo, item: PreparedExample, sealed: int | None = None
) -> list[LayerWorkload]:
    """Return one `LayerWorkload` per layer, from which `Method.cost` computes the bytes of that
    layer's cache: the state after the seal of the last turn, or after a seal of `sealed` tokens.
    (At the seal, the method digests the prompt.)"""
    settings, budget = cache_spec.settings, cache_spec.budget
    codec = codec_of(settings)
    prompt = item.sealed(settings.protocol)[-1] if sealed is None else sealed
    how = (settings.placement, DTYPE_BYTES[settings.dtype], item.room - prompt, codec)
    least = cache_spec.method.smallest_budget
    return [
        LayerWorkload(spec, prompt, prompt, *how)
        if budget is None
        else LayerWorkload(
            spec,
            prompt,
            budget.tokens(prompt, spec.index),
            *how,
            budget.prunes(spec.index),
            rows := budget.rows(prompt, spec.index),
            None if rows is None or rows < least else settings.evict_every,
        )
        for spec in shapes(info, settings.device)
    ]


def _pinned(cache_spec: CacheSpec, info: ModelInfo, item: PreparedExample) -> int:
    """Return the bytes of host memory that are pinned for one example before its prefill: enough
    for a prompt that fills the cache."""
    if cache_spec.settings.placement != HOST:
        return 0
    cases = _workloads(cache_spec, info, item, item.room)
    try:
        return reservation_bytes([cache_spec.method.cost(case).away.get(HOST, 0) for case in cases])
    except CostError:
        return 0


def _by_blocks(info: ModelInfo) -> bool:
    """Return True if harness/engine/forward.py runs the model, layer by layer; False if
    transformers' own forward does."""
    return (
        ARCHITECTURES.get(info.architecture) == ""
        and not info.spread
        and (info.quantised is None or info.quantised.plain)
    )


def _states(info: ModelInfo, cache_spec: CacheSpec, prompt: int) -> int:
    """Return the bytes of a prompt's hidden states while one of its chunks passes through a layer.
    If the model runs layer by layer, the states of all chunks are held at once; otherwise those of
    one chunk. What a method reads again before the seal comes as one chunk."""
    settings, repeat = cache_spec.settings, ability(cache_spec.method, Repeat)
    rows = max(
        min(prompt, settings.prefill_chunk or prompt),
        0 if repeat is None else repeat.tokens(prompt),
    )
    waiting = max(prompt - rows, 0) if _by_blocks(info) else 0
    hidden = info.hidden_size
    # layers that slide may be divided otherwise
    heads = max(x.num_heads * x.head_dim for x in info.layer_heads)
    groups = max(x.num_kv_heads * x.head_dim for x in info.layer_heads)
    # in attention the residual, its norm, queries, keys, values and what they attend to live together; around the MLP
    # two residuals and what was attended to
    # latent attention has its queries twice, before and after they are multiplied with W_K
    queries = heads if info.served.values_in_keys else 0
    in_layer = max(
        rows * (2 * (hidden + heads + groups) + queries),
        rows * (2 * hidden + heads) + _in_mlp(info, settings, rows),
    )
    kinds = 2 if info.still_layers else 1  # of layers that rotate alike
    angles, number = 2 * kinds * info.rotary_dim * (rows + waiting), DTYPE_BYTES[settings.dtype]
    # or around a module with a state, whose own activations are counted by its config
    in_state = rows * (2 * hidden * number + info.states.reading_bytes(number))
    return max(in_layer * number, in_state) + (waiting * hidden + angles) * number


def _in_plain_torch(info: ModelInfo, keys: int) -> int:
    """Return the bytes that attention takes for a moment where no compiled kernel takes its values, which
    are narrower than keys: fp32 weights of a block of queries, twice, and fp32 keys and values."""
    heads = info.served
    if heads.value_dim == heads.head_dim:
        return 0
    weights = 2 * heads.num_heads * queries_at_once(heads.num_heads, keys)
    return 4 * keys * (weights + heads.num_kv_heads * (heads.head_dim + heads.value_dim))


def _in_mlp(info: ModelInfo, settings: Settings, rows: int) -> int:
    """Return how many numbers an MLP holds at once for `rows` tokens. Our own forward computes some
    tokens at a time; a model that runs its own forward takes all. Each expert that a token passes
    through then holds the most within its MLP or when the experts' outputs are added; GPT-OSS's
    experts have biases and an activation of several operations."""
    hidden, inner = info.hidden_size, info.inner_size
    if info.chosen_experts:
        outputs, within = (5, 9) if info.sink_logits else (4, 4)
        return rows * (
            hidden + info.chosen_experts * max(outputs * hidden, hidden + within * inner)
        )
    if not _by_blocks(info):
        return rows * (hidden + 3 * inner)
    at_once = TOKENS_AT_ONCE["cpu" if settings.device == "cpu" else "cuda"]
    return min(rows, at_once) * (3 * hidden + 2 * inner)
