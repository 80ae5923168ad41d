"""What is asked on one cache: the turns of an example, and under questions=shared the next example with its context."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.conversations.histories import Histories, Saved
from harness.conversations.overflow import Overflow
from harness.engine.batch.generation import Generation
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.slot import Slot, seal
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.saved_state import Snapshot
from harness.engine.wait import wait_for
from harness.jobs.planning.items import Item
from harness.jobs.shared_prefill import Prefilled
from harness.jobs.usage import Usage, larger
from harness.results.records import PEAKS

Ending = Callable[[Item], dict[str, Any]]  # how tokens are picked for a turn, and when it stops


@dataclass
class Answer:
    """What an example gave, turn by turn, and what ran meanwhile used: its prefills, and the steps that it was in."""

    item: Item
    prefill: Usage
    decode: Usage
    turns: list[Generation] = field(default_factory=list)
    reuse: list[dict[str, Any]] = field(default_factory=list)  # of each turn of a conversation: fields of a reply
    prefilled_by: str | None = None  # id of the example whose prefill and seal it used

    @property
    def peaks(self) -> dict[str, Any]:
        """Fields of a record. Peaks are the process', with all that runs beside."""
        prefill, decode = self.prefill, self.decode
        peaks = (prefill.device_bytes, prefill.host_bytes, decode.device_bytes, decode.host_bytes)
        return {
            "device_peak_bytes": larger(prefill.device_bytes, decode.device_bytes),
            "host_peak_bytes": larger(prefill.host_bytes, decode.host_bytes),
            "peaks": dict(zip(PEAKS, peaks, strict=True)),
        }


def by_context(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Examples whose contexts are the same tokens, in the order in which contexts first come up."""
    groups: dict[tuple[object, ...], list[Item]] = {}
    for item in items:
        ids, split = item.prompt.ids, item.prompt.split
        key = ids[:split] if split < len(ids) else (item.example.id,)  # without a question there is one prompt
        groups.setdefault(key, []).append(item)
    yield from groups.values()


def room(items: Sequence[Item]) -> int:
    """Tokens that a cache must hold on which all of `items` are asked, one after the other."""
    return max(item.room for item in items)


class SealedContext:
    """A context that is prefilled and sealed once, for several questions.

    After each answer the cache goes back to what it was behind the seal, so a question sees nothing of those before it
    and gets the answer that it would get alone under protocol=context. The first question's clock began with the
    prefill, a later one's begins with itself; keeping and putting back the cache is in no clock.
    """

    @torch.inference_mode()
    def __init__(self, cache: KVCache, began: float) -> None:
        """Seals `cache`. `began`: when its prefill did."""
        self.cache, self._device = cache, cache.state.request.device
        self.seal_s = seal(cache)
        before = perf_counter()
        self.snapshot = Snapshot(cache)
        wait_for(self._device)
        self._began: float | None = began + perf_counter() - before

    def begin(self) -> float:
        """For the next question, from where its clock runs."""
        if self._began is not None:
            began, self._began = self._began, None
            return began
        self.snapshot.restore()
        wait_for(self._device)
        return perf_counter()


class Talk:
    """One cache in a running batch. `next` lets the next turn run, once the one before has ended."""

    def __init__(
        self,
        engine: Engine,
        histories: Histories,
        items: Sequence[Item],
        prefilled: Prefilled,
        context: int | None,
        ending: Ending,
        overflow: Overflow | None,
    ) -> None:
        """`items` have one context. `context`: tokens of the first that were prefilled; None for its whole prompt.
        `overflow`: None where no history outgrows the window."""
        self.engine, self.histories, self.ending, self.overflow = engine, histories, ending, overflow
        self.cache: KVCache | None  # None between two turns
        self.cache, self._logits, self._began, self._usage = prefilled
        self._capacity = self.cache.capacity
        self._text: list[int] = []  # of the conversation so far
        self._fed = 0  # of it, tokens that the cache held between the last two turns
        self._context, self._waiting = context, deque(items)
        self._first, self._several = items[0].example.id, len(items) > 1
        self._shared: SealedContext | None = None  # once the first of several is asked
        self._turns = deque[Item]()  # of the example that is asked, those to come
        self._unanswered: Snapshot | None = None  # the cache before the answer, where a given reply takes its place
        self._saved: Saved  # the turn before
        self.answer: Answer

    @property
    def answered(self) -> bool:
        """Whether the example that is asked has had all its turns."""
        return not self._turns

    def next(self, batch: RunningBatch) -> Slot | None:
        """None where nothing is left to ask."""
        if self._turns:
            return self._turn(batch, self._turns.popleft())
        return self._question(batch, self._waiting.popleft()) if self._waiting else None

    @torch.inference_mode()
    def ended(self, made: Generation) -> None:
        """An EOS gives way to the template's end of a turn; an answer that a given reply replaces leaves no trace."""
        self.answer.turns.append(made)
        if not self._turns:
            return
        assert self.cache is not None
        if self._unanswered is not None:
            self._unanswered.restore()
            self._unanswered = None
            wait_for(self.cache.state.request.device)
        if not self._turns[0].prompt.replaces_answer:
            [said], [stop] = made.tokens, made.stops
            self._text += said[: len(said) - (stop == "eos")]
        self._save(self.cache, made)

    def _save_ahead(self, session: str, cache: KVCache) -> dict[str, float]:
        """The prompt's rows may go where the next turn finds them."""
        return {"save_ahead_s": self.histories.save_ahead(session, self._text[: cache.num_tokens], cache)}

    def _save(self, cache: KVCache, made: Generation) -> None:
        """The cache goes where the next turn finds it. A last token has not been fed, nor what was taken back."""
        self._fed = cache.num_tokens
        self._saved = self.histories.save(self._session, self._text[: self._fed], cache)
        self.cache = None
        self.answer.reuse[-1]["save_s"] = self._saved.save_s
        made.share_s += self._saved.save_s

    @property
    def _session(self) -> str:
        return self.answer.item.example.id

    def _question(self, batch: RunningBatch, item: Item) -> Slot:
        """The first turn of an example."""
        ids = self._tensor(item.prompt.ids)
        question = ids[:, ids.shape[1] if self._context is None else self._context :]
        later = self._first if item.example.id != self._first else None
        assert self.cache is not None
        self._text = list(item.prompt.ids)
        with Usage(ids.device) as usage:
            ahead = self._save_ahead(item.example.id, self.cache) if item.further else {}
            if self._several and later is None:
                self._shared = SealedContext(self.cache, self._began)
            began = self._began if self._shared is None else self._shared.begin()
            slot = batch.join(self.cache, self._logits, question, began=began, **self.ending(item))
        if self._shared is not None and later is None:
            slot.out.seal_s = self._shared.seal_s
        self.answer = Answer(item, self._usage if later is None else Usage(ids.device), usage, prefilled_by=later)
        self._turns.extend(item.further)
        if item.further:
            self.answer.reuse.append({"reused_tokens": 0, "new_tokens": len(self._text), **ahead})
        return self._kept(slot, self.cache)

    def _turn(self, batch: RunningBatch, turn: Item) -> Slot:
        """A further turn: prefilled and sealed with all before it; under protocol=context read token by token behind
        what was fed before, which is sealed anew where the cache did not stay."""
        self._text += turn.prompt.ids
        began = perf_counter()
        with Usage(self.engine.model.device) as usage:
            dropped = self._make_room(turn.new_tokens)
            prefilled = len(self._text) if self._context is None else self._fed
            asked = self._text[: min(prefilled, len(self._text) - 1)]
            found = self.histories.resume(self._session, asked, self._capacity)
            found, logits = self.histories.compute(found, self._text[:prefilled], self._prefill)
            ahead = self._save_ahead(self._session, found.cache) if self._turns else {}
            slot = batch.join(
                found.cache, logits, self._tensor(self._text[prefilled:]), began=began, **self.ending(turn)
            )
        self.cache = found.cache
        self.answer.reuse[-1]["save_hidden_s"] = self._saved.hidden_s()
        self.answer.prefill.add(usage)
        new = len(self._text) - found.reused
        seconds = {"load_s": found.load_s, "hidden_s": found.hidden_s}
        left = {"dropped_tokens": dropped} if self.overflow is not None else {}
        lost = {"lost_turns": int(found.lost is not None), "lost_to": found.lost} if self.histories.stores else {}
        counts = {"hit_tier": found.tier, "reused_tokens": found.reused, "new_tokens": new}
        self.answer.reuse.append({**counts, **lost, **left, **seconds, **ahead})
        return self._kept(slot, found.cache)

    @torch.inference_mode()
    def _make_room(self, new_tokens: int) -> int:
        """Where text and answer outgrow the window, part of the history leaves both text and cache. -> tokens"""
        if self.overflow is None:
            return 0
        fed, unread = self._text[: self._fed], self._text[self._fed :]
        kept = self.overflow.make_room(self.histories, self._session, fed, len(unread) + new_tokens)
        self._text, self._fed = kept + unread, len(kept)
        return len(fed) - len(kept)

    @torch.inference_mode()
    def _kept(self, slot: Slot, cache: KVCache) -> Slot:
        """`slot`, in no clock, its cache kept where a given reply follows."""
        if self._turns and self._turns[0].prompt.replaces_answer and not slot.ended:
            self._unanswered = Snapshot(cache)
            wait_for(cache.state.request.device)
        return slot

    def _prefill(self, cache: KVCache, tokens: Sequence[int]) -> Tensor:
        return self.engine.prefill(cache, self._tensor(tokens))

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.long, device=self.engine.model.device)
