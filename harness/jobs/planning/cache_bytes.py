"""Forecasts the bytes of one example's cache, from the formulas of its method (`cost` and `transient` of
methods/base/method.py); where it has none, Full's keys and values are counted.

A prompt goes layer by layer, and a layer takes memory when the prompt reaches it. Where rows leave the device, a layer
seals as soon as the prompt is through it, and the prompt's hidden states lie beside; where they stay, all layers seal
after the prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.config.settings import Settings
from harness.jobs.planning.alignment import shapes
from harness.jobs.planning.examples import PreparedExample
from harness.models.architectures import ARCHITECTURES
from harness.models.base import DTYPE_BYTES, ModelInfo
from methods.base import Budget, Cost, CostError, LayerWorkload, Method, PeakExtra
from methods.tiers import codecs
from methods.tiers.pinned_memory import reservation_bytes
from methods.tiers.tier import DEVICE, HOST, TIERS


class CacheSpec(NamedTuple):
    """Says what decides which bytes the caches of a job take."""

    settings: Settings
    method: Method
    budget: Budget | None


class States(NamedTuple):
    """Bytes of the hidden states of a prompt: while one of its chunks passes through a layer, and between two layers,
    where nothing but these is left."""

    passing: int
    between: int


class PeakBytes(NamedTuple):
    """Bytes on the device at one moment of a prompt."""

    kv: int  # keys and values of the prompt, as Full holds them, and all that layers hold which have sealed
    kept: int  # the method's own, from the first chunk in a layer until it seals
    more: int  # and what it takes at this moment alone
    states: int

    @property
    def total(self) -> int:
        return sum(self)


class CacheBytes(NamedTuple):
    """Bytes of the cache of one example on the device, and in host memory beside a GPU."""

    prefill: PeakBytes  # when most is held while a chunk passes through a layer
    seal: PeakBytes  # when most is held while a layer seals
    sealed: int
    host: int
    staging: Staging
    joint: int  # what a step of several sequences copies of this one and changes: its hit caches


class Staging(NamedTuple):
    """Bytes through which rows travel in a step. Beside a CPU, rows of the host tier are read where they lie, unless
    several sequences take a step together, which gather them."""

    arriving: int  # on the device, of a layer whose rows come while others compute
    read: int  # on the device, of the layer that attends
    gathered: int  # in host memory, of chosen rows that are collected there before they go to the device

    @staticmethod
    def of(cache_spec: CacheSpec, layers: Iterable[tuple[LayerWorkload, Cost]]) -> Staging:
        """Return what one sequence takes for the largest of its layers."""
        settings, on_cpu = cache_spec.settings, cache_spec.settings.device == "cpu"
        if on_cpu and not TIERS[settings.placement].in_files and not steps_together(settings):
            return Staging(0, 0, 0)
        told = list(layers)
        moved = max(_in_step(settings, case, cost.moved_bytes_per_step) for case, cost in told)
        costs = [cost for _, cost in told]
        chosen = [cost.moved_bytes_per_step for cost in costs if cost.moved_bytes_per_step < sum(cost.away.values())]
        ahead = settings.overlap == "on" and cache_spec.method.asks_ahead
        in_files = TIERS[settings.placement].in_files
        return Staging(moved if ahead else 0, moved, max(chosen, default=0) if in_files else 0)


def steps_together(settings: Settings) -> bool:
    """Say whether a layer's step is of all sequences of a batch at once, where their method lets it; a captured one is
    also where there is one sequence."""
    return (settings.batch > 1 or settings.graphs == "on") and not TIERS[settings.placement].in_files


def steps_captured(settings: Settings) -> bool:
    """Say whether a step may be captured, which then has room for powers of two of sequences and of the rows of
    each."""
    return settings.graphs == "on" and steps_together(settings)


def slots_of(settings: Settings, sequences: int) -> int:
    """Return for how many sequences a step has room that so many take together."""
    return _power_of_two(sequences) if steps_captured(settings) else sequences


def _in_step(settings: Settings, case: LayerWorkload, nbytes: int) -> int:
    """Return the bytes of rows as a step holds them for one sequence."""
    rows = -(-nbytes // case.row_bytes)
    return nbytes * _power_of_two(rows) // rows if rows and steps_captured(settings) else nbytes


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


def by_blocks(info: ModelInfo) -> bool:
    """Say whether the model runs by harness/engine/forward.py, and so layer by layer."""
    known = ARCHITECTURES.get(info.architecture)
    return known is not None and known.by_blocks


def cache_bytes(cache_spec: CacheSpec, info: ModelInfo, item: PreparedExample, states: States) -> CacheBytes:
    """Return the bytes of one example, with the layers that slide, which hold their windows and a chunk."""
    settings = cache_spec.settings
    slides = info.kv_bytes(settings.dtype, item.room, slide=True) * (info.num_whole_layers < info.num_layers)
    layers = list(_layers(cache_spec, info, item))
    closes_early = settings.placement != DEVICE or cache_spec.method.closes_early
    early = by_blocks(info) and closes_early and not settings.shared_prefill
    moments = _closing_early(layers, states, bool(item.further)) if early else _closing_late(layers, states)
    beside = sum(layer.transient.beside for layer in layers) if settings.overlap == "on" else 0
    more = slides + (beside if settings.device == "cpu" else 0)
    prefill, seal = (moment._replace(kv=moment.kv + more) for moment in moments)
    host = 0 if settings.device == "cpu" else host_bytes(cache_spec, info, item) + beside
    staging = Staging.of(cache_spec, ((layer.case, layer.cost) for layer in layers))
    sealed = slides + sum(layer.sealed for layer in layers)
    joint = sum(_in_step(settings, layer.case, layer.transient.stepping) for layer in layers)
    return CacheBytes(prefill, seal, sealed, host, staging, joint if steps_together(settings) else 0)


def host_bytes(cache_spec: CacheSpec, info: ModelInfo, item: PreparedExample) -> int:
    """Return the bytes of host memory that are pinned for one example before its prompt begins: as many as a prompt
    takes that fills its cache."""
    if cache_spec.settings.placement != HOST:
        return 0
    try:
        return reservation_bytes(
            [cache_spec.method.cost(case).away.get(HOST, 0) for case in cases(cache_spec, info, item, item.room)]
        )
    except CostError:
        return 0


@dataclass(frozen=True, slots=True)
class _Layer:
    """`dense`: bytes of keys and values until the seal. `sealed`: bytes on the device behind it."""

    case: LayerWorkload
    dense: int
    sealed: int
    cost: Cost
    transient: PeakExtra
    sealing: int  # beside `dense`, while it seals

    @staticmethod
    def of(case: LayerWorkload, cost: Cost, transient: PeakExtra, on_cpu: bool) -> _Layer:
        sealed = counted(cost, on_cpu)
        made = cost.beside(case) + sealed - cost.device_bytes
        return _Layer(case, case.dense_bytes, sealed, cost, transient, max(transient.seal, made))


def _layers(cache_spec: CacheSpec, info: ModelInfo, item: PreparedExample) -> Iterator[_Layer]:
    settings, listed = cache_spec.settings, cases(cache_spec, info, item)
    chunk = min(len(item.prompt.ids), settings.prefill_chunk or len(item.prompt.ids))
    try:
        told = [(cache_spec.method.cost(case), cache_spec.method.transient(case, chunk)) for case in listed]
    except CostError:
        told = [(Cost(case.dense_bytes), PeakExtra()) for case in listed]
    for case, (cost, transient) in zip(listed, told, strict=True):
        yield _Layer.of(case, cost, transient, settings.device == "cpu")


def _closing_late(layers: Sequence[_Layer], states: States) -> tuple[PeakBytes, PeakBytes]:
    """Return the peaks where layers seal after the prefill: all are whole when the first one seals, and no hidden
    states are left."""
    kv, kept = sum(layer.dense for layer in layers), sum(layer.transient.kept for layer in layers)
    prefill = max(layer.transient.prefill for layer in layers)
    whole = [layer.dense + layer.transient.kept for layer in layers]
    sealing = max(
        sum(other.sealed for other in layers[:at]) + sum(whole[at:]) + layer.sealing for at, layer in enumerate(layers)
    )
    return PeakBytes(kv, kept, prefill, states.passing), PeakBytes(kv, kept, sealing - kv - kept, 0)


def _closing_early(layers: Sequence[_Layer], states: States, further: bool) -> tuple[PeakBytes, PeakBytes]:
    """Return the peaks where each layer seals once the prompt is through it: one layer is whole at a time, with what is
    noted for the next one.
    `further`: layers that the prompt of a further turn has not reached are sealed as in the turn before."""
    prefills, seals, last = [], [], len(layers) - 1
    for at, layer in enumerate(layers):
        before = sum(other.sealed - other.transient.stepping for other in layers[:at])
        behind = sum(other.sealed for other in layers[at + 1 :]) if further else 0
        kv = before + layer.dense + behind
        kept = sum(one.transient.kept for one in layers[at : at + 2])
        prefills.append(PeakBytes(kv, kept, layer.transient.prefill, states.passing))
        seals.append(PeakBytes(kv, kept, layer.sealing, states.between if at < last else 0))
    most_prefill, most_seal = (max(moments, key=lambda moment: moment.total) for moments in (prefills, seals))
    return most_prefill, most_seal


def counted(cost: Cost, host: bool) -> int:
    """Return the bytes on the device, with those in other memory if that is the same."""
    return sum(count for tier, count in cost.held.items() if tier == DEVICE or (host and not TIERS[tier].in_files))


def cases(
    cache_spec: CacheSpec, info: ModelInfo, item: PreparedExample, sealed: int | None = None
) -> list[LayerWorkload]:
    """Return what a cost is asked for, layer by layer, once the last turn is sealed, or so many tokens of it."""
    settings, budget = cache_spec.settings, cache_spec.budget
    codec = None if settings.codec is None else codecs.codec_of(settings.codec)
    prompt = item.sealed(settings.protocol)[-1] if sealed is None else sealed
    how = (settings.placement, DTYPE_BYTES[settings.dtype], item.room - prompt, codec)
    return [
        LayerWorkload(spec, prompt, prompt if budget is None else budget.tokens(prompt, spec.index), *how)
        for spec in shapes(info)
    ]
