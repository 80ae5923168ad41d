"""Defines what a method receives: the shape of a layer, what a batch asks for, and the tensors of
one attention call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.ragged import Ragged
from methods.budget import Budget
from methods.tiers.codec import Codec
from methods.tiers.pinned_memory import PinnedReservation
from methods.tiers.rows import Place
from methods.tiers.tier import DEVICE

ROTATION = "how the model rotates keys by position"  # `LayerSpec.rope`
QUERIES = "how the model computes queries"  # `LayerSpec.project_query`
_ANY_LENGTH = 2**40  # tokens: more than any cache holds


class Indexer(NamedTuple):
    """Describe how a layer of the model chooses tokens itself (trained sparse attention, DSA)."""

    heads: int  # Hi
    channels: int  # Di, of an index key
    top: int  # how many tokens each query was trained to read
    own: bool  # False: it reads what the layer before it has chosen


class Index(Protocol):
    """Hold what a model's indexer gives for the new tokens of one attention call. The score of a token
    is the sum over heads of `weights` times the products of `q` and its key, negative ones as 0."""

    @property
    def q(self) -> Tensor:
        """Return index queries [B Hi T Di], rotated."""

    @property
    def k(self) -> Tensor:
        """Return index keys [B 1 T Di], rotated."""

    @property
    def weights(self) -> Tensor:
        """Return the weights of the heads [B Hi T], fp32."""

    def part(self, rows: Tensor | slice, tokens: Tensor | None = None) -> Index:
        """Return that of the sequences `rows`, and of their `tokens` [N] alone."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Describe one layer of a model, as far as a method knows it before the first token.

    A method's layers are those that see the whole text, numbered among themselves: in a model whose
    other layers have a sliding window, `index` 1 of `num_layers` 4 is the second of four layers
    without one. `rope` returns cos 1 and sin 0 if the layer does not rotate. Whatever the model does,
    a method sees R rotated channels in the order of kernels/rope.py."""

    index: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the logits, usually head_dim ** -0.5
    # positions [P] -> cos, sin, each [1 P R], of this layer
    rope: Callable[[Tensor], tuple[Tensor, Tensor]]
    # this layer's [B T E] input -> q [B H T D] before the rotation
    project_query: Callable[[Tensor], Tensor]
    # rotated q [B H T D] and positions [T] -> what attention is given, where the model norms or scales queries after
    # their rotation; None: it does not
    finish_query: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, compare=False)
    # how many tokens one sees, itself included; None: all, as in a method's layers
    window: int | None = None
    # [H] fp32 (kernels/sink_logits.py)
    sink_logits: Tensor | None = field(default=None, compare=False)
    device: torch.device | None = None  # where its weights are; None: the request's device
    # R, how many channels of a head are rotated, the first ones; None: all
    rotary_dim: int | None = None
    unknown: tuple[str, ...] = ()  # what could not be found out of a model: ROTATION, QUERIES
    rope_like: int = 0  # the first of the method's layers that has this layer's `rope`
    value_dim: int | None = None  # Dv, channels of a value; None: head_dim
    # values are the last Dv channels of keys and are stored with them alone (latent attention)
    values_in_keys: bool = False
    borrowers: int = 0  # further layers of the model that attend to this layer's keys and values
    indexer: Indexer | None = None  # None: the model chooses nothing itself

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def value_channels(self) -> int:
        """Return Dv, the number of channels of a value."""
        return self.value_dim or self.head_dim

    @property
    def row_channels(self) -> int:
        """Return how many numbers a KV head stores of a token, its key and its value."""
        return self.head_dim + (0 if self.values_in_keys else self.value_channels)

    def sinks_of(self, head: int | None = None) -> Tensor | None:
        """Return the sink logits (a learned logit per query head that takes part in the softmax
        without a value) of all query heads, or of those of KV head number `head`; None if the model
        has none."""
        if self.sink_logits is None or head is None:
            return self.sink_logits
        return self.sink_logits[head * self.group : (head + 1) * self.group]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Hold the settings and sizes with which a method serves one batch of sequences of equal
    length. `capacity` counts prompt and new tokens of all turns."""

    batch: int
    capacity: int
    dtype: torch.dtype
    device: torch.device
    budget: Budget | None = None  # None: the method uses none
    reuse_steps: int = 0  # for how many further steps a selecting method may use a selection
    placement: str = DEVICE  # the tier of tokens that a step reads only if they are chosen
    codec: Codec | None = None  # encodes the tokens in a pool; None: they stay as they are
    abilities: tuple[Any, ...] = ()  # `Ability` objects that settings give the method
    disk: Path | None = None  # the folder for placement=disk; None: the system's temporary one
    prepared: object = None  # what the method's `prepare` returned for this model
    # host memory for the rows of all layers
    reservation: PinnedReservation | None = field(default=None, compare=False)
    grows: bool = False  # `capacity` grows with the text, as in a loop whose length is unknown

    @property
    def pooled(self) -> bool:
        """Return whether the prompt tokens that a step reads only if chosen are moved out of the
        layer's store on the device: to another tier (host memory or disk), or into fewer bits."""
        return self.placement != DEVICE or self.codec is not None

    def place(self, layer: int) -> Place:
        """Return where the tensors of the layer with index `layer` may lie: device, folder and
        pinned memory."""
        return Place(
            self.device,
            self.disk,
            None if self.reservation is None else self.reservation.regions[layer],
        )

    def covers_all(self, layer: int) -> bool:
        """Return whether the budget lets the layer with index `layer` read everything, even for the
        longest text that this cache may hold."""
        longest = _ANY_LENGTH if self.grows else self.capacity
        return self.budget is None or self.budget.covers(longest, layer)


@dataclass(frozen=True, slots=True)
class AttnInput:
    """Hold the tensors of one attention call in one layer."""

    q: Tensor  # [B H T D], rotated
    k: Tensor  # [B G T D], rotated; the new tokens only
    v: Tensor  # [B G T Dv]
    cos: Tensor  # [1|B T D]
    sin: Tensor  # [1|B T D]
    hidden: Tensor  # [B T E], the normalised input of the projections, which must not be kept
    start: int  # position of the first new token
    # k and v are in the layer's store already, in the row that `KVLayer.next_row` named
    stored: bool = False
    index: Index | None = None  # where the layer has an `Indexer`


class NextRow(NamedTuple):
    """Name the memory in which a layer stores the next token of each sequence: a kernel may write k
    and v there itself."""

    keys: Tensor | Ragged  # [B G S D], or [B*G 1 S D] if every KV head has memory of its own
    values: Tensor | Ragged
    row: Tensor  # [1] for all sequences, or one for each, [B] or [B*G], int64
