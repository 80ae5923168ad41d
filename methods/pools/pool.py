"""Holds keys and values that a decode step reads in part or seldom: encoded by a codec, and in a
tier (device, host memory or disk) of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kernels.quantise import refuse
from kernels.reference import Segment
from methods.base import CacheState, LayerSpec
from methods.base.pieces import pieces, tokens_at_once
from methods.tiers.block import Tensors, named, tokens_in, unnamed
from methods.tiers.codec import Codec, Encoded, Part, Plain
from methods.tiers.rows import DeviceRows, MemoryRows, Rows, room_for, rows_in
from methods.tiers.tier import DEVICE
from methods.tiers.traffic import Traffic
from methods.tiers.transfer import Arrival


class Pool:
    """Hold keys and values of one layer outside its store, the oldest token first. The tensors that
    a codec writes per token lie in `tier`. What it writes per block of tokens lies on the device,
    as do, in full precision, the last tokens that do not fill a block (the tail).

    Bytes that move are counted in `cache.traffic`. A pool may outlive its cache: assign another to
    `cache`."""

    steady = ("_tokens", "_blocks")  # as in KVStore

    def __init__(
        self, spec: LayerSpec, cache: CacheState, capacity: int, codec: Codec | None = None
    ) -> None:
        """Make room for `capacity` tokens of `spec.num_kv_heads` heads, in the tier that the
        request names, and in the request's codec unless `codec` is given."""
        request = cache.request
        codec = (codec or request.codec or Plain()).for_layer(spec)
        self.spec, self.cache, self.capacity, self.codec = spec, cache, capacity, codec
        self.length = 0
        blocks = capacity // codec.block
        self.layout = layout = codec.layout(spec.head_dim, request.dtype)
        self._tokens = [
            self._rows(rows_in(request.placement), blocks * codec.block, *kind)
            for kind in layout.tokens
        ]
        self._blocks = [self._rows(DeviceRows, blocks, *kind) for kind in layout.blocks]
        self._tail: list[Rows] = []  # K and V from the first token on that fills no block

    @property
    def tier(self) -> str:
        return self._tokens[0].tier

    @property
    def encoded(self) -> int:
        """Return how many tokens are in whole blocks and so are encoded; the others are plain."""
        return self.length // self.codec.block * self.codec.block

    @property
    def token_bytes(self) -> float:
        """Return the bytes of an encoded token of one head, with its share of what is written per
        block."""
        return self.layout.token_bytes + self.layout.block_bytes / self.codec.block

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store k, v [B G T D], which lie on the device, after the other tokens. The last tokens
        that do not fill a block stay plain on the device; once there are such tokens, no more can
        be stored."""
        start = self.length
        assert start == self.encoded
        self._extend(start + k.shape[2])
        whole = k.shape[2] // self.codec.block * self.codec.block
        bad = []
        for part in pieces(whole, self.codec.block, tokens_at_once(k.device)):
            written, unfit = self.codec.encode_unchecked(k[:, :, part], v[:, :, part])
            bad += [] if unfit is None else [unfit]
            self._put(self._tokens, written.tokens, start + part.start)
            self._put(self._blocks, written.blocks, (start + part.start) // self.codec.block)
        refuse(*bad)
        if whole < k.shape[2]:
            self._make_tail()
            self._put(self._tail, (k[:, :, whole:], v[:, :, whole:]), 0)

    def gather(
        self, rows: Tensor, slots: Tensor | None = None, *, early: bool = False
    ) -> Arrival[Segment]:
        """Ask for chosen tokens, decoded, on the device; `wait` of the result returns k, v
        [B G K D], for rows [B G K], or [B H K D] for rows [B H K] of query heads. Tokens whose
        entry in `slots`, of the same shape as `rows`, is 0 or more need not move: their values are
        arbitrary. `early`: the caller computes something before it waits (`CacheState.fetch`)."""
        groups = self._tokens[0].shape[:2]
        by_group = rows.reshape(*groups, -1)
        unread = None if slots is None else slots.reshape(*groups, -1)

        def read(traffic: Traffic) -> Segment:
            k, v = self._decoded(by_group, traffic, unread)
            return Segment(k.view(*rows.shape, -1), v.view(*rows.shape, -1))

        return self.cache.fetch(read, early=early)

    def whole(self, *, early: bool = False) -> Arrival[Segment]:
        """Ask for all tokens, decoded, on the device; `wait` of the result returns k, v
        [B G S D]. `early` as in `gather`."""
        return self.cache.fetch(self._whole, early=early)

    def segments(self) -> Arrival[list[Part]]:
        """Ask for all tokens on the device, for a step that attends to them: as codes if kernels
        can read the codec's codes, else decoded, and the plain tokens of the tail."""
        return self.cache.fetch(self._segments)

    def by_store(self) -> list[list[Part]]:
        """Return what `segments` gives, once for each call of `KVStore.each`: here for all heads
        together."""
        return [self.segments().wait()]

    def _whole(self, traffic: Traffic) -> Segment:
        k, v = self.codec.decode_whole(self._stored(traffic), self.cache.request.dtype)
        if self.length == self.encoded:
            return Segment(k, v)
        tail = self._last(traffic)
        return Segment(torch.cat([k, tail.k], 2), torch.cat([v, tail.v], 2))

    def _segments(self, traffic: Traffic) -> list[Part]:
        written = (
            [self.codec.segment(self._stored(traffic), self.cache.request.dtype)]
            if self.encoded
            else []
        )
        return written if self.length == self.encoded else [*written, self._last(traffic)]

    def channels(self, channels: Tensor) -> Tensor:
        """Return the chosen channels [B G r] of all keys on the device, as [B G r S]."""
        assert isinstance(self.codec, Plain)
        tokens, length = self._tokens[0], self.length
        return self.cache.fetch(lambda traffic: tokens.columns(channels, length, traffic)).wait()

    def held(self) -> Tensors:
        """Return all tensors by name (methods/tiers/block.py), as they are encoded and where they
        lie: nothing moves, and nothing is decoded."""
        blocks = self.encoded // self.codec.block
        tokens = tuple(rows.held(self.encoded) for rows in self._tokens)
        stored = (
            Encoded(tokens, tuple(rows.held(blocks) for rows in self._blocks))
            if blocks
            else Encoded(())
        )
        tail = self._tail if self.encoded < self.length else []
        return named(self.codec, stored, [rows.held(self.length - self.encoded) for rows in tail])

    def rooms(self) -> Iterator[list[Tensor]]:
        """Yield for each sequence a list of all its tensors, with their unused rows, where they
        lie: those of the codec, then K and V of the plain tokens after the last block."""
        rows = [*self._tokens, *self._blocks, *self._tail]
        rooms = [x.held(x.shape[2]) for x in rows]
        if not self._tail:
            shape = (self.cache.request.batch, self.spec.num_kv_heads, 0, self.spec.head_dim)
            rooms += [
                torch.empty(shape, dtype=self.cache.request.dtype, device=self.cache.request.device)
            ] * 2
        return (list(sequence) for sequence in zip(*(room.split(1) for room in rooms), strict=True))

    def take(self, held: Mapping[str, Tensor]) -> None:
        """Fill this empty pool, in its own tier, with what another pool's `held` returned, on
        whatever device it lies now."""
        stored, tail = unnamed(self.codec, held)
        self._extend(tokens_in(held))
        if tail:
            self._make_tail()
        for kind, tensors in (
            (self._tokens, stored.tokens),
            (self._blocks, stored.blocks),
            (self._tail, tail),
        ):
            for rows, x in zip(kind, tensors, strict=False):
                if (x.shape[:2], x.shape[3], x.dtype) != (
                    rows.shape[:2],
                    rows.shape[3],
                    rows.dtype,
                ):
                    raise ValueError(
                        f"Stored rows are {list(x.shape)} {x.dtype}, and this cache needs {list(rows.shape)} "
                        f"{rows.dtype}: go on with the model, batch, dtype and codec that they are of."
                    )
                rows.take(x, 0)

    def _stored(self, traffic: Traffic) -> Encoded:
        """Return all encoded tokens on the device, and count what moves."""
        blocks = self.encoded // self.codec.block
        tokens = tuple(rows.first(self.encoded, traffic) for rows in self._tokens)
        return Encoded(tokens, tuple(rows.first(blocks, traffic) for rows in self._blocks))

    def _last(self, traffic: Traffic) -> Segment:
        """Return keys and values of the last tokens, which fill no block and are plain."""
        return Segment(*(rows.first(self.length - self.encoded, traffic) for rows in self._tail))

    def _rows(self, kind: type[Rows], count: int, width: int, dtype: torch.dtype) -> Rows:
        request = self.cache.request
        return kind(
            (request.batch, self.spec.num_kv_heads, count, width),
            dtype,
            request.place(self.spec.index),
        )

    def _make_tail(self) -> None:
        room = min(self.capacity, self.codec.block)
        self._tail = [
            self._rows(DeviceRows, room, self.spec.head_dim, self.cache.request.dtype)
            for _ in range(2)
        ]

    def _put(self, held: Sequence[Rows], tensors: Sequence[Tensor], start: int) -> None:
        for rows, x in zip(held, tensors, strict=True):
            rows.put(x, start, self.cache.traffic)

    @staticmethod
    def _read(
        held: Sequence[Rows], rows: Tensor, traffic: Traffic, slots: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the chosen rows of each tensor in `held`, on the device. Arguments as in
        `Rows.gather`."""
        return tuple(x.gather(rows, traffic, slots) for x in held)

    def _decoded(
        self, rows: Tensor, traffic: Traffic, slots: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return k, v [B G K D] of chosen tokens, rows [B G K]: those in whole blocks decoded, and
        those of the plain tail as they are. `slots` as in `gather`."""
        encoded = self.encoded
        if encoded == self.length:
            return self._decoded_rows(rows, traffic, slots)
        k, v = self._read(self._tail, (rows - encoded).clamp(min=0), traffic)
        if not encoded:
            return k, v
        decoded = self._decoded_rows(rows.clamp(max=encoded - 1), traffic, slots)
        late = (rows >= encoded).unsqueeze(-1)
        return torch.where(late, k, decoded[0]), torch.where(late, v, decoded[1])

    def _decoded_rows(
        self, rows: Tensor, traffic: Traffic, slots: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return k, v [B G K D] of chosen tokens that are encoded, decoded. On the device the codes
        are read in place; from another tier they are moved first."""
        blocks, of_block = rows // self.codec.block, tuple(x.held(x.shape[2]) for x in self._blocks)
        dtype = self.cache.request.dtype
        if self.tier == DEVICE:
            tokens = tuple(x.held(x.shape[2]) for x in self._tokens)
            return self.codec.decode_rows(Encoded(tokens, of_block), rows, blocks, dtype)
        moved = self._read(self._tokens, rows, traffic, slots)
        return self.codec.decode_rows(Encoded(moved, of_block), None, blocks, dtype)

    def _extend(self, end: int) -> None:
        if end > self.capacity:
            raise ValueError(
                f"The pool holds {self.capacity} tokens but was given {end}: start it with more capacity."
            )
        self.length = end


def rows_for(x: Tensor, cache: CacheState, layer: int, *, away: bool = False) -> Rows:
    """Copy x [B G S W], a tensor of the layer with index `layer`, to rows in the tier that the
    request names, and return these; in memory `room_for` entries apart. `away`: x does not come
    from the device, so its bytes do not count as moved."""
    kind, place, width = rows_in(cache.request.placement), cache.request.place(layer), x.shape[3]
    wide = room_for(width, place.device) if issubclass(kind, MemoryRows) else width
    rows = kind((*x.shape[:3], wide), x.dtype, place)
    if isinstance(rows, MemoryRows):
        rows.shape, rows.stored = x.shape, rows.stored[..., :width]
    if away:
        rows.take(x, 0)
    else:
        rows.put(x, 0, cache.traffic)
    return rows
