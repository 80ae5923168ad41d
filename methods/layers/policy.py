"""Defines the base classes of policies. A policy is what a method decides in one layer: which
tokens of the prompt stay, and which a decode step reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import proxy

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.base import AttnInput, CacheState, LayerSpec, Method, Reading, Request, over_steps
from methods.base.state import undeclared
from methods.layers.storage import Storage
from methods.pools import KVStore


class Padded(NamedTuple):
    """Mark an attribute in `Policy.of_each` whose tensors differ in length between sequences and
    are copied into one tensor when these step together, with zeros after the shorter ones in
    dimension `dim`. `changes`: steps write to it, so it is copied back afterwards. `most`: the name
    of the attribute that holds the greatest possible length; None: the longest tensor decides."""

    dim: int
    changes: bool = True
    most: str | None = None


OfEach = Mapping[str, int | Padded | None]


class Policy:
    """Decide in one layer what is kept or read. This base class observes every token and attends to
    all that is stored, as Full does.

    In a layer with several policies one attends: the `Read`, else the `Keep`
    (methods/layers/layer.py). The others only `observe`. Before `bind` a policy knows no layer.

    `class MyKeep(Keep, capturable=True)` declares that a decode step can be captured in a CUDA
    graph and replayed. A subclass does not inherit this, because what it overrides may count in
    Python or wait for the device.

    `of_each={"codes": 2}`, not inherited either, declares that several sequences may take a step
    together (methods/layers/batched.py). It names the attributes that a step uses besides the
    store, each with one of three values: the dimension in which the sequences' tensors differ;
    `Padded`, if they differ and steps change them; or None, for numbers and for tensors of one
    shape, which steps may change. An object that can combine itself for several sequences, such as
    an index that grows, has a method `batched`. Its arguments are the objects of all caches, the
    state of the joint step, how many tokens each sequence has seen, and how many slots are free."""

    capturable: ClassVar[bool] = True  # declared by each class for itself, not inherited
    # attributes for the record that do not count as bytes of the cache
    diagnostics: ClassVar[tuple[str, ...]] = ()
    # declared by each class too; None: a step takes one sequence
    of_each: ClassVar[OfEach | None] = {}
    # tensor with room for all tokens -> the dimension of the tokens
    by_room: ClassVar[Mapping[str, int]] = {}

    layer: Storage
    method: Method
    spec: LayerSpec
    cache: CacheState
    request: Request

    def __init_subclass__(
        cls, *, capturable: bool = False, of_each: OfEach | None = None, **more: Any
    ) -> None:
        super().__init_subclass__(**more)
        cls.capturable, cls.of_each = capturable, of_each

    def bind(self, layer: Storage) -> None:
        """Become a policy of `layer`, which has not seen a token yet. The layer owns its policies,
        so a policy refers to it only weakly: otherwise keys and values of a dropped cache would
        stay in memory until the next garbage collection."""
        self.layer, self.method = proxy(layer), layer.method
        self.spec, self.cache, self.request = layer.spec, layer.cache, layer.request

    @property
    def store(self) -> KVStore:
        """Return the store that the layer holds on the device in full precision."""
        return self.layer.store

    @property
    def sealed(self) -> int:
        """Return how many stored tokens belong to the prompt, as it was when it was complete."""
        return self.layer.sealed

    def reopen(self) -> None:
        """Undo what this policy did at the end of the last prompt, before a further turn of the
        conversation, whose prompt attends to everything that is stored."""

    def state(self) -> dict[str, Tensor]:
        """Return what must be stored between turns besides keys and values, because it cannot be
        computed from them. By default that is nothing, and everything is computed again at the end
        of the next prompt."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned; the layer holds its keys and values again."""

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Return `state` (see `state`) for a conversation whose history was cut: of what it holds
        per token, only the entries of the `first` and the `last` stored tokens remain, joined. By
        default `state` is returned as it is, which is right if it has no entries per token."""
        return dict(state)

    def observe(self, x: AttnInput) -> None:
        """Take note of a prompt chunk, which is stored already. It is called where this policy does
        not compute the attention itself: another policy does, or one dense prefill serves several
        methods."""

    def prefill(self, x: AttnInput) -> Tensor:
        """Attend causally from a prompt chunk, whose keys and values are stored already, to all
        that is stored. Return [B H T D]."""
        self.observe(x)
        return self.layer.attend_prompt(x.q)

    def decode(self, x: AttnInput) -> Tensor:
        """Attend from one new token, whose key and value are stored already. Return [B H 1 D]."""
        return self.layer.attend_all(x.q)

    def lend(self, x: AttnInput) -> Tensor:
        """Attend from a layer of the model without keys and values of its own (`KVLayer.lend`) to the
        tokens that this policy's layer holds, in a step whose token it has taken in. Return
        [B H 1 D]."""
        return self.layer.attend_all(x.q)

    @property
    def reading(self) -> Reading:
        """Return how many prompt tokens and generated tokens one head that chooses for itself read in
        the last step, without waiting for the device."""
        left = self.layer.dropped.prompt_left
        prompt = self.sealed if left is None else left
        return prompt, self.layer.stored - prompt

    def readings(self, steps: int) -> Reading:
        """Return how many prompt tokens and generated tokens one head that chooses for itself read
        in the last `steps` steps together (see `KVLayer.readings`)."""
        return over_steps(steps, *self.reading)

    def read_rows(self) -> Tensor | None:
        """Return the prompt tokens that the last step read, as row numbers in the store, [B G K]
        without repeats, -1 where a head read fewer; None if it read all."""
        return None

    def selected_rows(self) -> Tensor | None:
        """Return the prompt tokens that each head which chooses for itself read in the last step,
        as row numbers in the store: [B G K], or [B H K] if query heads choose. None if all were
        read."""
        return self.read_rows()

    def forget(self, count: int, rows: Tensor) -> None:
        """Drop what this policy holds for the last `count` stored tokens, except for those that
        stay: rows [B G K], numbered from the first of these `count`."""

    def form(self) -> Hashable:
        """Return a key that must be equal for sequences whose policies share a decode step. The
        method and the shapes of the layer are compared elsewhere, so the key holds only what else
        must agree."""
        return None

    def link(self, members: Sequence[Policy], joint: Mapping[int, Policy]) -> None:
        """Replace references to policies of other layers, in this policy that takes steps for
        several sequences. `members`: the policies of the single sequences that it stands for;
        `joint`: from the id of any such policy to the one that stands for it. A policy overrides it
        if it refers to other layers."""

    def joined(self) -> dict[str, Tensor]:
        """Return, by name, the tensors that were made for the decode steps of several sequences
        together and that these steps use. Attributes whose tensors stay in each sequence's own
        memory are not among them."""
        held = {name: vars(self).get(name) for name in type(self).of_each or {}}
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    def settle(self) -> None:
        """Wait for background work, such as a clustering, whose result decode steps use. It is
        called before this sequence begins to step together with others."""

    def together_refusal(self) -> str | None:
        """Return the reason for which this policy, in its present state, cannot share its decode
        steps with other sequences; None if it can."""
        return (
            f"{type(self).__name__} chooses for one sequence after the other"
            if self.of_each is None
            else None
        )

    def hand_back(self, member: Policy, own: slice) -> None:
        """Copy what joint steps have changed to `member`, the policy of one of the caches that this
        joint policy stands for. `own`: which of the joint sequences belong to that cache."""
        for name, how in (type(self).of_each or {}).items():
            value = getattr(self, name, None)
            if isinstance(value, Tensor) and isinstance(how, Padded) and how.changes:
                held = getattr(member, name)
                held.copy_(value[own].narrow(how.dim, 0, held.shape[how.dim]))
            elif isinstance(value, Tensor) and how is None:
                setattr(member, name, value[own].clone())

    def grow(self, more: int) -> None:
        """Make room for `more` tokens in those of this policy's tensors that have room for all
        tokens (the class attribute `by_room` names them); the layer's own store has grown
        already."""
        self.request = self.layer.request
        for name, dim in self.by_room.items():
            if (held := vars(self).get(name)) is not None and held.shape[dim]:
                setattr(self, name, pad(held, (0, 0) * (held.dim() - 1 - dim) + (0, more)))

    def capture_refusal(self) -> str | None:
        """Return the reason for which a decode step cannot be captured in a CUDA graph
        (methods/base/state.py); None if it can."""
        return None if self.capturable else undeclared(type(self))

    def count_replayed(self, steps: int) -> None:
        """Add `steps` to what this policy counts in Python: so many steps ran as replays of a
        captured one, which does not call `decode`."""


class Evict(Policy, ABC, capturable=True):
    """Let only a part of the prompt stay after the seal, the end of the prompt; tokens that come
    later all stay.

    If the budget covers the prompt, all of it stays, and `evict` is not called."""

    def size(self, budget: int) -> int:
        """Return how many stored tokens stay if the budget is `budget` tokens. A result of at least
        the number stored means that all stay."""
        return budget

    @abstractmethod
    def evict(self, size: int) -> None:
        """Choose `size` stored tokens and drop the others, by `layer.retain`, or by
        `layer.retain_per_head` if heads keep different numbers of them."""

    def close(self, evicted: int) -> None:
        """Do what remains after the choice at the end of the prompt: `evicted` tokens were dropped,
        and the store holds the others."""


class Keep(Evict, capturable=True):
    """Let only the tokens that `keep` returns stay after the end of the prompt, equally many in
    every head. Where the budget counts prompt and answer (the ability `CountedAnswer`), `keep` is asked
    again while decoding, whenever a new token has no room."""

    @abstractmethod
    def keep(self, size: int) -> Tensor:
        """Return the `size` stored tokens that each KV head keeps, [B G size], ascending.

        It is [B H size] if each query head keeps its own; the store then holds a copy for each.
        """

    def first_and_last(self, first: int, size: int) -> Tensor:
        """Return the numbers of the `first` stored tokens and of the last ones, `size` in all, the
        same for each KV head, [B G size]."""
        device, stored = self.request.device, self.store.length
        rows = [
            torch.arange(first, device=device),
            torch.arange(stored - size + first, stored, device=device),
        ]
        return torch.cat(rows).expand(self.request.batch, self.spec.num_kv_heads, -1)

    def evict(self, size: int) -> None:
        rows, given = self.keep(size), f"{type(self).__name__}.keep returned"
        self.layer.check_rows(given, rows, self.store.length, count=size, ascending=True)
        self.layer.retain(rows)
