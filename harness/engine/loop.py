"""Serves loops that know nothing of methods, such as `model.generate`: the caches that they are
given, and what is done to each call of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from harness.engine.batch.cache import SlotsCache
from harness.engine.cache import KVCache, RoomError, Run, UnsupportedError
from kernels.step_inputs import to_device
from methods.base import AttnInput, CacheState, KVLayer

STEP = 1024  # tokens by which a cache grows at least, so that few steps copy its rows
OURS = "leave it out, and the attached method's cache is used"


@dataclass
class LoopUsage:
    """Record how far a cache was used by a loop such as `model.generate`. The record outlives the
    cache."""

    tokens: int = 0
    sealed: bool = False  # in some turn
    fallback: str | None = None  # what the method did instead of its rule in some turn, and why

    def __deepcopy__(self, memo: object) -> LoopUsage:
        """Return this record itself, so that a cache and its copies share it."""
        return self


class LoopCache(KVCache):
    """Hold the cache of a loop that does not say where a prompt ends, such as `model.generate`: the
    number of tokens in a forward tells.

    The first forward is prompt. After it, a forward of several tokens opens a turn or continues it,
    and the first forward of one token seals the cache. Call `open_turn` before a forward of one
    token that is prompt: a turn of one token, or the last token of a prefill in chunks."""

    # raises `ValueError` for a larger capacity; None: never grows
    may_grow: Callable[[int, int], None] | None = None
    # the next forward is prompt even if it brings a single token, which would otherwise be a step
    prompt_next = False

    def __init__(self, layers: Sequence[KVLayer], state: CacheState) -> None:
        super().__init__(layers, state)
        self.usage = LoopUsage()

    def open_turn(self) -> None:
        super().open_turn()
        self.prompt_next = True

    def seal(self) -> None:
        super().seal()
        self.usage.sealed, self.prompt_next = True, False
        self.usage.fallback = self.fallback or self.usage.fallback

    def begin(self, ids: Tensor | None = None) -> None:
        if (
            ids is not None
            and self.before_seal is not None
            and self._is_step(ids.shape[1])
            and not self.sealed
        ):
            self.seal()  # here, because no forward can run within another
        super().begin(ids)

    def end(self) -> None:
        super().end()
        self.usage.tokens = self.num_tokens

    def make_room(self, tokens: int) -> bool:
        """Grow if `tokens` more do not fit and the cache may grow. Return whether it has grown, in
        which case its keys and values lie elsewhere now."""
        needed = self.num_tokens + tokens
        if self.may_grow is None or needed <= self.capacity:
            return False
        more = max(needed - self.capacity, STEP)
        self.may_grow(self.capacity, self.capacity + more)
        self.grow(more)
        return True

    def _check_room(self, sequences: int, tokens: int) -> None:
        self.make_room(tokens)
        super()._check_room(sequences, tokens)

    def _arrive(self, tokens: int) -> None:
        super()._arrive(tokens)
        if not self._is_step(tokens):
            self.sealed = self.prompt_next = False
        elif not self.sealed:
            self.seal()

    def _is_step(self, tokens: int) -> bool:
        """Return whether a forward of so many tokens is a decode step, and not prompt."""
        return tokens == 1 and not self.prompt_next and self.num_tokens > 0


class PaddedCache(LoopCache):
    """Hold the cache of a batch that is padded on the left: one cache for each row (`members`). A
    prompt is computed row by row, without the padding, and steps are taken together, as in a
    `RunningBatch`. Each row gets what it gets alone.

    `num_tokens` counts columns of the loop's tensors, padding included. In a further turn padding
    comes after the last token of the answer, which a loop feeds with the new turn."""

    def __init__(self, members: Sequence[LoopCache]) -> None:
        """`members`: fresh caches of one sequence each."""
        super().__init__(members[0].layers, members[0].state)
        self._members = tuple(members)
        # steps the members together; made again after their memory moved
        self._slots: SlotsCache | None = None
        self._alike = inf  # steps that `_slots` can take
        # [B columns], mask of the forwards so far
        self._mask = torch.empty(len(members), 0, dtype=torch.bool)
        self._turn = 0  # the column with which the turn began
        self._upcoming = self._mask  # mask including the current forward
        # per row, the columns of the current forward that hold tokens
        self._tokens: list[Tensor] = []

    @property
    def members(self) -> tuple[LoopCache, ...]:
        """Return the caches of the rows, one each, up to date with every step so far."""
        self._catch_up()
        return self._members

    @property
    def capacity(self) -> int:
        return max(member.capacity for member in self._members)

    def read_mask(self, mask: Tensor | None, tokens: int, device: torch.device) -> Tensor:
        """Find by `mask` [B columns] which of the next forward's `tokens` columns hold tokens in
        each row; None: all do. Return the positions of these tokens [B tokens]."""
        if mask is None:
            mask = torch.cat([self._mask, self._mask.new_ones(len(self._members), tokens)], 1)
        self._check_room(len(mask), tokens)
        mask = mask.bool().cpu()
        self._catch_up()
        before, new = mask.split([mask.shape[1] - tokens, tokens], 1)
        if not torch.equal(before, self._mask):
            raise UnsupportedError(
                "The attention mask differs from that of earlier forwards: pass it for all tokens so far, with padding."
            )
        if self.sealed:
            self._turn = self.num_tokens
        turn = mask[:, self._turn + (self._turn > 0) :]
        if not torch.equal(turn, turn.cummax(1).values):
            raise UnsupportedError(
                "The attention mask hides tokens after the first of a row: only padding on the left is supported "
                "(tokenizer.padding_side='left')."
            )
        if tokens == 1 and self._turn == self.num_tokens and not new.all():
            raise UnsupportedError(
                "The mask hides the only token of a row: a step takes one token of every row."
            )
        self._upcoming = mask
        self._tokens = [to_device(row.nonzero().view(-1), device) for row in new]
        begins = torch.tensor([member.num_tokens for member in self._members]).view(-1, 1)
        return to_device((begins + new.cumsum(1) - 1).clamp(min=0), device)

    def text_lengths(self, arriving: int) -> list[int]:
        """Return the length of each row's text, by which the model rotates it. Raises
        `UnsupportedError` if a shorter row outgrows the rotation of its stored keys:
        `model.generate` computes a batch again only where its longest row does."""
        pairs = list(zip(self._members, self._tokens, strict=True))
        if any(member.outgrows and len(tokens) == 1 for member, tokens in pairs):
            raise UnsupportedError(
                "A shorter row of this padded batch outgrows the length up to which the model rotates its keys as they "
                "are stored: give such texts one at a time, or to harness.Engine, which computes each again."
            )
        return [member.note_length(member.num_tokens + len(tokens)) for member, tokens in pairs]

    def open_turn(self) -> None:
        super().open_turn()
        self._part()

    def seal(self) -> None:
        for member in self._members:
            if not member.prompt_next:
                member.seal()
        self.sealed, self.prompt_next = True, False

    def begin(self, ids: Tensor | None = None) -> None:
        super().begin()
        for member in self._members:
            member.begin()

    def end(self) -> None:
        self.num_tokens += self._arriving
        if self._arriving:
            self._mask = self._upcoming
        if self.sealed and self._slots is not None:
            self._slots.end()
        else:
            for member in self._members:
                member.end()

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        if not self._arriving:
            self.expect(x.k.shape[0], x.k.shape[2])
        if self.sealed and self._slots is not None:
            return self._slots.attend(layer, x)
        out = x.q.new_zeros(*x.q.shape[:3], x.v.shape[3])
        for row, (member, tokens) in enumerate(zip(self._members, self._tokens, strict=True)):
            if len(tokens):
                out[row, :, tokens] = member.attend(layer, _row(x, row, tokens, member.num_tokens))[
                    0
                ]
        return out

    def lend(self, layer: int, x: AttnInput) -> Tensor:
        if self.sealed and self._slots is not None:
            return self._slots.lend(layer, x)
        out = x.q.new_zeros(*x.q.shape[:3], x.v.shape[3])
        first = x.k.shape[2] - x.q.shape[2]  # columns whose queries the model has left out
        x = replace(x, k=x.k[:, :, first:], v=x.v[:, :, first:])
        for row, (member, tokens) in enumerate(zip(self._members, self._tokens, strict=True)):
            asked = tokens[tokens >= first] - first
            if len(asked):
                out[row, :, asked] = member.lend(layer, _row(x, row, asked, member.num_tokens))[0]
        return out

    def advance_state(self, layer: int, run: Run, hidden: Tensor) -> Tensor:
        if not self._arriving:
            self.expect(*hidden.shape[:2])
        if self.sealed and self._slots is not None:
            return self._slots.advance_state(layer, run, hidden)
        out = torch.zeros_like(hidden)
        for row, (member, tokens) in enumerate(zip(self._members, self._tokens, strict=True)):
            if len(tokens):
                own = hidden[row : row + 1].index_select(1, tokens)
                out[row, tokens] = member.advance_state(layer, run, own)[0]
        return out

    def contents(self) -> list[dict[str, Tensor]]:
        raise UnsupportedError(
            "Rows of a padded batch are caches of their own: ask each of cache.members."
        )

    def refill(self, contents: Sequence[Mapping[str, Tensor]]) -> None:
        self.contents()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        self._part()
        return super().__deepcopy__(memo)

    def _check_room(self, sequences: int, tokens: int) -> None:
        if sequences != len(self._members):
            raise RoomError(
                f"The cache holds {len(self._members)} padded rows and {sequences} arrive: go on with those."
            )

    def _arrive(self, tokens: int) -> None:
        super()._arrive(tokens)
        if not self.sealed:
            self._part()
            for member in self._members:
                member.open_turn()
        # such a row steps alone, and so do the others
        elif any(member.prompt_next for member in self._members):
            self._part()
        else:
            self._catch_up()
            for member in self._members:
                if not member.sealed:
                    member.seal()
            grown = any([member.make_room(1) for member in self._members])
            if grown or self._slots is None or self._slots.counters.steps >= self._alike:
                for member in self._members:
                    member.prepare()
                self._slots = SlotsCache(self._members)
                self._alike = self._slots.steps_alike()
            self._slots.begin()

    def _part(self) -> None:
        """Bring the caches of all rows up to date and drop their joint cache. Each row then goes on
        by itself until the rows take a step together again."""
        self._catch_up()
        self._slots = None

    def _catch_up(self) -> None:
        """Update the cache of each row with the steps that were counted for all rows at once, and
        with what the last of these steps chose for it."""
        if self._slots is not None:
            for number in range(len(self._members)):
                self._slots.catch_up(number)


def _row(x: AttnInput, row: int, tokens: Tensor, start: int) -> AttnInput:
    """Return the attention input of one row at its columns `tokens` [N], which leaves out its
    padding. `start`: the position of the first of them."""
    own = slice(row, row + 1)
    q, k, v = (part[own].index_select(2, tokens) for part in (x.q, x.k, x.v))
    cos, sin, hidden = (part[own].index_select(1, tokens) for part in (x.cos, x.sin, x.hidden))
    index = None if x.index is None else x.index.part(own, tokens)
    return AttnInput(q, k, v, cos, sin, hidden, start, index=index)


class LoopCalls:
    """Prepare each call of an attached model: replace None or an empty `DynamicCache`, which
    `generate`, `pipeline` and `model(ids)` bring, by a cache of ours, and split batches that are
    padded on the left."""

    def __init__(self, make: Callable[..., LoopCache], check: Callable[[], None]) -> None:
        """`make(batch=..., tokens=...)`: returns a cache for `batch` sequences whose first forward
        brings `tokens` tokens. `check`: raises an error where the model may not read a prompt."""
        self.make, self.check = make, check

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the call's keywords with our cache and without a mask that has been read. Raises
        `UnsupportedError` for what our caches would compute wrongly."""
        call = kwargs.copy()
        if args:
            call |= zip(signature(model.forward).parameters, args, strict=False)
        given, mask = call.get("past_key_values"), call.get("attention_mask")
        arriving: Tensor = (
            call["inputs_embeds"] if call.get("input_ids") is None else call["input_ids"]
        )
        batch, tokens = arriving.shape[:2]
        plain = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == batch
        if mask is not None and not plain:
            raise UnsupportedError(
                f"A custom attention mask was given: only padding on the left is supported, as [{batch} S]."
            )
        padded = mask is not None and not bool(mask.all())
        if isinstance(given, KVCache):
            if tokens > 1:  # a prompt, and no step of an answer
                self.check()
        else:
            _refuse(given, call.get("use_cache"), model)
            rows = batch if padded else 1
            members = [self.make(batch=batch // rows, tokens=tokens) for _ in range(rows)]
            fresh = PaddedCache(members) if padded else members[0]
            if given is not None:  # loops go on with the object that they made and passed
                vars(given).clear()
                given.__class__ = type(fresh)
                vars(given).update(vars(fresh))
            call["past_key_values"] = given = fresh if given is None else given
        if isinstance(given, PaddedCache):
            positions = given.read_mask(mask, tokens, arriving.device)
            _refuse_positions(call.get("position_ids"), positions, mask)
            call["position_ids"] = positions
        elif padded:
            raise UnsupportedError(
                "This cache holds rows of equal length and the mask pads some: leave past_key_values out in the first "
                "turn, or give turns of equal length."
            )
        # it has been read, and each look at it would wait for a GPU
        return call | {"attention_mask": None}


def _refuse_positions(given: Tensor | None, positions: Tensor, mask: Tensor | None) -> None:
    """Raise `UnsupportedError` if the caller's position_ids give the tokens of padded rows other
    `positions` [B T] than they have in a text of their own."""
    if given is None:
        return
    tokens = positions.shape[1]
    real = torch.ones_like(positions, dtype=torch.bool)
    if mask is not None:
        real = mask[:, -tokens:].to(real)
    given = given[:, -tokens:].to(positions).expand_as(positions)
    if not torch.equal(given[real], positions[real]):
        raise UnsupportedError(
            "position_ids of padded rows are not 0, 1, 2, ... after the padding: leave them out."
        )


def _refuse(given: object, use_cache: bool | None, model: Any) -> None:
    """Raise `UnsupportedError` unless a cache of ours may replace `given`, the past_key_values of a
    call: None or an empty DynamicCache."""
    if use_cache is False or (use_cache is None and model.config.use_cache is False):
        raise UnsupportedError(
            "use_cache=False leaves an attached method without a cache: leave it out."
        )
    if given is None:
        return
    if type(given) is not DynamicCache:
        raise UnsupportedError(
            f"A {type(given).__name__} (cache_implementation=...) was given: {OURS}."
        )
    if given.offloading:
        raise UnsupportedError(
            f"cache_implementation='offloaded' was given: {OURS}; placement=host moves its tokens."
        )
    if given.get_seq_length():
        raise UnsupportedError(
            f"The DynamicCache holds {given.get_seq_length()} tokens of a model without method: {OURS}."
        )
