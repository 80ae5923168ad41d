"""A conversation on its way through the simulated server."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from harness.history.simulation.trace import Conversation

_names = count()


@dataclass(slots=True)
class State:
    """`history`: tokens of it that are in the context, window and cuts considered. `blocks`: tokens of the blocks in
    which the store has them, by name; a block is never changed, only made anew under another name."""

    conversation: Conversation
    turn: int = 0
    history: int = 0
    running: bool = False
    asked_s: deque[float] = field(default_factory=deque)  # of the questions that wait
    blocks: dict[int, int] = field(default_factory=dict)

    def append(self, tokens: int, length: int) -> None:
        """Blocks of `length` tokens, the last one shorter, behind those that there are."""
        for start in range(0, tokens, length):
            self.blocks[next(_names)] = min(length, tokens - start)

    def drop(self, tokens: int) -> int:
        """The oldest ones leave. -> how many tokens had the block that the cut went through, 0 for none"""
        kept: dict[int, int] = {}
        cut = 0
        for name, held in self.blocks.items():
            if tokens >= held:
                tokens -= held
            elif tokens:
                kept[next(_names)], cut, tokens = held - tokens, held, 0
            else:
                kept[name] = held
        self.blocks = kept
        return cut

    def sizes(self, token_bytes: int) -> Mapping[int, int]:
        """Bytes of the blocks by name."""
        return {name: tokens * token_bytes for name, tokens in self.blocks.items()}
