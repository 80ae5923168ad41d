"""Calls a press when a layer's prompt is complete, and applies its changes to the stored keys and
values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import nextafter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from harness.bridges.kvpress.building import KVPressError, nested, package, set_ratio
from harness.engine.hf import QueryProjection, Rotary
from kernels.rope import rotate_by
from methods.base import AttnInput, LayerSpec
from methods.base.pieces import pieces
from methods.layers import Evict

Rows = tuple[Tensor, Tensor]  # keys and values, each [B G S D]
# integers by size, to see the bits of numbers
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# attribute of the attention module in which a press leaves the keys to hide
MASKED = "masked_key_indices"


class PressEvict(Evict, capturable=True, of_each={}):
    """Store the whole first prompt, and the layer's input (hidden states) besides; when the prompt
    is complete (the seal), let a press choose which keys and values stay.

    `presses`: one per sequence. The layers of a cache share it, because a press may remember what
    it did in earlier layers."""

    waiting = True  # the first seal is still to come

    def __init__(self, presses: Sequence[Any]) -> None:
        self.presses = list(presses)
        self.hidden: list[Tensor] = []  # [B T E] each, the input of each chunk

    def observe(self, x: AttnInput) -> None:
        if self.waiting:
            self.hidden.append(x.hidden.clone())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.waiting = False

    def size(self, budget: int) -> int:
        if self.waiting:
            return budget
        self.layer.fallback = (
            "a press compresses only the first prompt: what later turns add stays whole"
        )
        return self.store.length

    def evict(self, size: int) -> None:
        name = type(self.presses[0]).__name__
        does: list[str] = []
        rows, visible = self._pressed(size, torch.cat(self.hidden, 1))
        places = places_of((self.store.k, self.store.v), rows)
        if places is None:
            if rows[0].shape[2] < self.store.length and not bool(visible.all()):
                raise KVPressError(
                    f"{name} both masks tokens and puts rows in the place of others: choose another."
                )
            does.append("puts other rows in the place of the prompt's")
            self.layer.rewrite(*rows)
            places = torch.arange(self.store.length, device=visible.device).expand(visible.shape)
        self._retain(name, places, visible)
        if self.store.length != size:
            does.append(f"keeps {self.store.length} prompt tokens where the budget is {size}")
        self.layer.fallback = f"{name} {' and '.join(does)}" if does else None

    def close(self, evicted: int) -> None:
        self.waiting = False
        self.hidden = []
        self.presses = []

    def _retain(self, name: str, places: Tensor, visible: Tensor) -> None:
        """Drop from the store all rows of the prompt except those at `places` [B G K] where
        `visible` [B G K] is True, which means that the press has not masked them. `name`: the
        press, for errors."""
        if bool(visible.all()):
            if places.shape[2] < self.store.length:
                self.layer.retain(places.sort(-1).values)
            return
        kept = int(visible.sum())
        if kept % (visible.shape[0] * visible.shape[1]):
            raise KVPressError(
                f"In layer {self.spec.index}, {name} keeps {kept} tokens in all heads together, which is "
                "no whole number for each on average: no budget says that, so choose another press."
            )
        heads = zip(places.flatten(0, 1), visible.flatten(0, 1), strict=True)
        self.layer.retain_per_head([rows[seen].sort().values for rows, seen in heads])

    def _pressed(self, size: int, hidden: Tensor) -> tuple[Rows, Tensor]:
        """Return what the presses leave of the stored keys and values: the rows, and which of them
        are not masked [B G K]. hidden [B S E]: the layer's input."""
        assert isinstance(self.spec.rope, Rotary)
        spec = replace(self.spec, rope=self.spec.rope.of_text(self.cache.counters.text_tokens))
        one_by_one = (x.split(1) for x in (hidden, self.store.k, self.store.v))
        parts = [
            press_one(press, spec, size, *own)
            for press, *own in zip(self.presses, *one_by_one, strict=True)
        ]
        if len({visible.shape for *_, visible in parts}) > 1:
            raise KVPressError(
                "The press keeps different numbers in sequences of one batch: run them one by one."
            )
        keys, values, visible = map(torch.cat, zip(*parts, strict=True))
        return (keys, values), visible


@torch.no_grad()
def press_one(
    press: Any, spec: LayerSpec, size: int, hidden: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Let a press compress keys k and values v [1 G S D] of one sequence in one layer, as it would in
    its hook after the attention module: `size` of the S tokens are to stay. hidden [1 S E]: the
    layer's input. Return what is left, each [1 G K D], and which of it is not masked [1 G K]."""
    tokens, device = hidden.shape[1], hidden.device
    set_ratio(press, ratio_for(tokens, size))
    # some presses write into them
    layer = SimpleNamespace(keys=k.clone(), values=v.clone())
    positions = torch.arange(tokens, device=device)
    cos, sin = (x.to(device, hidden.dtype) for x in spec.rope(positions))
    with (
        lent_module(spec) as module,
        torch.random.fork_rng([device] if hidden.is_cuda else []),
        _without_nan(press, spec.index),
    ):
        torch.manual_seed(spec.index)  # a press that draws random numbers must draw the same again
        call = {
            "hidden_states": hidden,
            "past_key_values": SimpleNamespace(layers={module.layer_idx: layer}),
            "cache_position": positions,
            "position_embeddings": (cos, sin),
        }
        try:
            press.forward_hook(module, [], call, [None, None])
        except KVPressError:
            raise
        except Exception as error:
            raise KVPressError(
                f"{type(press).__name__} of kvpress fails in layer {spec.index} ({type(error).__name__}: {error}): "
                "change its parameters, the budget or the prompt."
            ) from error
        masked = getattr(module, MASKED, None)
    visible = torch.ones(layer.keys.shape[:3], dtype=torch.bool, device=device)
    if masked is not None:
        visible[tuple(index.to(device) for index in masked)] = False
    # it expects the next token right after its last row
    if isinstance(press, package().KeyRerotationPress):
        layer.keys = rotate_by(layer.keys, tokens - layer.keys.shape[2], spec.rope)
    return layer.keys, layer.values, visible


class LentRotary(nn.Module):
    """Stand in for the `rotary_emb` that presses look for on an attention module, and compute the
    cos and sin of that layer, whose rotation may differ from those of other kinds of layers."""

    def __init__(self, rope: Rotary) -> None:
        super().__init__()
        self.rope = rope

    @property
    def inv_freq(self) -> Tensor:
        """Return the angles [D / 2] by which each pair of channels turns per position."""
        return self.rope.inv_freq

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1 P D] of position_ids [1 P], in the dtype of `x`."""
        cos, sin = self.rope(position_ids[0])
        return cos.to(x.dtype), sin.to(x.dtype)


@contextmanager
def lent_module(spec: LayerSpec) -> Iterator[Any]:
    """Yield the layer's attention module, lent to a press with the rotation that presses look for
    on it. Both the rotation and what a press leaves there are removed afterwards."""
    assert isinstance(spec.project_query, QueryProjection)
    assert isinstance(spec.rope, Rotary)
    module = spec.project_query.module
    module.rotary_emb = LentRotary(spec.rope)
    try:
        yield module
    finally:
        for name in ("rotary_emb", MASKED):
            if hasattr(module, name):
                delattr(module, name)


@contextmanager
def _without_nan(press: Any, layer: int) -> Iterator[None]:
    """Raise `KVPressError`, inside the block, as soon as `press` or a press in it scores a token
    with NaN: it would choose at random what stays. `layer`: the layer's number, for the error."""

    def checked(score: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        def call(*arguments: Any, **keywords: Any) -> Tensor:
            scores = score(*arguments, **keywords)
            if bool(scores.isnan().any()):
                raise KVPressError(
                    f"{name} of kvpress gives scores in layer {layer} that are NaN, which say nothing of what is to "
                    "stay: correct the press, or choose another."
                )
            return scores

        return call

    scoring = [each for each in nested(press) if hasattr(each, "score")]
    for each in scoring:
        each.score = checked(each.score, type(each).__name__)
    try:
        yield
    finally:
        for each in scoring:
            del each.score


def ratio_for(tokens: int, kept: int) -> float:
    """Return the ratio with which a press keeps exactly `kept` of `tokens`. A press keeps
    int(tokens * (1 - ratio)), so the next number below 1 - kept / tokens may be needed."""
    ratio = 1 - kept / tokens
    while int(tokens * (1 - ratio)) < kept:
        ratio = nextafter(ratio, 0)
    return ratio


def places_of(given: Rows, kept: Rows) -> Tensor | None:
    """Return where the rows of `kept` stand in `given`, int64 [B G K], or None if one of them is
    not there bit for bit.

    Rows that are equal bit for bit are distinguished by their order.
    """
    hashes, source = _hashes(given).sort(dim=-1, stable=True)
    wanted, order = _hashes(kept).sort(dim=-1, stable=True)
    counted = torch.arange(wanted.shape[-1], device=wanted.device)
    repeats = counted - torch.searchsorted(wanted, wanted)
    first = torch.searchsorted(hashes, wanted)
    found = (first + repeats).clamp(max=hashes.shape[-1] - 1)
    places = torch.empty_like(order)
    places.scatter_(-1, order, source.gather(-1, found))
    same = _equal_at(given[0], places, kept[0]) and _equal_at(given[1], places, kept[1])
    return places if same else None


def _hashes(rows: Rows) -> Tensor:
    """Return a number for every row that depends on all its bits, int64 [B G S]."""
    both = [_bits(x) for x in rows]
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(2**62, (2, both[0].shape[-1]), generator=generator)
    factors = factors.to(both[0].device).view(2, 1, 1, 1, -1)
    hashes = [
        (torch.stack([x[:, :, part] for x in both]).long() * factors).sum((0, -1))
        for part in pieces(both[0].shape[2])
    ]
    return torch.cat(hashes, -1)


def _equal_at(x: Tensor, places: Tensor, wanted: Tensor) -> bool:
    across = places.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
    return torch.equal(_bits(x).gather(2, across), _bits(wanted))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(WORDS[x.element_size()])
