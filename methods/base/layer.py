"""Defines what a layer of a method must offer: it holds keys and values, and attends over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import ClassVar, NamedTuple

from torch import Tensor

from methods.base.request import AttnInput, LayerSpec, NextRow
from methods.base.state import CacheState, undeclared

# steps; a capture pays if a layer must prepare no more often than that
SELDOM = 8


class Attended(NamedTuple):
    """Count the tokens that one selecting head read in the last decode step (the mean if heads
    differ). A selecting head is a KV head, or a query head if the method lets each choose; what a
    KV head then reads is in `read_positions`."""

    prompt: float  # tokens of the sealed prompt, which the budget limits
    generated: float  # tokens since the seal, the current one included


# as `Attended`; a number that only the device knows is a tensor [B]
Reading = tuple[float | Tensor, float | Tensor]


def over_steps(steps: int, prompt: float | Tensor, generated: float | Tensor) -> Reading:
    """Return how many prompt tokens and generated tokens `steps` steps have read together, given
    what the last one read. Each step reads the same prompt tokens, and one generated token more
    than the step before."""
    return prompt * steps, generated * steps - steps * (steps - 1) // 2


class KVLayer(ABC):
    """Hold keys and values of one layer for one batch, and attend over them.

    Phases: `prefill` (once, or once per chunk), `seal`, `decode` per token; a further turn repeats
    them. The caller sets the phase; it is never guessed from a shape. All inputs and outputs are on
    `self.request.device`.

    `class MyLayer(KVLayer, capturable=True)` declares that a decode step can be captured in a CUDA
    graph and replayed. A subclass does not inherit this, because what it overrides may count in
    Python or wait for the device."""

    capturable: ClassVar[bool] = False
    # attributes for the record that do not count as bytes of the cache
    diagnostics: ClassVar[tuple[str, ...]] = ()

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
        """Store the next prompt chunk without attending. It is called where one dense prefill
        serves several methods, so that another layer computes the attention."""

    @abstractmethod
    def prefill(self, x: AttnInput) -> Tensor:
        """Store the next prompt chunk and attend causally. Return [B H T D]."""

    @abstractmethod
    def seal(self) -> None:
        """Index, compress, evict or move stored tokens, now that the prompt is complete, and before
        the first decode step."""

    @abstractmethod
    def decode(self, x: AttnInput) -> Tensor:
        """Store one new token of each sequence, and attend from it. Return [B H 1 D]."""

    def lend(self, x: AttnInput) -> Tensor:
        """Attend from another layer of the model, which has queries and no keys and values of its own,
        to the tokens that this layer has attended to in the same forward. Nothing is stored. `x.q`
        [B H T D]: of the last T of these tokens. Return [B H T D]."""
        raise NotImplementedError(
            f"{type(self).__name__} lends its rows to no other layer: write `lend`, or choose a model whose layers "
            "all have keys and values of their own."
        )

    def prepare(self) -> None:  # noqa: B027 (most layers have nothing to do)
        """Do what must be done between two steps if one of them is captured or taken together with
        other sequences, such as letting rows go. A plain `decode` does it by itself."""

    def steps_alike(self) -> float:
        """Return how many steps can be taken before `prepare` must be called again."""
        return inf

    def next_row(self) -> NextRow | None:
        """Return where the next `decode` would store k and v, so that the kernel that computes them
        may write them there at once. None if that place is not known on the device, or if `decode`
        does more with them than store them."""
        return None

    @property
    @abstractmethod
    def attended(self) -> Attended: ...

    def readings(self, steps: int) -> Reading:
        """Return how many prompt tokens and generated tokens the last `steps` steps have read, without
        waiting for the device: a number that only the device knows is a tensor [B] that the next step
        may overwrite. Several steps are counted at once when a layer has taken them together with
        other sequences. Each is taken to have read as many prompt tokens as the last one, and one
        generated token more than the step before it, unless the layer overrides this."""
        return over_steps(steps, *self.attended)

    @abstractmethod
    def read_positions(self) -> Tensor | None:
        """Return the positions in the prompt of the tokens that the last step read, [B G K] without
        repeats, -1 where a head read fewer; None if it read all."""

    def selected_positions(self) -> Tensor | None:
        """Return the positions in the prompt of the tokens that each selecting head read in the
        last step: [B G K], or [B H K] if query heads choose for themselves. None if all were
        read."""
        return self.read_positions()

    def union_excess(self) -> Tensor | None:
        """Return how many prompt tokens a KV head read in the last step beyond what one of its
        query heads read, [B], the mean over heads; None if KV heads choose. It is called between
        steps, so it must not wait for the device."""
        return None

    @property
    def bytes_read(self) -> float | None:
        """Return the bytes of keys and values that the last step read, in all sequences; None if
        the layer does not know. A token counts once per KV head, however many of its query heads
        read it."""
        return None

    def generated_positions(self) -> Tensor | None:
        """Return the positions in the text of the generated tokens that the last step read,
        [B G K], or [B H K] if query heads keep their own; None if it read all of them."""
        return None

    def grow(self, more: int) -> None:
        """Make room for `more` tokens beyond the request's capacity. Tensors are moved, so decode
        steps that were captured in a CUDA graph must not be replayed any more."""
        self.request = self.cache.request = replace(
            self.request, capacity=self.request.capacity + more
        )

    def reopen(self) -> None:  # noqa: B027 (most layers hold all they have on the device)
        """Undo what `seal` moved, such as tokens on another tier, before a further turn of the
        conversation, whose prompt attends to everything."""

    def state(self) -> dict[str, Tensor]:
        """End the turn and return, by name, all that a further turn needs of this layer. The
        tensors are views: copy what should outlive the layer. A tensor whose name has a part `far`
        lies away from the device and may stay there; others are put on the device when they are
        restored."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be saved between turns: write `state` and `restore`."
        )

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over, in a layer that has seen no token, what another layer's `state` returned, so
        that a further turn may begin."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be restored: write `state` and `restore`."
        )

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Return what is left of `state` when a conversation's history is cut, except keys, values
        and positions. Of every head the entries of the `first` and of the `last` stored tokens
        remain, joined as if these tokens followed one another. `state` was taken after `reopen`. If
        it has `rotated` [B heads S], these are the positions by which keys are rotated, where they
        differ from the tokens' own."""
        return {}

    def capture_refusal(self) -> str | None:
        """Return the reason for which a decode step of this layer, after its prompt, cannot be
        captured in a CUDA graph (methods/base/state.py); None if it can."""
        return None if self.capturable else undeclared(type(self))

    def count_replayed(self, steps: int) -> None:
        """Add `steps` to what this layer counts in Python, such as its number of tokens: so many
        steps were replayed from a captured one, which does not call `decode`."""
        raise NotImplementedError(
            f"{type(self).__name__} is capturable and must count the steps that are replayed."
        )
