"""The schedule of a decode step of a batch, by what a method says that it reads and moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.machines.machine import MethodConstants
from harness.machines.schedule import (
    DISK_LANE,
    TO_DEVICE,
    LayerBorder,
    Operation,
    ScheduleEvent,
    Submitted,
    TokenOut,
    Waited,
)
from harness.models.base import DTYPE_BYTES, ModelError, ModelInfo
from methods.base import Case, Method
from methods.tiers.tier import DISK

STEPS = 3  # so many tokens have a time per output token


def steps(
    info: ModelInfo, method: Method, cases: Sequence[Case], batch: int, dtype: str, constants: MethodConstants
) -> list[ScheduleEvent]:
    """Tokens of `batch` sequences that are half way through what they generate. Rows are waited for where they are
    asked for, as the tiers do it today: nothing is hidden."""
    schedule: list[ScheduleEvent] = []
    for _ in range(STEPS):
        for case in cases:
            schedule += _layer(method, case, batch, constants, len(schedule))
        schedule += [_weights(info, dtype, batch), TokenOut()]
    return schedule


def _layer(method: Method, case: Case, batch: int, constants: MethodConstants, key: int) -> Iterator[ScheduleEvent]:
    cost = method.cost(case)
    yield LayerBorder(case.spec.index)
    if moved := round(batch * cost.moved_bytes_per_step * (1 - constants.hits)):
        after: tuple[int, ...] = ()
        if case.placement == DISK:
            after = (key,)
            yield Submitted(key, DISK_LANE, "read", moved)
        yield Submitted(key + 1, TO_DEVICE, "to device", moved, after=after)
        yield Waited(key + 1)
    generated = case.reserve // 2 * case.row_bytes
    yield Operation("attend", batch * (cost.read_bytes_per_step + generated))


def _weights(info: ModelInfo, dtype: str, batch: int) -> Operation:
    """All weights once, but of the embedding table's rows no more than there are tokens."""
    if info.chosen_experts:
        raise ModelError(f"{info.name} has experts, of which a step reads a part: plans are for models without.")
    in_layers = info.num_layers * (
        2 * info.hidden_size * (info.num_heads + info.num_kv_heads) * info.head_dim
        + 3 * info.hidden_size * info.inner_size
    )
    table = info.vocab_size * info.hidden_size
    tied = info.num_parameters - in_layers < 1.5 * table  # then it is the output's matrix too
    read = info.num_parameters - (0 if tied else table)
    return Operation("weights", read * DTYPE_BYTES[dtype], flop=2 * read * batch)
