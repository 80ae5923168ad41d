"""What happens where a conversation outgrows the window: a share of its history stays (CachedAttention, section 3.4).

`truncate_cache` cuts the cache, whose keys are rotated again, to the start of the window. Its rivals are the paper's:
`truncate_tokens` (TT) cuts the text alone, which is then computed again; `truncate_rotated` (NKVT) cuts the cache and
leaves keys rotated to where they stood.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.cachedattention.turns.histories import Histories, both_ends
from harness.config.groups import OverflowSettings


class Overflow:
    """`settings.window` is a number here, and `settings.by` one of the three."""

    def __init__(self, settings: OverflowSettings) -> None:
        assert settings.window is not None
        self.settings, self.window = settings, settings.window

    def keep(self, held: int, new: int) -> int:
        """How many of `held` tokens stay where `new` ones are to fit in. With first tokens that always stay, none where
        no others would."""
        while held and held + new > self.window:
            held = int(held * self.settings.ratio)
            if held <= self.settings.sinks:
                return 0
        return held

    def make_room(self, histories: Histories, session: str, fed: Sequence[int], new: int) -> list[int]:
        """Before a turn of `new` tokens, its answer's included. `fed`: all tokens of the history, which `histories`
        has. -> those that stay: of a method that evicts as many as it still held, at most."""
        keep = self.keep(len(fed), new)
        if keep == len(fed):
            return list(fed)
        if not keep:
            histories.forget(session)
            return []
        if self.settings.by == "truncate_tokens":
            return both_ends(fed, keep, self.settings.sinks)
        naive = self.settings.by == "truncate_rotated"
        return histories.shorten(session, fed, keep, self.window, sinks=self.settings.sinks, naive=naive)
