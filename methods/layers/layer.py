"""Defines the layer that every method uses. It stores keys and values and calls the policies, which
decide what is kept of the prompt and what a decode step reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import ClassVar

from torch import Tensor

from methods.base import (
    Attended,
    AttnInput,
    CacheState,
    KVLayer,
    LayerSpec,
    Method,
    NextRow,
    Reading,
)
from methods.base.request import ROTATION
from methods.layers.ability_state import AbilityState
from methods.layers.dropped import Dropped
from methods.layers.indices import read_together
from methods.layers.policy import Evict, Policy
from methods.layers.read import Read
from methods.layers.storage import Storage
from methods.layers.weights import ChoiceWeights
from methods.parts.rope_table import RopeTable
from methods.tiers.tier import DEVICE, HOST


class Layer(Storage, capturable=True):
    """Store keys and values of one layer, and let policies decide what happens with them. While the
    prompt comes, all of it is stored. At the seal, the end of the prompt, a `Keep` policy decides
    which tokens stay, and a `Read` policy prepares to choose the tokens that each decode step
    reads; those that are read only if chosen may move to another tier or be quantised. Without a
    `Read`, tokens that stayed when others left may be quantised. Without policies everything is
    kept and read."""

    def __init__(
        self, spec: LayerSpec, cache: CacheState, method: Method, *policies: Policy
    ) -> None:
        """Bind the policies to this layer: at most one `Evict` and one `Read`, and any number of
        others that only observe the tokens."""
        super().__init__(spec, cache, method)
        self.policies = policies or (Policy(),)
        self.keeps = next((policy for policy in policies if isinstance(policy, Evict)), None)
        self.reads = next((policy for policy in policies if isinstance(policy, Read)), None)
        self.attends = self.reads or self.keeps or self.policies[0]
        abilities = (*method.abilities, *self.request.abilities)
        started = [state for ability in abilities if (state := ability.start(self)) is not None]
        self.policies += tuple(started)
        self.states = [state for state in started if isinstance(state, AbilityState)]
        self.acting: list[AbilityState] = []  # those of `states` that act before each step
        if self.reads is not None:
            self.reads.weights = next(
                (policy for policy in self.policies if isinstance(policy, ChoiceWeights)), None
            )
        for policy in self.policies:
            policy.bind(self)

    def absorb(self, x: AttnInput) -> None:
        if not self.method.dense_prefill:
            raise ValueError(
                f"{type(self.method).__name__} computes its prompt differently from Full, so it cannot share a "
                "prefill: set shared_prefill=false."
            )
        self._open(x)
        for policy in self.policies:
            policy.observe(x)

    def prefill(self, x: AttnInput) -> Tensor:
        self._open(x)
        for policy in self.policies:
            if policy is not self.attends:
                policy.observe(x)
        return self.attends.prefill(x)

    def seal(self) -> None:
        self.reopen()
        for state in self.states:
            state.before_seal()
        limit, before = self.limit(), self.evicted
        size = None if limit is None or self.keeps is None else self.keeps.size(limit)
        if self.keeps is not None and size is not None and size < self.store.length:
            self.keeps.evict(size)
        elif self.evicted:
            self.positions = self.stored_positions()
        if self.keeps is not None:
            self.keeps.close(self.evicted - before)
        self.sealed = self.store.length
        self.dropped = Dropped(self.seen)
        for state in self.states:
            state.after_keep()
        if self.reads is not None:
            self.reads.seal(limit)
            away = self.reads.away(self.reads.plan) if self.reads.plan is not None else None
            if away is not None and self.request.pooled:
                self.reads.sent_away(self.send_away(*away))
        self.prompt_rows, self.closed = self.store.length, True
        self.acting = [state for state in self.states if state.after_seal()]

    def prepare(self) -> None:
        for state in self.acting:
            state.before_step()

    def steps_alike(self) -> float:
        return min((state.idle_steps() for state in self.acting), default=inf)

    def next_row(self) -> NextRow | None:
        return self.store.next_row() if self.heads == self.spec.num_kv_heads else None

    def decode(self, x: AttnInput) -> Tensor:
        for state in self.acting:
            state.before_step()
        self.take_in(x)
        return self.attends.decode(x)

    def lend(self, x: AttnInput) -> Tensor:
        return self.attends.lend(x) if self.closed else self.attend_prompt(x.q)

    def joined(self, layers: Sequence[Layer], dead: int | None) -> None:
        """Combine the attributes that a subclass holds in addition to store, pool and policies,
        when this layer has just been made to take decode steps for the sequences of all `layers`
        together. `dead`: how many free slots, places for sequences that join later, follow them;
        None: there are no slots. A subclass with its own `decode` can take such joint steps only if
        it overrides this."""

    def link(self, layers: Sequence[Layer], joint: Mapping[int, Layer]) -> None:
        """Replace references to other layers of the model, in this layer that takes steps for
        several sequences, by references to the layers that do so there. `layers`: those of the
        single sequences that this one stands for; `joint`: from the id of any such layer to the
        layer that stands for it. A subclass overrides it if its layers refer to one another."""

    def together_refusal(self) -> str | None:
        """Return the reason for which this layer, in its present state, cannot share its decode
        steps with other sequences; None if it can."""
        return None

    @property
    def attended(self) -> Attended:
        prompt, generated = (
            x.double().mean().item() if isinstance(x, Tensor) else x for x in self.attends.reading
        )
        return Attended(prompt, generated)

    def readings(self, steps: int) -> Reading:
        return self.attends.readings(steps)

    def read_positions(self) -> Tensor | None:
        rows = self.attends.read_rows()
        return self.kept_positions() if rows is None else self.positions_of(rows)

    def selected_positions(self) -> Tensor | None:
        rows = self.attends.selected_rows()
        return self.dropped.of_prompt(self.positions) if rows is None else self.positions_of(rows)

    def union_excess(self) -> Tensor | None:
        """Return how many prompt tokens a KV head read in the last step beyond what one of its
        query heads read, [B], the mean over heads; None if all query heads of a KV head read the
        same. It is computed without a sort, and without waiting for the device."""
        choice = (
            self.positions if self.reads is None or self.reads.plan is None else self.reads.rows
        )
        if choice is None or choice.shape[1] == self.spec.num_kv_heads:
            return None
        selected = self.selected_positions()
        assert selected is not None
        union = read_together(selected, self.spec.num_kv_heads, self.seen).sum(-1)
        return union.double().mean(1) - (selected >= 0).sum(-1).double().mean(1)

    @property
    def bytes_read(self) -> float:
        """Return the bytes of keys and values that the last step read, in all sequences, in the
        size in which they are held: quantised ones count less. Keys that are rebuilt from factors
        count as plain rows, and copies of keys that estimated weights (`Budget.mass`) on top."""
        rows, far = self.attends.read_rows(), self.far
        heads, (prompt, generated) = self.request.batch * self.heads, self.attended
        if self.heads != self.spec.num_kv_heads:
            rows = None  # then each head has copies of its own
        size = self.spec.row_channels * self.request.dtype.itemsize
        listed = prompt * heads if rows is None else self._count(rows, 0, self.seen)
        read = (listed + generated * heads) * size
        if far is not None:
            first, last = self.first_far, self.first_far + far.encoded
            coded = far.encoded * heads if rows is None else self._count(rows, first, last)
            read += coded * (far.token_bytes - size)
        if self.reads is not None and self.reads.weights is not None:
            read += self.reads.weights.bytes_read
        return read

    def state(self) -> dict[str, Tensor]:
        of_policies = {
            f"{number}.{name}": x
            for number, policy in enumerate(self.policies)
            for name, x in policy.state().items()
        }
        return self.contents() | of_policies

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.refill(state)
        self.closed = True
        for number, policy in enumerate(self.policies):
            policy.restore(_within(state, number))

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        for number, policy in enumerate(self.policies):
            of_policy = policy.truncate(_within(state, number), first, last)
            kept |= {f"{number}.{name}": x for name, x in of_policy.items()}
        return kept

    def capture_refusal(self) -> str | None:
        if self.request.placement not in (DEVICE, HOST):
            return f"placement={self.request.placement} reads the chosen rows from files"
        if self.request.reuse_steps:
            return f"reuse_steps={self.request.reuse_steps} lets one step choose and others not"
        reasons = (policy.capture_refusal() for policy in self.policies)
        return next((reason for reason in reasons if reason), super().capture_refusal())

    def count_replayed(self, steps: int) -> None:
        self.store.advance(steps)
        self.seen += steps
        for policy in self.policies:
            policy.count_replayed(steps)

    @staticmethod
    def _count(rows: Tensor, start: int, end: int) -> int:
        """Count the entries of rows whose value lies from `start` up to, but not including,
        `end`."""
        return int(((rows >= start) & (rows < end)).sum())

    def _open(self, x: AttnInput) -> None:
        self.reopen()
        self.take_in(x)

    def reopen(self) -> None:
        if not self.closed:
            return
        self.closed = False
        for policy in self.policies:
            policy.reopen()
        self.bring_back()
        self.acting = []
        if self.dropped.prompt_left is None:
            self.prompt_rows = self.sealed
        if self.most is not None:
            self.most = None
            self.store.resize(self.room(self.store.length))

    def grow(self, more: int) -> None:
        super().grow(more)
        self.store.resize(self.room(self.store.length))
        for policy in self.policies:
            policy.grow(more)


class PolicyMethod(Method):
    """Define a method whose layers are all of the class `layer`, which stores keys and values and asks
    policies what to keep and read: one new policy of each class in `policies`."""

    layer: ClassVar[type[Layer]] = Layer
    policies: ClassVar[tuple[type[Policy], ...]] = ()

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        return [
            self.layer(spec, cache, self, *(policy() for policy in self.policies)) for spec in specs
        ]


class RotatingMethod(PolicyMethod):
    """Define a method whose policies rotate keys: each is made with its layer's `RopeTable`, which
    remembers the rotations of all positions."""

    needs = (ROTATION,)
    policies: ClassVar[tuple[Callable[[RopeTable], Policy], ...]]  # type: ignore[assignment]

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        tables = RopeTable.of_layers(specs, cache)
        return [
            self.layer(spec, cache, self, *(policy(table) for policy in self.policies))
            for spec, table in zip(specs, tables, strict=True)
        ]


def _within(state: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return the part of a layer's saved state that belongs to its policy `number`, with the prefix
    of that policy removed from the names."""
    prefix = f"{number}."
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
