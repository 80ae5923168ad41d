"""The schedules of a prompt and of decode steps of a batch, by what a method says that it holds, reads and moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.machines.machine import MethodConstants
from harness.machines.schedule import (
    DISK_LANE,
    TO_DEVICE,
    TO_HOST,
    LayerBorder,
    Operation,
    ScheduleEvent,
    Submitted,
    TokenOut,
    Waited,
)
from harness.models.base import DTYPE_BYTES, ModelError, ModelInfo
from methods.base import Case, CostError, Method
from methods.tiers.tier import DISK

STEPS = 3  # so many tokens have a time per output token


def steps(
    info: ModelInfo,
    method: Method,
    cases: Sequence[Case],
    batch: int,
    dtype: str,
    constants: MethodConstants,
    *,
    overlap: bool,
) -> list[ScheduleEvent]:
    """Tokens of `batch` sequences that are half way through what they generate.

    With `overlap`, and a method that asks ahead, a layer's rows are submitted before the layer in front of it attends,
    and the first layer's behind the last one; else each layer waits for what it has submitted.
    """
    layers = [case for _ in range(STEPS) for case in cases]
    moves = [_moved(method, case, batch, constants) for case in layers]
    ahead = 1 if overlap and method.asks_ahead else 0
    weights, submitted = _weights(info, dtype, batch), 0
    schedule: list[ScheduleEvent] = []
    for number, case in enumerate(layers):
        schedule += [LayerBorder(case.spec.index)]
        while submitted < min(number + ahead + 1, len(layers)):
            schedule += _submit(submitted, moves[submitted], case.placement == DISK)
            submitted += 1
        if moves[number]:
            schedule += [Waited(2 * number + 1)]
        generated = case.reserve // 2 * case.row_bytes
        schedule += [Operation("attend", batch * (_read(method, case) + generated)), weights]
        if (number + 1) % len(cases) == 0:
            schedule += [_head(info, dtype, batch), TokenOut()]
    return schedule


def prompt(
    info: ModelInfo, method: Method, cases: Sequence[Case], dtype: str, *, overlap: bool
) -> Iterator[ScheduleEvent]:
    """The prompt of one sequence up to its first token, for a method whose prompt is computed as Full's, and behind it
    the wait for rows that leave the device. With `overlap` they leave a layer while later ones compute. What the method
    computes at its seal is not there."""
    tokens, spec = cases[0].sealed, cases[0].spec
    seen = sum(_pairs(tokens, window) for window in info.layer_windows) // len(cases)
    left: list[Waited] = []
    for case in cases:
        yield _weights(info, dtype, tokens)
        yield Operation("attend", written=tokens * case.row_bytes, flop=4 * spec.num_heads * spec.head_dim * seen)
        if away := sum(method.cost(case).away.values()):
            key = -1 - 2 * case.spec.index  # no step submits work under it
            yield Submitted(key, TO_HOST, "to host", away)
            if case.placement == DISK:
                key -= 1
                yield Submitted(key, DISK_LANE, "write", away, after=(key + 1,))
            left.append(Waited(key))
            if not overlap:
                yield left.pop()
    yield _head(info, dtype, 1)
    yield TokenOut()
    yield from left


def _pairs(tokens: int, window: int | None) -> int:
    """How many tokens all tokens of a prompt see, themselves among them."""
    near = min(tokens, window or tokens)
    return near * (near + 1) // 2 + (tokens - near) * near


def _read(method: Method, case: Case) -> int:
    if (read := method.cost(case).read_bytes_per_step) > 0:
        return read
    raise CostError(f"{type(method).__name__} does not say what a step reads: its cost needs read_bytes_per_step.")


def _moved(method: Method, case: Case, batch: int, constants: MethodConstants) -> int:
    return round(batch * method.cost(case).moved_bytes_per_step * (1 - constants.hits))


def _submit(number: int, moved: int, from_disk: bool) -> Iterator[ScheduleEvent]:
    """The rows of the layer of that number, which are one piece once the host has collected them."""
    if not moved:
        return
    if from_disk:
        yield Submitted(2 * number, DISK_LANE, "read", moved)
    yield Submitted(2 * number + 1, TO_DEVICE, "to device", moved, after=(2 * number,) if from_disk else ())


def _weights(info: ModelInfo, dtype: str, batch: int) -> Operation:
    """Of one layer, all once. Layers that slide, which a method is not told of, are shared out among the others."""
    if info.chosen_experts:
        raise ModelError(f"{info.name} has experts, of which a step reads a part: plans are for models without.")
    count = (info.num_parameters - _tables(info) * info.vocab_size * info.hidden_size) // info.num_whole_layers
    return Operation("weights", count * DTYPE_BYTES[dtype], flop=2 * count * batch)


def _head(info: ModelInfo, dtype: str, batch: int) -> Operation:
    count = info.vocab_size * info.hidden_size
    return Operation("logits", count * DTYPE_BYTES[dtype], flop=2 * count * batch)


def _tables(info: ModelInfo) -> int:
    """Matrices as long as the vocabulary: the embedding, of which a step reads a row for each token, and the output's,
    where that is not the same."""
    in_layers = info.num_layers * (
        2 * info.hidden_size * (info.num_heads + info.num_kv_heads) * info.head_dim
        + 3 * info.hidden_size * info.inner_size
    )
    return 1 if info.num_parameters - in_layers < 1.5 * info.vocab_size * info.hidden_size else 2
