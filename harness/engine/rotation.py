"""Rotates texts by angles that depend on their length: dynamic NTK and LongRoPE.

transformers' rotary modules decide by the last position of the current forward, and those of
dynamic scaling also by earlier calls. A chunk of a prompt, a row of a batch and a question that is
fed token by token would then be rotated as if each were a text of its own. Here the angles follow
from the length of the whole text: a prompt's tokens take those of the whole prompt, and each
further token those of the text that ends with it. This is what `model.generate` gives a prompt that
is fed in one piece to a model that has seen no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.models.base import ORIGINAL
from kernels.rope import table_bytes

REMEMBERED = 64  # lengths whose frequencies are kept at a time
AT_ONCE = 8192  # positions whose cos and sin are computed at a time for a table


class TextRotary(nn.Module):
    """Replace a model's rotary module while it is attached, so that angles follow from the length
    of the whole text. It holds a copy of that module, whose own state never changes.

    Texts for which `stage` returns the same number have the same rotations. `drops_at`: the length
    up to which `model.generate` keeps the cache of a text. A longer text is computed anew (LongRoPE
    in Phi-3). None: cached keys stay as they are at any length."""

    def __init__(self, rotary: nn.Module, drops_at: int | None = None) -> None:
        super().__init__()
        own: Any = deepcopy(rotary)
        self.own = own
        self.drops_at = drops_at
        self.rope_type: str | dict[str, str] = own.rope_type
        # of the texts in the next forward; None: up to the largest position
        self.lengths: Sequence[int] | None = None
        self._plain = unwrap(type(rotary).forward)  # without the update of frequencies
        self._frequencies: dict[tuple[int, tuple[str, ...]], Tensor] = {}

    @property
    def kinds(self) -> str:
        """Return the kinds of rotation whose angles depend on the length, as text for a user."""
        return ", ".join(sorted(_varying(self.rope_type)))

    def stage(self, tokens: int) -> int:
        """Return the length in tokens from which the rotary frequencies of a text of `tokens` tokens
        are computed. Texts with the same value have the same rotations, so that their keys may share
        a cache; 0 if the frequencies do not depend on the length."""
        reached = 0
        parameters: dict[str, Any] = self.own.config.rope_parameters
        if isinstance(self.rope_type, str):
            rotations = [(self.rope_type, parameters)]
        else:
            rotations = [(kind, parameters[name]) for name, kind in self.rope_type.items()]
        for kind, own in rotations:
            if "dynamic" in kind and tokens > self.own.original_max_seq_len:
                reached = max(reached, tokens)
            elif kind == "longrope" and tokens > own[ORIGINAL]:
                reached = max(reached, own[ORIGINAL] + 1)
        return reached

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [1|B T R], of position_ids [1|B T], for texts as long as
        `self.lengths` says."""
        kind = () if layer_type is None else (layer_type,)
        return self.of_texts(x, position_ids, self.lengths or [int(position_ids.max()) + 1], *kind)

    def of_texts(
        self, x: Tensor, position_ids: Tensor, lengths: Sequence[int], *kind: str
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of position_ids for texts of `lengths` tokens: one number for all
        rows, or one per row. `kind`: the kind of layer, in models that rotate each kind in its own
        way."""
        stages = [self.stage(length) for length in lengths]
        if len(set(stages)) == 1:
            return self._turned(x, position_ids, stages[0], *kind)
        cos = sin = torch.empty(0)
        for stage in set(stages):
            rows = [row for row, other in enumerate(stages) if other == stage]
            own = self._turned(x, position_ids[..., rows, :], stage, *kind)
            if not cos.numel():
                cos, sin = (part.new_empty(len(stages), *part.shape[1:]) for part in own)
            cos[rows], sin[rows] = own
        return cos, sin

    @torch.no_grad()
    def _turned(
        self, x: Tensor, position_ids: Tensor, stage: int, *kind: str
    ) -> tuple[Tensor, Tensor]:
        setattr(self.own, "_".join((*kind, "inv_freq")), self.frequencies(x.device, stage, *kind))
        return self._plain(self.own, x, position_ids, *kind)

    @torch.no_grad()
    def frequencies(self, device: torch.device, stage: int, *kind: str) -> Tensor:
        """Return the angles per position [R / 2] of texts of one stage, for one kind of layer.
        Position 0 is asked for first, because that resets the module's state."""
        if (stage, kind) not in self._frequencies:
            if len(self._frequencies) >= REMEMBERED:
                self._frequencies.clear()
            name, like = "_".join((*kind, "inv_freq")), torch.empty(0, device=device)
            setattr(self.own, name, getattr(self.own, name).clone())  # the module writes to it
            for position in (0, max(stage - 1, 0)):
                self.own(like, grid(self.own, torch.tensor([[position]], device=device)), *kind)
            self._frequencies[stage, kind] = getattr(self.own, name).clone()
        return self._frequencies[stage, kind].to(device)


def _varying(kinds: str | dict[str, str]) -> set[str]:
    """Return those of a module's kinds of rotation, one or one per kind of layer, whose angles depend
    on the length of the text."""
    every = kinds.values() if isinstance(kinds, dict) else [kinds]
    return {kind for kind in every if "dynamic" in kind or "longrope" in kind}


def text_rotary(model: PreTrainedModel) -> TextRotary | None:
    """Return the module that rotates the texts of `model` by their length, or None if its rotation
    is the same for all lengths."""
    rotary: Any = own_rotary(model)
    if rotary is None or isinstance(rotary, TextRotary):
        return rotary
    kinds = getattr(rotary, "rope_type", "default")
    if not _varying(kinds):
        return None
    kind: Any = type(model)
    # which drops the cache in classes like Phi-3's
    prepare = unwrap(kind.prepare_inputs_for_generation)
    drops = kinds == "longrope" and ORIGINAL in prepare.__code__.co_names
    return TextRotary(rotary, getattr(model.config, ORIGINAL) if drops else None)


class NoRotary(nn.Module):
    """Stand for the rotary module of a model that rotates nothing because its states place tokens
    (Jamba, Nemotron-H): all angles of the `width` channels of a head are 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("inv_freq", torch.zeros(width // 2), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [1|B T R], of position_ids [1|B T]."""
        return unturned(x.new_empty(*position_ids.shape, 0), self.width)


def unturned(like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return cos 1 and sin 0, each [B T R], for R = `width` channels of tokens `like` [B T E]."""
    shape = *like.shape[:2], width
    return like.new_ones(shape), like.new_zeros(shape)


def grid(rotary: nn.Module, position_ids: Tensor) -> Tensor:
    """Return positions [1|B T] of a text in the form that a rotary module takes: Qwen3.5's wants those
    of time, height and width, [3 1|B T], which are the same in a text."""
    return position_ids.expand(3, -1, -1) if hasattr(rotary, "mrope_section") else position_ids


def own_rotary(model: PreTrainedModel) -> nn.Module | None:
    """Return the model's rotary module, None if it has none."""
    return getattr(model.get_decoder(), "rotary_emb", None)


def rotary_of(model: PreTrainedModel, head_dim: int) -> nn.Module:
    """Return a module that gives the model's angles and is no part of it: its `text_rotary`, or else a
    copy of its own module. A model without any turns all `head_dim` channels by 0."""
    own = own_rotary(model)
    return NoRotary(head_dim) if own is None else text_rotary(model) or deepcopy(own)


def rotation_table(rotary: nn.Module, positions: int, like: Tensor) -> Tensor | None:
    """Return cos and sin [2 C R] of the first C = `positions` positions, with the bits that the
    model's module `rotary`, whose angles do not depend on the length, gives each alone. They have
    the dtype and the device of `like`. Return None if the table would be too large
    (`table_bytes`)."""
    width = rotary(like, torch.zeros(1, 1, dtype=torch.int64, device=like.device))[0].shape[-1]
    if not table_bytes(positions, width, like.element_size()):
        return None
    table = like.new_empty(2, positions, width)
    for start in range(0, positions, AT_ONCE):
        places = torch.arange(start, min(start + AT_ONCE, positions), device=like.device)
        for part, angles in zip(table, rotary(like, places.unsqueeze(0)), strict=True):
            part[start : start + AT_ONCE] = angles[0]
    return table


@contextmanager
def in_place(model: PreTrainedModel, rotary: TextRotary | None) -> Iterator[None]:
    """Let the model rotate keys and queries by the module `rotary` in place of its own until the
    block is left."""
    if rotary is None:
        yield
        return
    decoder: Any = model.get_decoder()
    before, decoder.rotary_emb = decoder.rotary_emb, rotary
    try:
        yield
    finally:
        decoder.rotary_emb = before
