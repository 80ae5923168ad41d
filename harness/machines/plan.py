"""Which batch of which method fits on a machine, and how fast it would decode there."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from harness.config.settings import Settings
from harness.jobs.planning.alignment import shapes
from harness.jobs.planning.cache_bytes import Holder
from harness.jobs.planning.capacity import size
from harness.jobs.planning.items import blank
from harness.jobs.planning.sequences import SequenceBytes, sequence_bytes
from harness.machines.machine import Machine, MethodConstants
from harness.machines.replay import ScheduleTimes, replay
from harness.machines.schedule import ScheduleEvent
from harness.machines.steps import prompt, steps
from harness.models.base import DTYPE_BYTES, ModelInfo
from methods.base import Budget, BudgetError, Case, Method

BYTES_ALONE = "bytes alone"
CHUNK = 2048  # tokens of a prompt that are computed at a time


class PlanError(ValueError):
    """What was asked for does not fit; the message says by how much, and what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be decoded: sequences of so many prompt and new tokens, under one method and placement."""

    method: Method
    name: str  # of the method, as users write it
    budget: int | float | None
    placement: str
    tokens: int
    new: int
    dtype: str = "bf16"
    hits: float | None = None  # share of the chosen rows that lies on the device; None: as it was fitted, else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """A row of a plan. `bytes_tpot_s` is by bytes alone, `tpot_s` with what was fitted of the method; they are the same
    where nothing was."""

    machine: Machine
    info: ModelInfo
    load: Workload
    batch: int
    most: int  # sequences that fit
    limit: str  # what ends the batch: device, host, TPOT, or that it was asked for
    sequence: SequenceBytes
    tpot_s: float
    bytes_tpot_s: float
    tt2t_s: float | None  # of one sequence, by `first_times`

    @property
    def rate(self) -> float:
        """Tokens per second of all sequences together."""
        return self.batch / self.tpot_s

    @property
    def bytes_rate(self) -> float:
        return self.batch / self.bytes_tpot_s

    @property
    def basis(self) -> str:
        """How far `tpot_s` can be trusted."""
        if self.load.name not in self.machine.methods:
            return BYTES_ALONE
        constants = self.machine.methods[self.load.name]
        if constants.placement != self.load.placement:
            return "extrapolated"
        return constants.basis or self.machine.basis


def planned(
    machine: Machine, info: ModelInfo, load: Workload, batch: int | None = None, most_tpot_s: float = inf
) -> PlannedRow:
    """The largest batch that fits and takes at most `most_tpot_s` for a token, or `batch`. Raises `PlanError` where
    that does not fit, `BudgetError` for a budget that is too small, and `CostError` for a method without formulas."""
    machine.require(load.placement)
    _check(info, load)
    sequence = sequence_of(machine, info, load)
    most, limit = largest(machine, info, load, sequence)
    if most < (batch or 1):
        raise PlanError(_too_large(machine, info, load, sequence, most, limit, batch))
    constants = constants_of(machine, load)
    fast = bisect_right(
        range(1, (batch or most) + 1), most_tpot_s, key=partial(_tpot_s, machine, info, load, constants)
    )
    if not fast or (batch and fast < batch):
        raise PlanError(_too_slow(machine, load, fast, batch, most_tpot_s))
    first = first_times(machine, info, load)
    return PlannedRow(
        machine=machine,
        info=info,
        load=load,
        batch=fast,
        most=most,
        limit="asked" if batch else limit if fast == most else "TPOT",
        sequence=sequence,
        tpot_s=_tpot_s(machine, info, load, constants, fast),
        bytes_tpot_s=_tpot_s(machine, info, load, replace(constants, layer_s=0.0, token_s=0.0), fast),
        tt2t_s=first.tt2t_s if first else None,
    )


def _tpot_s(machine: Machine, info: ModelInfo, load: Workload, constants: MethodConstants, batch: int) -> float:
    tpot_s = step_times(machine, info, load, batch, constants).tpot_s
    assert tpot_s is not None
    return tpot_s


def _too_slow(machine: Machine, load: Workload, fast: int, batch: int | None, most_tpot_s: float) -> str:
    reach = f"a batch of {fast} is fast enough" if fast else "one sequence alone takes longer"
    return (
        f"{load.name} with placement={load.placement} at {load.tokens} tokens does not decode {batch or 1} at a time "
        f"in {1e3 * most_tpot_s:g} ms per token on {machine.name}: {reach}."
    )


def sequence_of(machine: Machine, info: ModelInfo, load: Workload, rounded: bool = True) -> SequenceBytes:
    """What one sequence takes, by the forecast of a run's bytes; `rounded` as torch's allocators give it."""
    return sequence_bytes(_holder(machine, load), info, blank(load.tokens, load.new), rounded)


def largest(machine: Machine, info: ModelInfo, load: Workload, sequence: SequenceBytes) -> tuple[int, str]:
    """How many sequences fit, and which memory ends there. Prompts are computed one after the other, so one of them
    takes its transient bytes. The rows of one are staged, beside those of each that come ahead, as where the sequences
    attend one after the other; sequences that attend together stage more, which only a run's own check counts."""
    free = machine.device_bytes - machine.reserve_bytes - info.weight_bytes(load.dtype) - sequence.passing
    on_device = max(0, free // (sequence.device + sequence.rounding + sequence.arriving))
    if machine.host_bytes is None or not sequence.host:
        return on_device, "device"
    in_host = machine.host_bytes // sequence.host
    return (in_host, "host") if in_host < on_device else (on_device, "device")


def step_times(
    machine: Machine, info: ModelInfo, load: Workload, batch: int, constants: MethodConstants
) -> ScheduleTimes:
    """A few decode steps of a batch, replayed on the machine."""
    schedule = _steps(machine, info, load, batch, constants)
    return replay(schedule, machine.costs(load.dtype, constants, batch * load.tokens))


def first_times(machine: Machine, info: ModelInfo, load: Workload) -> ScheduleTimes | None:
    """One sequence by itself from its prompt on, replayed on the machine: products, bytes and transfers, without what
    the method computes at its seal. None where the prompt is not computed as Full's, or nobody knows how fast the
    machine multiplies."""
    if not load.method.dense_prefill or load.dtype not in machine.matmul_gflop_s:
        return None
    constants = replace(constants_of(machine, load), hits=0.0)  # no step came before
    fed = prompt(info, load.method, _cases(machine, info, load), load.dtype, overlap=_overlaps(machine))
    schedule = [*fed, *_steps(machine, info, load, 1, constants)]
    return replay(schedule, machine.costs(load.dtype, constants, load.tokens))


def _steps(
    machine: Machine, info: ModelInfo, load: Workload, batch: int, constants: MethodConstants
) -> list[ScheduleEvent]:
    cases, overlap, block_bytes = _cases(machine, info, load), _overlaps(machine), machine.block_bytes
    return steps(info, load.method, cases, batch, load.dtype, constants, overlap=overlap, block_bytes=block_bytes)


def _cases(machine: Machine, info: ModelInfo, load: Workload) -> list[Case]:
    """Of each layer that the method is told of."""
    budget = _holder(machine, load).budget
    return [
        Case(
            spec,
            load.tokens,
            load.tokens if budget is None else budget.tokens(load.tokens, spec.index),
            load.placement,
            DTYPE_BYTES[load.dtype],
            load.new,
        )
        for spec in shapes(info)
    ]


def row_times(row: PlannedRow) -> ScheduleTimes:
    """The steps behind a row."""
    return step_times(row.machine, row.info, row.load, row.batch, constants_of(row.machine, row.load))


def constants_of(machine: Machine, load: Workload) -> MethodConstants:
    """What was fitted of the method there, or nothing, with the hits that are asked for. With other parameters, as in
    `shadowkv:hit_cache=false`, it is another method, of which nothing is known."""
    fitted = machine.methods.get(load.name, MethodConstants())
    return fitted if load.hits is None else replace(fitted, hits=load.hits)


def _overlaps(machine: Machine) -> bool:
    """As overlap=auto."""
    return machine.device == "cuda"


def _holder(machine: Machine, load: Workload) -> Holder:
    settings = Settings(
        budget=load.budget, placement=load.placement, dtype=load.dtype, device=machine.device, prefill_chunk=CHUNK,
        overlap="on" if _overlaps(machine) else "off",
    )  # fmt: skip
    budget = Budget(load.budget) if load.method.uses_budget and load.budget is not None else None
    return Holder(settings, load.method, budget)


def _check(info: ModelInfo, load: Workload) -> None:
    if load.tokens + load.new > info.limit:
        raise PlanError(
            f"{load.tokens} prompt and {load.new} new tokens are more than the window of {info.name}, {info.limit}: "
            "plan for fewer."
        )
    if load.method.uses_budget and load.budget is None:
        raise BudgetError(f"{load.name} needs a budget: give a share of the prompt, as 0.2, or tokens, as 2048.")
    budget = Budget(load.budget) if load.budget is not None and load.method.uses_budget else None
    for spec in shapes(info):
        load.method.check_model(spec)
        load.method.check(budget, load.tokens, spec.index)


def _too_large(
    machine: Machine, info: ModelInfo, load: Workload, sequence: SequenceBytes, most: int, limit: str, batch: int | None
) -> str:
    what = f"{load.name} with placement={load.placement} at {load.tokens} tokens"
    if most:
        return (
            f"A batch of {batch} does not fit on {machine.name}: {what} takes {most} at most, for its {limit} memory."
        )
    beside = f" and {size(sequence.host)} of host memory" if sequence.host else ""
    return (
        f"{what} does not fit on {machine.name}: beside {size(info.weight_bytes(load.dtype))} of weights one sequence "
        f"takes {size(sequence.device + sequence.rounding)}, while its prompt is computed {size(sequence.passing)} "
        f"more{beside}, and {size(machine.device_bytes - machine.reserve_bytes)} can be used."
    )
