"""One conversation, turn by turn: its text, and how its cache comes into a turn and out of it again.

    talk = Conversation(caches, "alice", capacity=4096, turns=3)
    while not talk.over:
        talk.ask(question)              # token ids
        talk.resume()                   # layers of the history may still be on their way
        logits = talk.compute(prefill)  # what is lacking; then rows of the prompt may leave the device
        ...                             # seal, decode
        talk.answered(tokens, stop)
        talk.save()

The last token of an answer has not been fed, so it has no keys and values: the next turn's prompt begins with it. A
conversation that is over keeps nothing, since no turn comes back for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.cachedattention.turns.caches import CachesBetweenTurns, Prefill, ResumedCache, Saved, both_ends
from harness.config.settings import OverflowSettings
from harness.engine.cache import KVCache


class Overflow:
    """The rule for a conversation that outgrows the window: a share of its history stays (CachedAttention, section
    3.4). `settings.window` is a number here, and `settings.by` one of three ways.

    `truncate_cache` cuts the cache, whose keys are rotated again, to the start of the window. Its rivals are the
    paper's: `truncate_tokens` (TT) cuts the text alone, which is then computed again; `truncate_rotated` (NKVT) cuts
    the cache and leaves keys rotated to where they stood.
    """

    def __init__(self, settings: OverflowSettings) -> None:
        assert settings.window is not None
        self.settings, self.window = settings, settings.window

    def keep(self, history: int, new: int) -> int:
        """Return how many of `history` tokens stay where `new` ones are to fit in. Where first tokens always stay, none
        stay unless others do."""
        while history and history + new > self.window:
            history = int(history * self.settings.ratio)
            if history <= self.settings.sinks:
                return 0
        return history

    def make_room(self, caches: CachesBetweenTurns, session: str, fed: Sequence[int], new: int) -> list[int]:
        """Cut a history before a turn of `new` tokens, its answer's included, and return the tokens that stay. `fed`:
        all tokens of the history. Of a method that evicts, at most as many stay as it still held."""
        keep = self.keep(len(fed), new)
        if keep == len(fed):
            return list(fed)
        if not keep:
            caches.forget(session)
            return []
        if self.settings.by == "truncate_tokens":
            return both_ends(fed, keep, self.settings.sinks)
        naive = self.settings.by == "truncate_rotated"
        return caches.shorten(session, fed, keep, self.window, sinks=self.settings.sinks, naive=naive)


def without_eos(tokens: Sequence[int], stop: str) -> Sequence[int]:
    """Return what stays of an answer in the text: its EOS gives way to the template's end of a turn."""
    return tokens[: len(tokens) - (stop == "eos")]


class Conversation:
    """A conversation of `turns` turns. `capacity`: the most tokens of all of them, prompts and answers."""

    def __init__(
        self,
        caches: CachesBetweenTurns,
        session: str,
        capacity: int,
        turns: int,
        *,
        overflow: Overflow | None = None,
        by_token: bool = False,
    ) -> None:
        """Begin a conversation. `overflow`: None where its text always fits the window. `by_token`: what a further turn
        adds is not prefilled but fed token by token (protocol=context)."""
        self.caches, self.session, self.capacity, self.turns = caches, session, capacity, turns
        self.overflow, self.by_token = overflow, by_token
        self.asked = 0  # turns that have begun
        self.text: list[int] = []  # of user and model so far
        self.fed = 0  # tokens of the text that the cache held when the last turn ended
        self.dropped = 0  # tokens that left the window before this turn
        self.new_tokens = 0  # tokens of this turn's text that its cache did not hold
        self.save_ahead_s = 0.0
        self._found: ResumedCache | None = None  # between two turns there is no cache

    @property
    def over(self) -> bool:
        """Return whether the turn that was asked last is the conversation's last."""
        return self.asked == self.turns

    @property
    def found(self) -> ResumedCache:
        """Return this turn's cache, and what it had of the history."""
        assert self._found is not None
        return self._found

    @property
    def unread(self) -> list[int]:
        """Return the end of the text, which is to be fed token by token after the seal."""
        return self.text[self.found.cache.num_tokens :]

    @torch.inference_mode()
    def ask(self, ids: Sequence[int], new_tokens: int = 0) -> None:
        """Begin the next turn. If it does not fit the window with an answer of `new_tokens`, a part of the history
        leaves text and cache."""
        self.asked += 1
        self.text += ids
        if self.overflow is not None:
            fed, unread = self.text[: self.fed], self.text[self.fed :]
            stays = self.overflow.make_room(self.caches, self.session, fed, len(unread) + new_tokens)
            self.text, self.fed, self.dropped = stays + unread, len(stays), len(fed) - len(stays)

    def ahead(self, ids: Sequence[int]) -> None:
        """Let the first layers of the history come: the next turn to begin, of all conversations, asks `ids` here."""
        self.caches.ahead(self.session, [*self.text, *ids][:-1], len(self.text) + len(ids))

    def resume(self) -> None:
        """Take a cache with as much of the text as there is, but without its last token, whose logits are needed."""
        asked = self.text[: min(self._prefilled, len(self.text) - 1)]
        self._found = self.caches.resume(self.session, asked, self.capacity, whole=len(self.text))
        self._expect_text(self._found.cache)

    def compute(self, prefill: Prefill) -> Tensor | None:
        """Prefill what the cache lacks. Return the logits of the last token [1 V]; None where it is yet to be fed."""
        self._found, logits = self.caches.compute(self.found, self.text[: self._prefilled], prefill)
        self._begun()
        return logits

    def begin(self, cache: KVCache) -> None:
        """Go on with `cache`, which the caller has filled with the beginning of the text or all of it."""
        self._found = ResumedCache(cache)
        self._expect_text(cache)
        self._begun()

    def answered(self, tokens: Sequence[int], stop: str) -> None:
        self.text += without_eos(tokens, stop)

    @torch.inference_mode()
    def save(self) -> Saved:
        """End the turn: put its cache where the next one finds it, or nowhere if the conversation is over."""
        cache, self._found = self.found.cache, None
        if self.over:
            self.caches.forget(self.session)
            return Saved(0.0)
        self.fed = cache.num_tokens
        return self.caches.save(self.session, self.text[: self.fed], cache)

    @property
    def _prefilled(self) -> int:
        return self.fed if self.by_token else len(self.text)

    def _expect_text(self, cache: KVCache) -> None:
        if cache.rotary is not None:
            cache.expect_text(torch.tensor([self.text], device=cache.state.request.device))

    def _begun(self) -> None:
        """Note what was new, once the cache holds the prompt, and let its rows leave."""
        self.new_tokens, self.save_ahead_s = len(self.text) - self.found.reused, 0.0
        if not self.over:
            cache = self.found.cache
            self.save_ahead_s = self.caches.save_ahead(self.session, self.text[: cache.num_tokens], cache)
