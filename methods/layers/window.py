"""Defines the layer for a sliding window of the model: it keeps and reads the last `window` tokens,
whatever the method, and says which layers of a model belong to the method.

A method gets the layers that see the whole text, numbered among themselves, as if the model had no
others: budgets per layer, dense layers, a pyramid and a guess for the next layer count only these.
A model that slides in every layer (Mistral 7B v0.1, Phi-3 mini 4k) is a dense one for a method as
long as the text fits into its window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import sink_logits
from kernels.reference import Segment
from methods.base import Attended, AttnInput, CacheState, KVLayer, LayerSpec, Method
from methods.pools.device_store import misfit


class WindowLayer(KVLayer, capturable=True):
    """Hold keys and values of a layer in which the model itself slides: only the last `window`
    tokens are kept, in a ring in which a decoded token replaces the oldest. A prompt chunk attends
    together with the window before it, so a token sees the same however the prefill is split.

    `prefill` replaces the tensors of the ring, so a shallow copy of the layer is a snapshot until
    it decodes."""

    def __init__(self, spec: LayerSpec, cache: CacheState) -> None:
        super().__init__(spec, cache)
        assert spec.window is not None
        self.window = spec.window
        request = self.request
        self.size = min(self.window, request.capacity)  # rows of the ring
        shape = (request.batch, spec.num_kv_heads, self.size)
        # keys and values, [B G W D] each
        self.rows = [
            torch.empty(*shape, width, dtype=request.dtype, device=request.device)
            for width in (spec.head_dim, spec.value_channels)
        ]
        # of the prompt's last chunk and the window before it, [B G S D] each, where other layers read them
        self.passing: list[Tensor] | None = None
        self.written = 0  # tokens since the first row; counted round the ring, the next one's row
        self.seen = self.sealed = 0

    def absorb(self, x: AttnInput) -> None:
        self._take(x)

    def prefill(self, x: AttnInput) -> Tensor:
        rows = self._take(x)
        self.passing = rows if self.spec.borrowers else None
        return self._attend(x.q, rows)

    def lend(self, x: AttnInput) -> Tensor:
        if self.passing is not None:
            return self._attend(x.q, self.passing)
        scale, sinks = self.spec.scale, self.spec.sink_logits
        return sink_logits.segment_attention(x.q, [self._stored()], scale, sinks)

    def repeat(self, x: AttnInput) -> Tensor:
        """Attend as `methods.abilities.repeat.attend_again` says."""
        return self._attend(x.q, self._followed_by(x))

    def _attend(self, q: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Attend from the queries of the last of these keys and values [B G S D], q [B H T D], each
        to its window."""
        k, v = rows
        scale, sinks = self.spec.scale, self.spec.sink_logits
        return sink_logits.windowed_attention(q, k, v, scale, self.window, sinks)

    def seal(self) -> None:
        self.sealed, self.passing = self.seen, None

    def decode(self, x: AttnInput) -> Tensor:
        self._refuse_misfit(x)
        row = self.cache.counters.positions(self.written, 1, x.k.device) % self.size
        for held, new in zip(self.rows, (x.k, x.v), strict=True):
            held.index_copy_(2, row, new)
        self.written += 1
        self.seen += 1
        return sink_logits.segment_attention(
            x.q, [self._stored()], self.spec.scale, self.spec.sink_logits
        )

    @property
    def attended(self) -> Attended:
        generated = self.seen - self.sealed
        return Attended(
            min(self.sealed, max(0, self.window - generated)), min(generated, self.window)
        )

    def read_positions(self) -> Tensor | None:
        if self.seen <= self.window:
            return None
        # none is left of the prompt once the answer fills the window
        first = min(self.seen - self.window, self.sealed)
        read = torch.arange(first, self.sealed, device=self.request.device)
        return read.expand(self.request.batch, self.spec.num_kv_heads, -1)

    def state(self) -> dict[str, Tensor]:
        k, v = (torch.cat(parts, 2) for parts in self._in_order())
        return {"k": k, "v": v, "seen": torch.tensor(self.seen)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.seen = self.sealed = int(state["seen"])
        self.written = min(self.size, state["k"].shape[2])
        self.rows = self._ring((state["k"], state["v"]))

    def count_replayed(self, steps: int) -> None:
        self.written += steps
        self.seen += steps

    def grow(self, more: int) -> None:
        super().grow(more)
        size = min(self.window, self.request.capacity)
        if (rows := size - self.size) > 0:  # so nothing has left the ring yet
            self.rows = [pad(held, (0, 0, 0, rows)) for held in self.rows]
            self.size = size

    def _followed_by(self, x: AttnInput) -> list[Tensor]:
        """Return the keys and values of the window followed by those of `x`, [B G S D] each."""
        older = self._in_order()
        return [torch.cat([*parts, new], 2) for parts, new in zip(older, (x.k, x.v), strict=True)]

    def _take(self, x: AttnInput) -> list[Tensor]:
        """Store a prompt chunk: its last tokens become the ring. Return keys and values, [B G S D]
        each, of the window before the chunk followed by the chunk, for its attention."""
        self._refuse_misfit(x)
        rows = self._followed_by(x)
        self.seen += x.k.shape[2]
        self.written = min(self.size, rows[0].shape[2])
        self.rows = self._ring(rows)
        return rows

    def _ring(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return a new ring (memory for the window's keys and values, in which a decoded token
        replaces the oldest) that begins with the last of these rows, [B G S D] of each."""
        ring = [x.new_empty(*x.shape[:2], self.size, x.shape[3]) for x in rows]
        for held, x in zip(ring, rows, strict=True):
            held[:, :, : self.written] = x[:, :, x.shape[2] - self.written :]
        return ring

    def _in_order(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys, then values of the ring, in which each decoded token replaces the oldest, in
        the order of the text, in two parts: those from the oldest token to the end of the ring, and
        those that stand before them in it."""
        oldest = self.written % self.size if self.written > self.size else 0
        return [(x[:, :, oldest : self.written], x[:, :, :oldest]) for x in self.rows]

    def _stored(self) -> Segment:
        """Return keys and values of the window. While steps are captured in a CUDA graph this is
        the whole ring, with a count on the device of how many rows are filled."""
        if self.cache.counters.running:
            k, v = self.rows
            live = self.cache.counters.tensor(self.written, k.device).clamp(max=self.size)
            return Segment(k, v, live=live)
        k, v = (x[:, :, : self.written] for x in self.rows)
        return Segment(k, v)

    def _refuse_misfit(self, x: AttnInput) -> None:
        given = (x.k.shape[0], self.seen + x.k.shape[2])
        held = (self.request.batch, self.request.capacity)
        if given[0] != held[0] or given[1] > held[1]:
            raise misfit(given, held)


Start = Callable[[Sequence[LayerSpec], CacheState], Sequence[KVLayer]]


def whole_layers(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the specs of the layers that a method gets: those without a sliding window, numbered
    anew from 0. In a model that slides in every layer these are all, treated as if they did not
    slide."""
    seeing = [spec for spec in specs if spec.window is None] or [
        replace(spec, window=None) for spec in specs
    ]
    first: dict[int, int] = {}  # of the layers that rotate alike
    return [
        replace(
            spec,
            index=index,
            num_layers=len(seeing),
            rope_like=first.setdefault(spec.rope_like, index),
        )
        for index, spec in enumerate(seeing)
    ]


def check_length(method: Method, specs: Sequence[LayerSpec], tokens: int) -> None:
    """Raise `ValueError` if every layer slides over fewer than `tokens` tokens and the method
    chooses tokens by a budget: no layer would be left for it."""
    if method.uses_budget and _all_slide(specs, tokens):
        raise ValueError(
            f"Every layer of this model slides over {specs[0].window} tokens and this text takes {tokens}, so "
            f"{type(method).__name__} would have no layer: shorten the text, or use method=full."
        )


def check_growth(specs: Sequence[LayerSpec], before: int, after: int) -> None:
    """Raise `ValueError` if a text grows from `before` to `after` tokens of room, and only then
    becomes longer than the window of a model that slides in every layer: such a cache needs other
    layers (`start_layers`)."""
    if _all_slide(specs, after) and not _all_slide(specs, before):
        raise ValueError(
            f"Every layer of this model slides over {specs[0].window} tokens, and its cache was made for {before}: say "
            f"the room beforehand, as attached(..., capacity={after})."
        )


def _all_slide(specs: Sequence[LayerSpec], tokens: int) -> bool:
    return all(spec.window is not None and spec.window < tokens for spec in specs)


def start_layers(specs: Sequence[LayerSpec], cache: CacheState, start: Start) -> list[KVLayer]:
    """Return a cache layer for each layer of the model: a `WindowLayer`, which keeps the last
    tokens only, where the model slides, and what `start` returns for the others. A model whose
    layers all slide gets layers of `start` only, as long as its windows cover the cache's
    capacity."""
    if _all_slide(specs, cache.request.capacity):
        return [WindowLayer(spec, cache) for spec in specs]
    hybrid = any(spec.window is None for spec in specs)
    method_layers = iter(start(whole_layers(specs), cache))
    return [
        WindowLayer(spec, cache) if hybrid and spec.window is not None else next(method_layers)
        for spec in specs
    ]
