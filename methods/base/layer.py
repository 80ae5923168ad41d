"""Defines one layer of a method: its keys and values, and attention over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from methods.base.counters import undeclared
from methods.base.request import AttnInput, LayerSpec, NextRow
from methods.base.state import CacheState


class Attended(NamedTuple):
    """Counts the tokens that one selecting head read in the last decode step (the mean where heads differ). That is a
    KV head, or a query head where a method lets each choose; what a KV head then reads is in `read_positions`."""

    prompt: float  # tokens of the sealed prompt, which the budget limits
    generated: float  # tokens since the seal, the current one included


class KVLayer(ABC):
    """Holds keys and values of one layer for one batch, and attends over them.

    Phases: `prefill` (once, or once per chunk), `seal`, `decode` per token; a further turn goes through them again. The
    caller says the phase; it is never guessed from a shape. All inputs and outputs are on `self.request.device`.

    `class MyLayer(KVLayer, capturable=True)` says that a decode step can be captured in a graph and replayed. A
    subclass does not inherit this, since what it overrides may count in Python or wait for the device.
    """

    capturable: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ()  # attributes kept for the record, no part of the cache's bytes

    def __init_subclass__(cls, *, capturable: bool = False, **more: object) -> None:
        super().__init_subclass__(**more)
        cls.capturable = capturable

    def __init__(self, spec: LayerSpec, cache: CacheState) -> None:
        self.spec = spec
        self.cache = cache.on(spec.device)
        self.request = self.cache.request
        self.fallback: str | None = None  # what this layer does in place of its method, and why

    @abstractmethod
    def absorb(self, x: AttnInput) -> None:
        """Take in the next prompt chunk without attending, for a shared prefill."""

    @abstractmethod
    def prefill(self, x: AttnInput) -> Tensor:
        """Take in the next prompt chunk and attend causally. -> [B H T D]"""

    @abstractmethod
    def seal(self) -> None:
        """Index, compress, evict or move, now that the prompt is complete."""

    @abstractmethod
    def decode(self, x: AttnInput) -> Tensor:
        """Take in one token and attend. -> [B H 1 D]"""

    def next_row(self) -> NextRow | None:
        """Say where the next `decode` stores k and v as they are, so that the kernel that makes them may write them;
        None where that is not known on the device, or where more is done than that."""
        return None

    @property
    @abstractmethod
    def attended(self) -> Attended: ...

    @property
    def reading(self) -> tuple[float | Tensor, float]:
        """Return `attended` without waiting, for use between steps. Where only the device knows how many prompt tokens
        were read, they are a tensor [B] that the next step may overwrite."""
        return self.attended

    def readings(self, steps: int) -> tuple[float | Tensor, float]:
        """Return the sums of `reading` over the last `steps` steps. Several are those that a layer has taken together
        with others', where each reads as much of the prompt as the last and one generated token more than the one
        before it, unless the layer says otherwise."""
        prompt, generated = self.reading
        return prompt * steps, generated * steps - steps * (steps - 1) // 2

    @abstractmethod
    def read_positions(self) -> Tensor | None:
        """Return the prompt positions that the last step read, [B G K] without repeats, -1 where a head read fewer;
        None for all."""

    def selected_positions(self) -> Tensor | None:
        """Return the prompt positions that each selecting head read in the last step: [B H K] where query heads choose
        for themselves."""
        return self.read_positions()

    def union_excess(self) -> Tensor | None:
        """Say by how many prompt tokens the union that a KV head read in the last step exceeds what one of its query
        heads read, each token counted once. [B], mean over heads; None where KV heads choose. It is called between
        steps, so an override must not wait for the device."""
        selected, read = self.selected_positions(), self.read_positions()
        if selected is None or read is None or selected.shape[1] == self.spec.num_kv_heads:
            return None
        return _present(read) - _present(selected)

    @property
    def bytes_read(self) -> float | None:
        """Return the bytes of keys and values that the last step read, in all sequences. A token counts once for a KV
        head, however many of its query heads read it. None where the layer does not say."""
        return None

    def generated_positions(self) -> Tensor | None:
        """Return the positions since the seal that the last step read, [B G K], or [B H K] where query heads keep their
        own; None for all."""
        return None

    def grow(self, more: int) -> None:
        """Make room for `more` tokens beyond the request's capacity. Tensors move, so no step that was captured may go
        on."""
        self.request = self.cache.request = replace(self.request, capacity=self.request.capacity + more)

    def reopen(self) -> None:  # noqa: B027 (most layers hold all they have on the device)
        """Undo what the seal moved, at the beginning of a further turn, which attends to everything."""

    def state(self) -> dict[str, Tensor]:
        """End the turn and return all that a further one needs of this layer, as tensors where they lie. They are views
        of what the layer holds: copy what is to outlive it. A part of a name that is `far` says that a tensor lies away
        from the device and may stay there; others come back on it."""
        raise NotImplementedError(f"{type(self).__name__} cannot be saved between turns: write `state` and `restore`.")

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned, in a fresh layer, so that a further turn may begin."""
        raise NotImplementedError(f"{type(self).__name__} cannot be restored: write `state` and `restore`.")

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Return the parts of `state` beside keys, values and positions that go with the `first` and the `last` stored
        tokens of every head, once these stand side by side. `state` was taken after `reopen`; it names in `rotated` [B
        heads S] where keys are rotated to, if that is not where their tokens stood."""
        return {}

    def capture_refusal(self) -> str | None:
        """Say why a decode step of this sealed layer cannot be captured (methods/base/counters.py), or return None."""
        return None if self.capturable else undeclared(type(self))

    def count_replayed(self, steps: int) -> None:
        """Bring up to date what is counted in Python, after `steps` steps that were replayed without `decode`."""
        raise NotImplementedError(f"{type(self).__name__} is capturable and must count the steps that are replayed.")


def _present(positions: Tensor) -> Tensor:
    """Count the positions that are there. [B heads K], -1 for none -> [B], mean over heads"""
    return (positions >= 0).sum(-1).double().mean(1)
