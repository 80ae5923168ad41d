"""Defines one layer of a method: its keys and values, and attention over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from methods.base.request import AttnInput, LayerSpec, NextRow
from methods.base.state import CacheState, undeclared


class Attended(NamedTuple):
    """Count the tokens that one selecting head read in the last decode step (the mean if heads
    differ). A selecting head is a KV head, or a query head if the method lets each choose; what a
    KV head then reads is in `read_positions`."""

    prompt: float  # tokens of the sealed prompt, which the budget limits
    generated: float  # tokens since the seal, the current one included


class KVLayer(ABC):
    """Hold keys and values of one layer for one batch, and attend over them.

    Phases: `prefill` (once, or once per chunk), `seal`, `decode` per token; a further turn repeats
    them. The caller sets the phase; it is never guessed from a shape. All inputs and outputs are on
    `self.request.device`.

    `class MyLayer(KVLayer, capturable=True)` declares that a decode step can be captured in a graph
    and replayed. A subclass does not inherit this, because what it overrides may count in Python or
    wait for the device."""

    capturable: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ()  # attributes for the record that do not count as bytes of the cache

    def __init_subclass__(cls, *, capturable: bool = False, **more: object) -> None:
        super().__init_subclass__(**more)
        cls.capturable = capturable

    def __init__(self, spec: LayerSpec, cache: CacheState) -> None:
        self.spec = spec
        self.cache = cache.on(spec.device)
        self.request = self.cache.request
        self.fallback: str | None = None  # what this layer does instead of its method, and why

    @abstractmethod
    def absorb(self, x: AttnInput) -> None:
        """Store the next prompt chunk without attending, for a shared prefill."""

    @abstractmethod
    def prefill(self, x: AttnInput) -> Tensor:
        """Store the next prompt chunk and attend causally. Return [B H T D]."""

    @abstractmethod
    def seal(self) -> None:
        """Index, compress, evict or move tokens, now that the prompt is complete."""

    @abstractmethod
    def decode(self, x: AttnInput) -> Tensor:
        """Store one token and attend. Return [B H 1 D]."""

    def next_row(self) -> NextRow | None:
        """Return where the next `decode` stores k and v unchanged, so that the kernel that computes
        them may write them there. None if that is not known on the device, or if storing does more
        than that."""
        return None

    @property
    @abstractmethod
    def attended(self) -> Attended: ...

    @property
    def reading(self) -> tuple[float | Tensor, float]:
        """Return `attended` without waiting, for use between steps. If only the device knows how
        many prompt tokens were read, they are a tensor [B] that the next step may overwrite."""
        return self.attended

    def readings(self, steps: int) -> tuple[float | Tensor, float]:
        """Return the sums of `reading` over the last `steps` steps. Several steps are counted at
        once when a layer has taken them together with other sequences: each reads as many prompt
        tokens as the last one, and one generated token more than the step before it, unless the
        layer overrides this."""
        prompt, generated = self.reading
        return prompt * steps, generated * steps - steps * (steps - 1) // 2

    @abstractmethod
    def read_positions(self) -> Tensor | None:
        """Return the prompt positions that the last step read, [B G K] without repeats, -1 where a
        head read fewer; None for all."""

    def selected_positions(self) -> Tensor | None:
        """Return the prompt positions that each selecting head read in the last step, [B H K] if
        query heads choose for themselves."""
        return self.read_positions()

    def union_excess(self) -> Tensor | None:
        """Return by how many prompt tokens the union that a KV head read in the last step exceeds
        the tokens of one of its query heads, [B], mean over heads; None if KV heads choose. It is
        called between steps, so it must not wait for the device."""
        return None

    @property
    def bytes_read(self) -> float | None:
        """Return the bytes of keys and values that the last step read, in all sequences; None if
        the layer does not know. A token counts once per KV head, however many of its query heads
        read it."""
        return None

    def generated_positions(self) -> Tensor | None:
        """Return the positions since the seal that the last step read, [B G K], or [B H K] if query
        heads keep their own; None for all."""
        return None

    def grow(self, more: int) -> None:
        """Make room for `more` tokens beyond the request's capacity. Tensors are moved, so captured
        steps must not be replayed any more."""
        self.request = self.cache.request = replace(self.request, capacity=self.request.capacity + more)

    def reopen(self) -> None:  # noqa: B027 (most layers hold all they have on the device)
        """Undo what the seal moved, before a further turn, whose prompt attends to everything."""

    def state(self) -> dict[str, Tensor]:
        """End the turn and return all that a further one needs of this layer, as tensors where they
        lie. They are views: copy what should outlive the layer. A tensor whose name has a part
        `far` lies away from the device and may stay there; others are restored on the device."""
        raise NotImplementedError(f"{type(self).__name__} cannot be saved between turns: write `state` and `restore`.")

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over, in a fresh layer, what `state` returned, so that a further turn may begin."""
        raise NotImplementedError(f"{type(self).__name__} cannot be restored: write `state` and `restore`.")

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Return the parts of `state`, except keys, values and positions, that belong to the
        `first` and the `last` stored tokens of every head, as if these were stored one after the
        other. `state` was taken after `reopen`; `rotated` [B heads S] in it names the positions by
        which keys are rotated, if they differ from the tokens' own."""
        return {}

    def capture_refusal(self) -> str | None:
        """Return why a decode step of this sealed layer cannot be captured
        (methods/base/state.py), or None."""
        return None if self.capturable else undeclared(type(self))

    def count_replayed(self, steps: int) -> None:
        """Update what is counted in Python after `steps` steps that were replayed without
        `decode`."""
        raise NotImplementedError(f"{type(self).__name__} is capturable and must count the steps that are replayed.")
