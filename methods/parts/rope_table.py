"""Remembers the rotations that the model gave its positions, so that keys can be rotated back and
forth exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops, rope
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, with_free_slots
from methods.base import AttnInput, CacheState, LayerSpec


class RopeTable:
    """Hold cos and sin of every position so far [C R], in one table for all layers of a batch that
    rotate alike and lie on one device (`of_layers`), so that keys can be rotated to other positions and back.

    They are kept as the model computed them: with LongRoPE and dynamic scaling they depend on the
    length of the call, so the rotary module might return others later. The sequences of a batch
    share their positions. Rotations are computed in fp32: in bf16 they would add noise of full rank
    to the keys."""

    def __init__(self, cache: CacheState) -> None:
        self.cache = cache
        self.cos = self.sin = torch.empty(0)
        self.length = 0

    @classmethod
    def of_layers(cls, specs: Sequence[LayerSpec], cache: CacheState) -> list[RopeTable]:
        """Return the table of each layer: one for all that rotate alike, and another for those of a
        model that do not rotate; each device that the model lies on has its own."""
        tables = {(spec.rope_like, spec.device): cls(cache.on(spec.device)) for spec in specs}
        return [tables[spec.rope_like, spec.device] for spec in specs]

    def note(self, x: AttnInput) -> None:
        """Store cos and sin of the new tokens in x. Each layer calls it, and the first call for a
        position does it for all."""
        self._write(x.cos, x.sin, x.start)

    def note_past(self, spec: LayerSpec, tokens: int) -> None:
        """Store cos and sin of the first `tokens` positions, computed anew by the layer's
        `spec.rope`, for a cache that was loaded from storage and has not seen these tokens."""
        dtype = self.cache.request.dtype
        cos, sin = spec.rope(torch.arange(tokens, device=self.cache.request.device))
        self._write(cos.to(dtype), sin.to(dtype), 0)

    def _write(self, cos: Tensor, sin: Tensor, start: int) -> None:
        """Store cos, sin [1 T R] for the positions from `start` on; do nothing if these are
        known."""
        if start < self.length:
            return
        self.length = start + cos.shape[1]
        if start == 0:
            shape = (self.cache.request.capacity, cos.shape[-1])
            self.cos, self.sin = (part.new_empty(shape) for part in (cos, sin))
        self.make_room()
        self.cache.counters.write(cos[0], self.cos, 0, start)
        self.cache.counters.write(sin[0], self.sin, 0, start)

    def make_room(self) -> None:
        """Enlarge the table of cos and sin if the cache may now hold more positions than it has
        rows."""
        more = max(self.cache.request.capacity, self.length) - len(self.cos)
        if more > 0:
            self.cos, self.sin = (pad(part, (0, 0, 0, more)) for part in (self.cos, self.sin))

    def batched(
        self,
        tables: Sequence[RopeTable],
        cache: CacheState,
        seen: int | PerSequence,
        dead: int | None,
    ) -> RopeTable:
        """Return a table of cos and sin that reads and writes those of all `tables`, one per cache,
        for steps that their sequences take together. `cache`: the state of the joint step; `seen`:
        the next position of each sequence; `dead`: how many free slots follow the sequences."""
        return RopeTables(tables, cache, seen, dead)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate rows [B G K D], which have no rotation yet, to `positions`, [K], or [B G K] if KV
        heads differ. Return fp32."""
        return self._apply(ops.rotate, x, positions)

    def rotate_behind(self, x: Tensor, start: int, distance: int, dtype: torch.dtype) -> Tensor:
        """Rotate rows [B G K D], which have no rotation yet, to the position that lies `distance`
        before the next token, which stands at `start`. Return them in `dtype`."""
        at = self.cache.counters.tensor(start - distance, x.device)
        return ops.rotate_to(x, self.cos[None], self.sin[None], at, dtype)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotation of rows [B G K D] that stand at `positions`, [K] or [B G K]. Return
        fp32."""
        return self._apply(partial(rope.unrotate, by=ops.rotate), x, positions)

    def move(self, x: Tensor, positions: Tensor, target: int) -> Tensor:
        """Rotate rows [B G K D] that are rotated to `positions` so that all stand at the one
        position `target`. The dtype stays the same."""
        there_cos, there_sin = self.cos[target].float(), self.sin[target].float()

        def both(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            """Rotate x back by the angle whose cos and sin are given and forward to the position
            `target`, in one rotation."""
            norm = cos.square() + sin.square()
            turn, tilt = cos * there_cos + sin * there_sin, cos * there_sin - sin * there_cos
            return ops.rotate(x, turn / norm, tilt / norm)

        return self._apply(both, x, positions).to(x.dtype)

    def _apply(
        self, way: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, positions: Tensor
    ) -> Tensor:
        cos, sin = self.cos[positions].float(), self.sin[positions].float()
        if positions.dim() == 1:
            return way(x.float(), cos.unsqueeze(0), sin.unsqueeze(0))
        rows = x.float().flatten(0, 1).unsqueeze(1)  # every KV head as a sequence of its own
        return way(rows, cos.flatten(0, 1), sin.flatten(0, 1)).view(x.shape)


class RopeTables(RopeTable):
    """Read and write the tables of cos and sin [C R] of several caches in place, for steps that
    their sequences take together."""

    def __init__(
        self,
        tables: Sequence[RopeTable],
        cache: CacheState,
        seen: int | PerSequence,
        dead: int | None,
    ) -> None:
        self.cache, self._first = cache, seen
        for table in tables:
            table.make_room()
        rows = [
            (table.cos[None], table.sin[None])
            for table in tables
            for _ in range(table.cache.request.batch)
        ]
        self._turns = [with_free_slots(parts, 1, dead) for parts in zip(*rows, strict=True)]
        self._written = [
            Ragged([part[None] for part in turn.parts], dead=dead) for turn in self._turns
        ]
        self.cos, self.sin = (cast(Tensor, turn) for turn in self._turns)
        self._noted = -1  # the last step that is in the tables

    def note(self, x: AttnInput) -> None:
        """Store cos, sin [B 1 R] of each sequence's new token in its own table. Only the first call
        in a step does something."""
        counters = self.cache.counters
        if self._noted == counters.steps:
            return
        self._noted, at = counters.steps, counters.first(self._first, x.cos.device).view(-1, 1, 1)
        for table, new in zip(self._written, (x.cos, x.sin), strict=True):
            ops.put_rows(table, at.expand(len(new), 1, 1), new.unsqueeze(1))

    def rotate_behind(self, x: Tensor, start: int, distance: int, dtype: torch.dtype) -> Tensor:
        """Rotate rows as `RopeTable.rotate_behind` does, where each sequence's next token stands at
        a position of its own and not at `start`. `distance` may be a number per sequence."""
        at = self.cache.counters.first(self._first - distance, x.device)
        return ops.rotate_to(x, *self._turns, at, dtype)
