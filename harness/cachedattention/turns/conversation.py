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
from typing import Any

import torch
from torch import Tensor

from harness.cachedattention.turns.caches import (
    CachesBetweenTurns,
    Prefill,
    ResumedCache,
    Saved,
    both_ends,
)
from harness.config.settings import OverflowSettings
from harness.engine.cache import KVCache


class Overflow:
    """The rule for a conversation that outgrows the window: when a turn does not fit, its history
    is cut to a share, and the oldest tokens leave (CachedAttention, section 3.4). `settings.window`
    is a number here, and `settings.by` one of three ways.

    `truncate_cache` cuts the cache, and rotates its keys again to the start of the window. Its
    rivals are the paper's: `truncate_tokens` (TT) cuts the text alone, which is then computed
    again; `truncate_rotated` (NKVT) cuts the cache and leaves keys rotated to where they stood."""

    def __init__(self, settings: OverflowSettings) -> None:
        assert settings.window is not None
        self.settings, self.window = settings, settings.window

    def keep(self, history: int, new: int) -> int:
        """Return how many of `history` tokens may stay so that `new` tokens fit into the window.
        Where some first tokens always stay (`overflow.sinks`) and nothing but these would be left,
        return 0."""
        while history and history + new > self.window:
            history = int(history * self.settings.ratio)
            if history <= self.settings.sinks:
                return 0
        return history

    def make_room(
        self, caches: CachesBetweenTurns, session: str, fed: Sequence[int], new: int
    ) -> list[int]:
        """Cut the history of the conversation `session` before a turn of `new` tokens, those of its
        answer included. `fed`: all tokens that the history holds. Return the tokens that stay; of a
        method that evicts, at most as many as it still held."""
        keep = self.keep(len(fed), new)
        if keep == len(fed):
            return list(fed)
        if not keep:
            caches.forget(session)
            return []
        if self.settings.by == "truncate_tokens":
            return both_ends(fed, keep, self.settings.sinks)
        naive = self.settings.by == "truncate_rotated"
        return caches.shorten(
            session, fed, keep, self.window, sinks=self.settings.sinks, naive=naive
        )


class Conversation:
    """A conversation of `turns` turns: its text, and how its KV cache comes into each turn and out
    again. `capacity`: the most tokens of all turns together, prompts and answers."""

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
        """Begin a conversation, which `session` names in `caches`. `overflow`: the rule for when
        its text outgrows the window, None where it always fits. `by_token`: what a later turn adds
        is not prefilled but fed token by token (protocol=context)."""
        self.caches, self.session, self.capacity, self.turns = caches, session, capacity, turns
        self.overflow, self.by_token = overflow, by_token
        self.asked = 0  # turns that have begun
        self.text: list[int] = []  # of user and model so far
        self.fed = 0  # tokens of the text that the cache held when the last turn ended
        self.new_tokens = 0  # tokens of this turn's text that its cache did not hold
        # what a record holds of this turn, by key (harness/cachedattention/facts.py)
        self.facts: dict[str, Any] = {}
        self.save_ahead_s = 0.0
        self._found: ResumedCache | None = None  # between two turns there is no cache
        self._facts_before: dict[str, Any] = {}  # of the turn before
        self._saved: Saved | None = None  # how that was saved

    @property
    def over(self) -> bool:
        """Return whether the turn that was asked last is the conversation's last one."""
        return self.asked == self.turns

    @property
    def found(self) -> ResumedCache:
        """Return this turn's cache, with how much of the history it held and where that was
        found."""
        assert self._found is not None
        return self._found

    @property
    def unread(self) -> list[int]:
        """Return the tokens at the end of the text that the cache does not hold yet. They are fed
        token by token after the seal, which ends the prompt for the method."""
        return self.text[self.found.cache.num_tokens :]

    @torch.inference_mode()
    def ask(self, ids: Sequence[int], new_tokens: int = 0) -> None:
        """Begin the next turn with the prompt `ids`. If it does not fit the window together with an
        answer of `new_tokens`, the oldest part of the history leaves text and cache."""
        self.asked += 1
        self.text += ids
        self._facts_before = self.facts
        self.facts = {}
        if self.overflow is not None:
            fed, unread = self.text[: self.fed], self.text[self.fed :]
            stays = self.overflow.make_room(
                self.caches, self.session, fed, len(unread) + new_tokens
            )
            if self.asked > 1:
                self.facts["dropped_tokens"] = len(fed) - len(stays)
            self.text = stays + unread
            self.fed = len(stays)
        self.facts["history_tokens"] = len(self.text) - len(ids)

    def ahead(self, ids: Sequence[int]) -> None:
        """Begin to load the first layers of the history for the turn that will ask `ids`; no turn
        of any conversation may begin before that one."""
        self.caches.ahead(self.session, [*self.text, *ids][:-1], len(self.text) + len(ids))

    def resume(self) -> None:
        """Take a cache that holds as much of the text as was kept. The text's last token is never
        part of that, because its logits are needed."""
        asked = self.text[: min(self._prefilled, len(self.text) - 1)]
        self._found = self.caches.resume(self.session, asked, self.capacity, whole=len(self.text))
        self._expect_text(self._found.cache)

    def compute(self, prefill: Prefill) -> Tensor | None:
        """Prefill what the cache lacks of the text. Return the logits of the last token [1 V]; None
        where that token is yet to be fed."""
        self._found, logits = self.caches.compute(self.found, self.text[: self._prefilled], prefill)
        found = self._found
        self.facts |= {"hit_tier": found.tier, "load_s": found.load_s, "hidden_s": found.hidden_s}
        if self.caches.stores:
            self.facts |= {"lost_turns": int(found.lost is not None), "lost_to": found.lost}
        self._begun()
        return logits

    def begin(self, cache: KVCache) -> None:
        """Begin the turn with `cache`, which the caller has filled with the beginning of the text
        or all of it, instead of `resume` and `compute`."""
        self._found = ResumedCache(cache)
        self._expect_text(cache)
        self._begun()

    def answered(self, tokens: Sequence[int], stop: str) -> None:
        # without its EOS, for the template ends the turn in its own way
        self.text += tokens[: len(tokens) - (stop == "eos")]

    @torch.inference_mode()
    def save(self) -> Saved:
        """End the turn: keep its cache for the next one, or drop it if the conversation is over.
        Return how long that took, and which rows are still being copied."""
        cache, self._found = self.found.cache, None
        if self.over:
            self.caches.forget(self.session)
            return Saved(0.0)
        self.fed = cache.num_tokens
        self._saved = self.caches.save(self.session, self.text[: self.fed], cache)
        self.facts["save_s"] = self._saved.save_s
        return self._saved

    def await_saved(self) -> None:
        """Wait until all rows of the turn before have left the device, which completes its facts."""
        assert self._saved is not None
        self._facts_before["save_hidden_s"] = self._saved.hidden_s()

    @property
    def _prefilled(self) -> int:
        return self.fed if self.by_token else len(self.text)

    def _expect_text(self, cache: KVCache) -> None:
        if cache.rotary is not None:
            cache.fed.set(torch.tensor([self.text], device=cache.state.request.device))

    def _begun(self) -> None:
        """Count this turn's new tokens, once the cache holds the prompt, and begin to copy the
        prompt's rows to the store."""
        self.new_tokens, self.save_ahead_s = len(self.text) - self.found.reused, 0.0
        if not self.over:
            cache = self.found.cache
            self.save_ahead_s = self.caches.save_ahead(
                self.session, self.text[: cache.num_tokens], cache
            )
            self.facts["save_ahead_s"] = self.save_ahead_s
        if self.turns > 1:
            self.facts |= {"reused_tokens": self.found.reused, "new_tokens": self.new_tokens}
