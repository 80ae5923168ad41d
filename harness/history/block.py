"""Consecutive tokens of a session with their rows. A block is never changed, only made anew under another name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

import torch
from torch import Tensor

from harness.history.fingerprint import EXACT, behind_cut
from harness.history.losses import Loss
from methods.tiers.block import Format, Tensors, host_copy
from methods.tiers.rows import Place, copied_into
from methods.tiers.tier import HOST


@dataclass(frozen=True, slots=True)
class File:
    """`sha256`: of its head, which holds those of the tensors."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` is None where they lie on disk alone, else they are in memory of `tier`; some may still be on their way
    (harness/history/overlap/leaving.py). Without tokens: what belongs to all of a session's together. `file`: how they
    were written, if they were."""

    name: str
    tokens: tuple[int, ...]
    size: int  # bytes of the rows
    rows: Mapping[str, Tensor] | None
    file: File | None = None
    tier: str = HOST

    def laid_in(self, tier: str, on: torch.device) -> Block:
        """With its rows in memory of that tier, of the device `on`; as it is where they lie on disk alone."""
        if self.rows is None or self.tier == tier:
            return self
        rows = {name: copied_into(tier, x, Place(on)) for name, x in self.rows.items()}
        return replace(self, rows=rows, tier=tier)

    def tail(self, drop: int, format_: Format) -> Block:
        """Without its first `drop` tokens, under a name of its own."""
        rows = {name: rows[..., drop:, :] for name, rows in format_.decode(dict(self.rows or {})).items()}
        return block(self.tokens[drop:], format_.encode(rows))


def block(tokens: Sequence[int], rows: Mapping[str, Tensor]) -> Block:
    copies = {name: host_copy(one) for name, one in rows.items()}
    return Block(uuid4().hex, tuple(tokens), sum(one.nbytes for one in copies.values()), copies)


def by_layer(names: Iterable[str]) -> dict[int, list[str]]:
    """Names without a layer's number come with layer 0."""
    found: dict[int, list[str]] = {}
    for name in names:
        number = name.partition(".")[0]
        found.setdefault(int(number) if number.isdigit() else 0, []).append(name)
    return found


def joined(parts: Sequence[Tensors]) -> Tensors:
    """The rows of blocks of tokens, copied into one tensor per name."""
    return {name: torch.cat([rows[name] for rows in parts], dim=-2) for name in parts[0]} if parts else {}


def has_rest(parts: Sequence[Block]) -> bool:
    """Whether something belongs to all of the blocks together."""
    return bool(parts) and not parts[-1].tokens


def covered(parts: Sequence[Block], tokens: Sequence[int]) -> int:
    """How many of the blocks, from the first on, hold just what `tokens` begin with."""
    start = 0
    for count, part in enumerate(parts):
        end = start + len(part.tokens)
        if tuple(tokens[start:end]) != part.tokens:
            return count
        start = end
    return len(parts)


def length(parts: Sequence[Block]) -> int:
    """In tokens."""
    return sum(len(part.tokens) for part in parts)


def without_first(
    parts: Sequence[Block], drop: int, read: Callable[[Sequence[Block]], list[Block]], format_: Format
) -> list[Block]:
    """Those that hold what is behind the first `drop` tokens; `read` brings the rows of a block that is cut."""
    for place, part in enumerate(parts):
        if drop < len(part.tokens):
            first = read([part])[0].tail(drop, format_) if drop else part
            return [first, *parts[place + 1 :]]
        drop -= len(part.tokens)
    return []


@dataclass(frozen=True, slots=True)
class Found:
    """The first `tokens` of those asked for are in `layers`; `tier` is None on a miss."""

    tokens: int = 0
    tier: str | None = None
    layers: Tensors = field(default_factory=dict)
    rest: Tensors = field(default_factory=dict)


class Sessions:
    """The blocks of sessions by key, the lineages of their rows, and why those that are gone are."""

    def __init__(self) -> None:
        self.sessions: dict[str, list[Block]] = {}
        self.lineages: dict[str, str] = {}
        self.losses: dict[str, Loss] = {}

    def of(self, key: str, lineage: str) -> list[Block]:
        """The session's blocks, if they are of that lineage."""
        return self.sessions.get(key, []) if self.lineages.get(key) == lineage else []

    def until(self, key: str, end: int, lineage: str) -> list[Block] | None:
        """Those that hold the first `end` tokens; None where no block ends there."""
        known = self.of(key, lineage)
        return next((known[:count] for count in range(len(known) + 1) if length(known[:count]) == end), None)

    def covered(self, key: str, tokens: Sequence[int], lineage: str) -> int:
        """How many blocks of the session, from the first on, are of use to what begins with `tokens`."""
        parts = self.of(key, lineage)
        count = covered(parts, tokens)
        return 0 if has_rest(parts) and count < len(parts) else count

    def known(self, key: str, tokens: Sequence[int], lineage: str) -> int:
        """How many tokens these blocks hold."""
        return length(self.of(key, lineage)[: self.covered(key, tokens, lineage)])

    def longest(self, own: str, tokens: Sequence[int]) -> str:
        """The session that knows most of what `tokens` begin with; `own` where no other one knows more."""
        best, most = own, self.known(own, tokens, EXACT)
        for key, parts in self.sessions.items():
            if not has_rest(parts) and (known := self.known(key, tokens, EXACT)) > most:
                best, most = key, known
        return best

    def cut(self, key: str, kept: list[Block], dropped: int) -> None:
        """The first `dropped` tokens have left the session."""
        if dropped:
            text = [token for block in self.sessions[key] for token in block.tokens]
            self.lineages[key] = behind_cut(self.lineages[key], text, dropped)
        self.sessions[key] = kept

    def filed(self, key: str, written: Mapping[str, Block], leaves: bool) -> None:
        """The files of `written` are there; with `leaves` the rows in memory go."""
        self.sessions[key] = [
            replace(block, rows=None if leaves else block.rows, file=written[block.name].file)
            if block.name in written
            else block
            for block in self.sessions[key]
        ]
