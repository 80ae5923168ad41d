"""Truncation: a history that no longer fits the window loses its oldest tokens, and its keys and
values stay usable (CachedAttention, section 3.4).

The H tokens that stay go on at positions 0 to H-1. A method that evicts has shortened its history
already: the rows that it kept move together, as the paper does with a list of dropped tokens, and
rows beyond H leave. The rows that stay were computed with attention to those that left, so a
recomputation of the shorter text gives others. They also lack the text's first tokens, unless
`sinks` keeps them. Heads that find nothing else relevant put their weight on these tokens
(StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import rope
from methods.base import KVLayer
from methods.layers import ends

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions [P] -> cos, sin, each [1 P R]


class RotationError(ValueError):
    """Raised where a model rotates keys by more than their positions (by the length of the text
    too), so that a shortened history cannot use them."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of one layer's keys, which can be undone, redone and moved to other
    positions. Its angles come from the model's own rotary module (`LayerSpec.rope`), so that
    scaled, partial and per-layer rotations are the model's. `dtype`: the model's, to which it
    rounds cos and sin; all arithmetic is in fp32.

    Keys are [..., T, D]; positions are [T], or [..., T] where heads keep different tokens (-1 for a
    row without a token, which stays as it is).

    Dynamic and LongRoPE scaling rotate every token by the length of the text: here it ends with the
    last of `positions`."""

    angles: Angles
    dtype: torch.dtype

    def off(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotation of keys that stand at `positions`. The result is in fp32, to save one
        rounding."""
        return self._turned(rope.unrotate, keys, positions)

    def on(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotate keys without rotation, as `off` returns them, to `positions`; the result has the
        model's dtype."""
        return self._turned(rope.rotate, rows, positions).to(self.dtype)

    def move(self, keys: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Rotate keys that stand at the positions `source` to the positions `target`; the result
        has the model's dtype."""
        return self.on(self.off(keys, source), target)

    def check(self, tokens: int) -> None:
        """Raise `RotationError` if the model rotates a text of `tokens` tokens in another way than
        a short one, so that its keys do not fit a shortened text."""
        # angles of position 1
        ends = (torch.tensor([1]), torch.tensor([1, max(1, tokens - 1)]))
        short, long = (self.angles(end)[0][0, 0] for end in ends)
        if not short.equal(long):
            raise RotationError(
                f"This model's rotary scaling (dynamic or LongRoPE) changes all angles before a text has {tokens} "
                "tokens, so what is cut from a longer history does not fit the shorter text: set overflow.by="
                "truncate_tokens, which computes that text anew, or a smaller overflow.window."
            )

    def fixed(self, positions: Tensor, text: int = 0) -> Rotation:
        """Return this rotation for the given consecutive positions alone, with angles computed now,
        so that another thread can use it without calling the model. `text`: the length of the text;
        by default it ends with these positions."""
        last = positions.new_tensor([max(text - 1, int(positions[-1]) if len(positions) else 0)])
        asked = self.angles(torch.cat([positions, last]))
        cos, sin = (part[:, :-1].to(positions.device) for part in asked)
        return Rotation(
            lambda asked: (cos[:, asked - positions[0]], sin[:, asked - positions[0]]), self.dtype
        )

    def _turned(
        self, way: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, positions: Tensor
    ) -> Tensor:
        if not rows.shape[-2]:
            return rows.float()
        # every head as a sequence of its own
        flat = rows.float().reshape(rows.shape[:-2].numel(), 1, *rows.shape[-2:])
        cos, sin = (
            # in fp32, but rounded as the model rounds
            part[0].to(self.dtype).float().to(rows.device).unflatten(0, (-1, rows.shape[-2]))
            for part in self.angles(positions.flatten().clamp(min=0))
        )
        turned = way(flat, cos, sin).view(rows.shape)
        return torch.where((positions < 0).unsqueeze(-1).to(rows.device), rows.float(), turned)


LayerState = Mapping[str, Tensor]  # of one layer, as `KVLayer.state` gives it


def truncated(
    contents: Sequence[LayerState],
    layers: Sequence[KVLayer],
    rotations: Sequence[Rotation],
    keep: int,
    *,
    sinks: int = 0,
    naive: bool = False,
) -> list[dict[str, Tensor]]:
    """Return the contents of a cache, layer by layer, cut to at most `keep` tokens of every head:
    the last ones, or the first `sinks` and the last. They are for `refill` of a fresh cache.

    `layers`: those of a cache of the same method, which cut what their policies hold. `rotations`:
    of each layer, by which keys move to positions 0 to H-1. `naive`: keys stay rotated to where
    they stood (the paper's NKVT), though what follows goes on at position H."""
    length = min(keep, max(rows for state in contents for rows in _rows(state)))
    if length == int(contents[0]["seen"]):
        return [dict(state) for state in contents]
    parts = zip(contents, layers, rotations, strict=True)
    return [
        _shorter(state, layer, None if naive else rotation, length, sinks)
        for state, layer, rotation in parts
    ]


def _shorter(
    state: LayerState, layer: KVLayer, rotation: Rotation | None, length: int, sinks: int
) -> dict[str, Tensor]:
    names, counts = _names(state), _counts(_rows(state), length)
    found: dict[str, Tensor] = {}
    for (key, value), source, rows in zip(names, _sources(state), counts, strict=True):
        first = 0 if "k" in state else min(sinks, rows)  # what slides has no first tokens
        sides = {
            name: ends(state[name], first, rows - first, -2)
            for name in (key, value)
            if name in state  # keys may hold values
        }
        if rotation is not None:
            target = torch.arange(length - rows, length, device=sides[key].device)
            sides[key] = rotation.move(sides[key], ends(source, first, rows - first), target)
        found |= sides
    if "k0" in found and min(counts) < length:
        # one tensor for all heads, or one for each
        heads = found["k0"].shape[:-2] or state["positions"].shape[:2]
        found["positions"] = _positions(counts, heads, length, found["k0"].device)
    first = min(sinks, counts[0])
    return found | layer.truncate(state, first, counts[0] - first) | {"seen": torch.tensor(length)}


def _names(state: LayerState) -> list[tuple[str, str]]:
    """Return the names of a layer's keys and values in its state: one pair for a sliding window or
    for all heads together, else one pair per head."""
    if "k" in state:
        return [("k", "v")]
    heads = sum(name[:1] == "k" and name[1:].isdigit() for name in state)
    return [(f"k{head}", f"v{head}") for head in range(heads)]


def _rows(state: LayerState) -> list[int]:
    return [state[key].shape[-2] for key, _ in _names(state)]


def _counts(rows: Sequence[int], length: int) -> list[int]:
    """Return how many of its rows each head keeps when at most `length` may stay. The caches that
    hold heads of different lengths (methods/pools/device_store.py) need a whole number as the mean
    over heads, so the heads with the most rows drop one more until it is one."""
    counts = [min(count, length) for count in rows]
    for _ in range(sum(counts) % len(counts)):
        counts[counts.index(max(counts))] -= 1
    return counts


def _sources(state: LayerState) -> list[Tensor]:
    """Return the positions to which a layer's keys are rotated now: one tensor [T] for each KV head
    whose keys are stored apart, or one, [T] or [B heads T], for all heads together."""
    rows, seen = _rows(state), int(state["seen"])
    rotated = (x for name, x in state.items() if name.endswith(".rotated"))
    places = next(rotated, state.get("positions"))
    if places is None:
        return [torch.arange(seen - rows[0], seen)]
    if len(rows) == 1:
        return [places]
    return [
        own[own.shape[0] - count :] for own, count in zip(places.flatten(0, 1), rows, strict=True)
    ]


def _positions(
    counts: Sequence[int], heads: Sequence[int], length: int, device: torch.device
) -> Tensor:
    """Return the new positions where heads keep fewer tokens than `length`: [B heads S], ending
    with length-1, with -1 in front where a head has fewer than the others. `counts`: the rows of
    each head, or one number for all."""
    most = max(counts)
    rows = [
        pad(torch.arange(length - count, length, device=device), (most - count, 0), value=-1)
        for count in counts
    ]
    together = torch.stack(rows)
    return together.expand(*heads, -1) if len(counts) == 1 else together.unflatten(0, tuple(heads))
