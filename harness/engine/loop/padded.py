"""Defines the cache for a batch whose rows a loop has padded on the left: each row has a cache of
its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.engine.batch.cache import SlotsCache
from harness.engine.cache import RoomError, UnsupportedError
from harness.engine.loop.cache import LoopCache
from methods.base import AttnInput


class PaddedCache(LoopCache):
    """Split what arrives by its mask. A prompt is computed row by row, without the padding, and
    steps are taken together, as in a `RunningBatch`. Each row gets what it gets alone.

    `num_tokens` counts columns of the loop's tensors, padding included. In a further turn padding
    comes after the last token of the answer, which a loop feeds with the new turn."""

    recomputes_rows = True

    def __init__(self, members: Sequence[LoopCache]) -> None:
        """`members`: fresh caches of one sequence each."""
        super().__init__(members[0].layers, members[0].state)
        self._members = tuple(members)
        self._slots: SlotsCache | None = None  # steps the members together; made again after their memory moved
        self._mask = torch.empty(len(members), 0, dtype=torch.bool)  # [B columns], mask of the forwards so far
        self._turn = 0  # the column with which the turn began
        self._upcoming = self._mask  # mask including the current forward
        self._tokens: list[Tensor] = []  # per row, the columns of the current forward that hold tokens

    @property
    def members(self) -> tuple[LoopCache, ...]:
        """Return the caches of the rows, up to date with every step so far."""
        self._catch_up()
        return self._members

    @property
    def capacity(self) -> int:
        return max(member.capacity for member in self._members)

    def read_mask(self, mask: Tensor | None, tokens: int, device: torch.device) -> Tensor:
        """Split the next forward, of `tokens` columns, by `mask` [B columns]; None: without
        padding. Return the positions of its tokens [B tokens]."""
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
        _refuse_holes(mask[:, self._turn + (self._turn > 0) :])
        if tokens == 1 and self._turn == self.num_tokens and not new.all():
            raise UnsupportedError("The mask hides the only token of a row: a step takes one token of every row.")
        self._upcoming, self._tokens = mask, [row.nonzero().view(-1).to(device) for row in new]
        begins = torch.tensor([member.num_tokens for member in self._members]).view(-1, 1)
        return (begins + new.cumsum(1) - 1).clamp(min=0).to(device)

    def expect_columns(self, columns: int) -> None:
        for member, mask in zip(self._members, self._upcoming, strict=True):
            if mask.any():  # all of the row's padding has arrived
                member.expect_columns(columns - int((~mask).sum()))

    def text_lengths(self, arriving: int) -> list[int]:
        """Return the length of each row's text."""
        pairs = zip(self._members, self._tokens, strict=True)
        return [member.note_length(member.num_tokens + len(tokens)) for member, tokens in pairs]

    def note_text(self, ids: Tensor, *, prompt: bool = False) -> None:
        """Remember the ids [B T] of the forward whose mask was read, without the padding."""
        for row, (member, tokens) in enumerate(zip(self._members, self._tokens, strict=True)):
            member.note_text(ids[row : row + 1, tokens], prompt=False)

    def outgrowing(self) -> list[int]:
        """Return the rows that the next step computes again."""
        return [row for row, member in enumerate(self._members) if member.outgrows and len(self._tokens[row]) == 1]

    def replace_row(self, row: int, fresh: LoopCache) -> None:
        """Make `fresh` the cache of a row; it takes the next token as the last of its prompt."""
        self._part()
        fresh.open_turn()
        fresh.recomputed = self._members[row].recomputed + 1
        self._members = (*self._members[:row], fresh, *self._members[row + 1 :])

    def open_turn(self) -> None:
        super().open_turn()
        self._part()

    def seal(self) -> None:
        for member in self._members:
            if not member.prompt_next:
                member.seal()
        self.sealed, self._prompt_next = True, False

    def begin(self) -> None:
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
        out = torch.zeros_like(x.q)
        for row, (member, tokens) in enumerate(zip(self._members, self._tokens, strict=True)):
            if len(tokens):
                out[row, :, tokens] = member.attend(layer, _row(x, row, tokens, member.num_tokens))[0]
        return out

    def contents(self) -> list[dict[str, Tensor]]:
        raise UnsupportedError("Rows of a padded batch are caches of their own: ask each of cache.members.")

    def refill(self, contents: Sequence[Mapping[str, Tensor]]) -> None:
        self.contents()

    def _check_room(self, sequences: int, tokens: int) -> None:
        if sequences != len(self._members):
            raise RoomError(
                f"The cache holds {len(self._members)} padded rows and {sequences} arrive: go on with those."
            )

    def _arrive(self, tokens: int) -> None:
        super()._arrive(tokens)
        if self.sealed:
            self._begin_step()
            return
        self._part()
        for member in self._members:
            member.open_turn()

    def _begin_step(self) -> None:
        self._catch_up()
        if any(member.prompt_next for member in self._members):  # such a row steps alone, and so do the others
            self._part()
            return
        for member in self._members:
            if not member.sealed:
                member.seal()
        if any([member.make_room(1) for member in self._members]):
            self._slots = None
        if self._slots is None:
            self._slots = SlotsCache(self._members)
        self._slots.begin()

    def _part(self) -> None:
        """Let the members continue one by one."""
        self._catch_up()
        self._slots = None

    def _catch_up(self) -> None:
        """Update each member with the steps that were counted for all at once, and with what the
        last of them chose for it."""
        if self._slots is not None:
            for number in range(len(self._members)):
                self._slots.catch_up(number)


def _refuse_holes(mask: Tensor) -> None:
    """Raise `UnsupportedError` unless every row of `mask` [B T], of one turn, is padding followed
    by tokens."""
    if not torch.equal(mask, mask.cummax(1).values):
        raise UnsupportedError(
            "The attention mask hides tokens after the first of a row: only padding on the left is supported "
            "(tokenizer.padding_side='left')."
        )


def _row(x: AttnInput, row: int, tokens: Tensor, start: int) -> AttnInput:
    """Return the attention input of some `tokens` [N] of one row, without the padding around
    them."""
    own = slice(row, row + 1)
    q, k, v = (part[own].index_select(2, tokens) for part in (x.q, x.k, x.v))
    cos, sin, hidden = (part[own].index_select(1, tokens) for part in (x.cos, x.sin, x.hidden))
    return AttnInput(q, k, v, cos, sin, hidden, start)
