"""Records the small tensors by which the host describes a step's sequences, so that a captured step
can serve others.

Where sequences lie in memory, how many tokens they have and what else differs between them reaches
a step as small tensors (`Ragged`, `PerSequence`); everything else is the same for all sequences of
one size. A captured step serves other sequences once these tensors, in the order in which the step
asks for them, hold the others' values."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

MOST_KEPT_BYTES = 256 << 20  # memory of the captured steps that an engine keeps for other sequences


class CaptureError(RuntimeError):
    """Report that a decode step did something that cannot be captured in a CUDA graph."""


def to_device(numbers: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """Return a few numbers that the host knows as a tensor on `device`. `numbers`: a tensor, or a
    list that may be nested. Numbers that are on the device already are returned as they are.

    On a CUDA device's default stream the host does not wait: the numbers are copied from pinned
    memory, which torch keeps until the copy has ended. On another stream the host waits, because
    what is made there is kept, and the model's stream may read it without waiting for that
    stream."""
    tensor = torch.as_tensor(numbers)
    if device.type != "cuda" or tensor.device.type != "cpu" or not on_default_stream(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_default_stream(device: torch.device) -> bool:
    """Return whether work for a CUDA device goes to its default stream, which a model uses."""
    return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


class StepInputs:
    """Hold the small tensors that describe the sequences of one decode step, such as lengths and
    addresses, each with its kind (what it means, its shape, dtype and device). A captured step can
    serve other sequences only if their tensors have the same kinds."""

    def __init__(self) -> None:
        self.kinds: list[Hashable] = []
        self.tensors: list[Tensor] = []
        # an operation read a sequence's memory directly, not through a table of addresses
        self.read_memory = False

    def add(self, kind: Hashable, tensor: Tensor) -> None:
        self.kinds.append((kind, tuple(tensor.shape), tensor.dtype, tensor.device))
        self.tensors.append(tensor)

    def take_over(self, other: StepInputs) -> bool:
        """Copy the tensors of another step of the same kinds into the tensors of this one, so that
        replaying this step serves the other's sequences. Return whether that was possible: it is
        not where this step uses one tensor twice and the other step uses two different ones."""
        sources: dict[int, tuple[Tensor, Tensor]] = {}
        for target, source in zip(self.tensors, other.tensors, strict=True):
            if sources.setdefault(id(target), (target, source))[1] is not source:
                return False
        targets, values = zip(*sources.values(), strict=True)
        torch._foreach_copy_(targets, values)
        return True


_recording: ContextVar[StepInputs | None] = ContextVar("recording", default=None)


@contextmanager
def recording_inputs(inputs: StepInputs) -> Iterator[None]:
    """Add to `inputs` every tensor that is passed to `record_input` in this context."""
    token = _recording.set(inputs)
    try:
        yield
    finally:
        _recording.reset(token)


def record_input(kind: Hashable, tensor: Tensor) -> Tensor:
    """Record a tensor that describes the step's sequences, if `recording_inputs` is active, and
    return it. `kind`: what a captured step assumes about it besides shape and dtype."""
    if (inputs := _recording.get()) is not None:
        inputs.add(kind, tensor)
    return tensor


def note_kind(kind: Hashable) -> None:
    """Note a property of the step that no tensor tells: a captured step serves other sequences only
    if the kinds of their step are the same, in the same order."""
    if (inputs := _recording.get()) is not None:
        inputs.kinds.append(kind)


def note_memory_read() -> None:
    """Note that an operation reads a sequence's memory directly instead of through a table of
    addresses, so that its step, once captured, cannot serve other sequences."""
    if (inputs := _recording.get()) is not None:
        inputs.read_memory = True
