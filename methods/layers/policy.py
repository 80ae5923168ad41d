"""Defines what a method decides in a layer: the base class of all policies, which keeps and reads
everything, and those that choose what stays of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import proxy

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.base import Attended, AttnInput, CacheState, LayerSpec, Method, Request
from methods.base.state import undeclared
from methods.layers.storage import Storage
from methods.pools import KVStore


class Padded(NamedTuple):
    """Mark tensors of several sequences that are joined with zeros after the shorter ones in
    dimension `dim`, and say whether steps change them. `most`: the attribute with the greatest
    possible length."""

    dim: int
    changes: bool = True
    most: str | None = None


OfEach = Mapping[str, int | Padded | None]


class Policy:
    """Observe every token of a layer, and attend: this base class to all that is stored, as Full
    does.

    In a layer with several policies one attends, the `Read`, else the `Keep`
    (methods/layers/layer.py); the others only `observe`. Before `bind` a policy knows no layer.

    `class MyKeep(Keep, capturable=True)` declares that a decode step can be captured in a graph and
    replayed. A subclass does not inherit this, because what it overrides may count in Python or
    wait for the device.

    `of_each={"codes": 2}`, not inherited either, declares that several sequences may take a step
    together (methods/layers/batched.py), and names the attributes that a step uses besides the
    store, each with the dimension in which sequences differ, with `Padded` if steps change such
    tensors, or with None for tensors of one shape, which steps may change, and for numbers. An
    object that can combine itself for several sequences, as an index that grows, has a method
    `batched`; it gets the objects of all caches, the state of the joint step, how many tokens each
    sequence has seen, and how many slots are free."""

    capturable: ClassVar[bool] = True  # declared by each class for itself, not inherited
    diagnostics: ClassVar[tuple[str, ...]] = ()  # attributes for the record that do not count as bytes of the cache
    of_each: ClassVar[OfEach | None] = {}  # declared by each class too; None: a step takes one sequence
    by_room: ClassVar[Mapping[str, int]] = {}  # tensor with room for all tokens -> the dimension of the tokens

    layer: Storage
    method: Method
    spec: LayerSpec
    cache: CacheState
    request: Request

    def __init_subclass__(cls, *, capturable: bool = False, of_each: OfEach | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.capturable, cls.of_each = capturable, of_each

    def bind(self, layer: Storage) -> None:
        """Become a policy of `layer`, which has not seen a token yet and owns this policy. The
        policy only refers to the layer weakly: otherwise keys and values of a dropped cache would
        stay in memory until the next garbage collection."""
        self.layer, self.method = proxy(layer), layer.method
        self.spec, self.cache, self.request = layer.spec, layer.cache, layer.request

    @property
    def store(self) -> KVStore:
        """Return the store that the layer holds on the device in full precision."""
        return self.layer.store

    @property
    def sealed(self) -> int:
        """Return how many stored tokens belong to the sealed prompt."""
        return self.layer.sealed

    def reopen(self) -> None:
        """Undo what the seal moved, before a further turn, whose prompt attends to everything."""

    def state(self) -> dict[str, Tensor]:
        """Return what must be stored between turns besides keys and values, because it cannot be
        computed from them. By default that is nothing, and everything is computed again at the next
        seal."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; the layer holds its keys and values again."""

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Return the parts of `state` that belong to the `first` and the `last` stored tokens, as
        if these were stored one after the other, because a conversation's history was cut. By
        default that is all of it, as for a state without entries per token."""
        return dict(state)

    def observe(self, x: AttnInput) -> None:
        """Note a prompt chunk that has been stored, while another policy, or a shared prefill,
        attends."""

    def prefill(self, x: AttnInput) -> Tensor:
        """Attend causally, after a prompt chunk has been stored. Return [B H T D]."""
        self.observe(x)
        return self.layer.attend_prompt(x.q)

    def decode(self, x: AttnInput) -> Tensor:
        """Attend, after a token has been stored. Return [B H 1 D]."""
        return self.layer.attend_all(x.q)

    @property
    def attended(self) -> Attended:
        return Attended(self.sealed, self.layer.stored - self.sealed)

    @property
    def reading(self) -> tuple[float | Tensor, float]:
        """Return `attended` without waiting for the device (see `KVLayer.reading`)."""
        return self.attended

    def readings(self, steps: int) -> tuple[float | Tensor, float]:
        """Return the sums of `reading` over the last `steps` steps (see `KVLayer.readings`)."""
        prompt, generated = self.reading
        return prompt * steps, generated * steps - steps * (steps - 1) // 2

    def read_rows(self) -> Tensor | None:
        """Return the stored prompt tokens that the last step read, [B G K] without repeats, -1
        where a head read fewer; None for all."""
        return None

    def selected_rows(self) -> Tensor | None:
        """Return the stored prompt tokens that each selecting head read in the last step, [B H K]
        if query heads choose for themselves."""
        return self.read_rows()

    def keep_generated(self, count: int, size: int) -> Tensor:
        """Return the `size` of `count` generated tokens that every KV head keeps when
        `budget_generated` has no room for more, as [B G size], ascending. By default these are the
        last ones."""
        shape = (self.request.batch, self.layer.heads, -1)
        return torch.arange(count - size, count, device=self.request.device).expand(shape)

    def forget(self, count: int, rows: Tensor) -> None:
        """Drop what belongs to the last `count` stored tokens, except to `rows` [B G K] of them."""

    def form(self) -> Hashable:
        """Return what sequences must share to take steps together, besides the method and the
        shapes of a layer."""
        return None

    def link(self, members: Sequence[Policy], joint: Mapping[int, Policy]) -> None:
        """Find the policies of other layers, in a joint policy of several `members`. `joint`: the
        id of a member's policy -> the joint policy that steps instead of it."""

    def joined(self) -> dict[str, Tensor]:
        """Return the tensors of all sequences that steps of this joint policy use, except those
        that stay where they are."""
        held = {name: vars(self).get(name) for name in type(self).of_each or {}}
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    def settle(self) -> None:
        """Wait for background work whose results steps use, before steps with other sequences
        begin."""

    def together_refusal(self) -> str | None:
        """Return why this policy, in its present state, takes its steps for one sequence after the
        other, or None."""
        return f"{type(self).__name__} chooses for one sequence after the other" if self.of_each is None else None

    def hand_back(self, member: Policy, own: slice) -> None:
        """Give `member`, whose sequences are the `own` ones of this joint policy, what steps have
        changed."""
        for name, how in (type(self).of_each or {}).items():
            value = getattr(self, name, None)
            if isinstance(value, Tensor) and isinstance(how, Padded) and how.changes:
                held = getattr(member, name)
                held.copy_(value[own].narrow(how.dim, 0, held.shape[how.dim]))
            elif isinstance(value, Tensor) and how is None:
                setattr(member, name, value[own].clone())

    def grow(self, more: int) -> None:
        """Make room for `more` tokens in what is held besides the store, which has grown
        already."""
        self.request = self.layer.request
        for name, dim in self.by_room.items():
            if (held := vars(self).get(name)) is not None and held.shape[dim]:
                setattr(self, name, pad(held, (0, 0) * (held.dim() - 1 - dim) + (0, more)))

    def capture_refusal(self) -> str | None:
        """Return why a decode step of the sealed layer cannot be captured
        (methods/base/state.py), or None."""
        return None if self.capturable else undeclared(type(self))

    def count_replayed(self, steps: int) -> None:
        """Update what is counted in Python after `steps` steps that were replayed without
        `decode`."""


class Evict(Policy, ABC, capturable=True):
    """Let a part of the prompt stay after the seal; what is stored later is kept whole.

    If the budget covers the prompt nothing is evicted, and `evict` is not called.
    """

    def size(self, budget: int) -> int:
        """Return how many tokens stay under a budget of `budget` tokens; if it is no less than the
        number stored, all stay."""
        return budget

    @abstractmethod
    def evict(self, size: int) -> None:
        """Choose `size` tokens and drop the others, by `layer.retain`, or by
        `layer.retain_per_head` if heads keep different numbers of them."""

    def close(self, evicted: int) -> None:
        """Finish the seal: `evicted` tokens have left by this choice, and the store holds the
        others."""


class Keep(Evict, capturable=True):
    """Keep only the tokens that `keep` returns, equally many in every head."""

    @abstractmethod
    def keep(self, size: int) -> Tensor:
        """Return the `size` stored tokens that each KV head keeps, [B G size], ascending.

        It is [B H size] if each query head keeps its own; the store then holds a copy for each.
        """

    def first_and_last(self, first: int, size: int) -> Tensor:
        """Return the `first` stored tokens and the last ones, `size` in all, for each KV head,
        [B G size]."""
        device, stored = self.request.device, self.store.length
        rows = [torch.arange(first, device=device), torch.arange(stored - size + first, stored, device=device)]
        return torch.cat(rows).expand(self.request.batch, self.spec.num_kv_heads, -1)

    def evict(self, size: int) -> None:
        rows, given = self.keep(size), f"{type(self).__name__}.keep returned"
        self.layer.check_rows(given, rows, self.store.length, count=size, ascending=True)
        self.layer.retain(rows)
