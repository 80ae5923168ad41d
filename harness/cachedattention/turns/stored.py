"""Conversations in a `HistoryStore`: a turn loads what is stored of its text, and stores what is
new.

What a cache holds is stored in two kinds. Rows are the keys and values of every token, in layers
that keep all of them as the model made them, with keys before their rotation: they may be read in
part and go on growing. Everything else is the rest: windows, states, what a method that evicts has kept (at
its positions), sums over queries, keys that a method rewrites. A rest can be used only if the next
turn's text begins with exactly the tokens that were saved, to the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from harness.cachedattention.store.block import HistoryLost, Loss
from harness.cachedattention.store.fingerprint import (
    EXACT,
    cut_lineage,
    recomputed_lineage,
    rotated_lineage,
)
from harness.cachedattention.store.history_load import HistoryLoad, LayerRows, Prepare
from harness.cachedattention.store.history_store import NOTHING, HistoryStore, has_rows
from harness.cachedattention.store.upload import MakeStored, UploadToHost
from harness.cachedattention.turns.caches import (
    CachesBetweenTurns,
    NewCache,
    ResumedCache,
    both_ends,
)
from harness.cachedattention.turns.truncation import Rotation
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.models.layer_kinds import layer_kinds
from methods.layers.storage import FIRST
from methods.tiers.block import FAR, K, SplitRows, Tensors, V, stays_away

CacheContents = Sequence[Mapping[str, Tensor]]  # by layer, as `KVCache.contents` gives them
NEAR = {K: "k0", V: "v0"}  # of all heads together, in a state; keys alone if they hold values
SEEN = "seen"


class StoredForm:
    """The form in which the caches of one model and method are stored, of one sequence each: rows,
    which are keys and values token by token, and a rest, which is all other state. It converts
    between this form and a cache's contents."""

    def __init__(self, attachment: Attachment) -> None:
        dtype, budget = attachment.model.dtype, attachment.budget
        self.rotations = [Rotation(spec.rope, dtype) for spec in attachment.model_specs]
        self.by_token = has_rows(
            attachment.method, attachment.options.codec, budget.generated if budget else None
        )
        self.stateful = bool(layer_kinds(attachment.model.config).stateful)
        # no rest
        self.rows_alone = (
            self.by_token
            and not self.stateful
            and all(spec.window is None for spec in attachment.model_specs)
        )
        # computing a text again, in one prefill, gives what was stored of it; in fewer bits to their rounding alone,
        # and not where sparse reads shape the rows of answers
        whole = self.by_token and not attachment.method.uses_budget
        self.repeatable = whole and dtype in (torch.float32, torch.float64)
        self._kinds = _alike(self.rotations)

    def check(self, tokens: int) -> None:
        """Raise `RotationError` if the model rotates keys by the length of the text, so that the
        rows of a text of so many tokens cannot serve a shorter one."""
        for rotation in self.rotations:
            rotation.check(tokens)

    def rows(self, contents: CacheContents, start: int, end: int) -> dict[str, SplitRows]:
        """Return keys and values of the tokens from `start` to `end`, [1 G T D] each, under names
        such as "3.k" for layer 3. They are views of where the cache has them, on the device or in
        host memory; keys are still rotated."""
        return {
            f"{layer}.{kind}": _in_order(state, kind).cut(start, end)
            for layer, state in enumerate(contents)
            for kind in (K, V)
            if self._has_rows(state) and NEAR[kind] in state
        }

    def unrotated(
        self, start: int, end: int, rows: Mapping[str, SplitRows], text: int
    ) -> MakeStored:
        """Return a function that turns rows of a layer into those to store: it undoes the rotation
        of the keys, each where it lies. `start`, `end`: the positions of the tokens; `rows`: those
        of all layers, for the devices on which they lie; `text`: the length of the text for which
        they are rotated. Any thread may call the function."""
        places = {part.device for x in rows.values() for part in x.parts}
        fixed = {
            place: self._fixed(torch.arange(start, end, device=place), text) for place in places
        }

        def stored(number: int, rows: Mapping[str, SplitRows]) -> Mapping[str, SplitRows]:
            def off(part: Tensor, before: int) -> Tensor:
                positions = torch.arange(
                    start + before, start + before + part.shape[-2], device=part.device
                )
                return fixed[part.device][self._kinds[number]].off(part, positions).to(part.dtype)

            keys = f"{number}.{K}"
            return {**rows, keys: rows[keys].each(off)}

        return stored

    def rest(self, contents: CacheContents) -> Tensors:
        """Return all tensors of a cache's contents that are not keys and values of single tokens,
        under names such as "3.NAME" for layer 3."""
        return {
            f"{layer}.{name}": x
            for layer, state in enumerate(contents)
            for name, x in state.items()
            if not (self._has_rows(state) and (name in (*NEAR.values(), SEEN) or stays_away(name)))
        }

    def states(self, tokens: int, device: torch.device, text: int) -> Prepare:
        """Return a function that turns the stored rows and rest of a layer, of at most `tokens`
        tokens, into the layer's state for `KVCache.refill_by_layer`, with keys rotated as in a text
        of `text` tokens. Any thread may call the function."""
        fixed = self._fixed(torch.arange(tokens, device=device), text) if self.by_token else {}

        def prepared(number: int, layer: LayerRows) -> LayerRows:
            rows, rest = ({name.partition(".")[2]: x for name, x in part.items()} for part in layer)
            state = {
                name: x if name == SEEN or stays_away(name) else x.to(device)
                for name, x in rest.items()
            }
            if rows:
                state |= {NEAR[kind]: x.to(device) for kind, x in rows.items()}
                keys = state[NEAR[K]]
                positions = torch.arange(keys.shape[2], device=device)
                state[NEAR[K]] = fixed[self._kinds[number]].on(keys, positions)
                state[SEEN] = torch.tensor(keys.shape[2])
            return state, {}

        return prepared

    def _has_rows(self, state: Mapping[str, Tensor]) -> bool:
        return self.by_token and NEAR[K] in state

    def _fixed(self, positions: Tensor, text: int) -> dict[int, Rotation]:
        """Return the rotations of these positions, with angles computed now. They are keyed by the
        number of the first layer that has each."""
        return {kind: self.rotations[kind].fixed(positions, text) for kind in set(self._kinds)}


def _in_order(state: Mapping[str, Tensor], kind: str) -> SplitRows:
    """Return a layer's keys or values (`kind`) in the order of their tokens, though some may lie in
    host memory and others on the device."""
    near, away = state[NEAR[kind]], state.get(f"{FAR}.{kind}")
    if away is None:
        return SplitRows(near)
    first = int(state[FIRST])
    return SplitRows(near[:, :, :first], away, near[:, :, first:])


def _alike(rotations: Sequence[Rotation]) -> list[int]:
    """Return for each layer the number of the first layer with the same rotation; most models have
    one or two rotations."""
    angles = [torch.cat(rotation.angles(torch.tensor([1])), 1) for rotation in rotations]
    return [next(first for first, other in enumerate(angles) if other.equal(own)) for own in angles]


def _known_again(tokens: Sequence[int]) -> tuple[int, int]:
    """Return the length and the hash of tokens, by which the same tokens can be recognised later
    without being kept."""
    return len(tokens), hash(tuple(tokens))


class StoredCaches(CachesBetweenTurns):
    """The KV caches of conversations, which leave the device after each turn and lie in a store
    until the next.

    A method that leaves all rows as the model made them (`Method.rows_stay`) uses any prefix that
    is stored, and a turn writes its own rows alone. Every other method goes on only where the text
    is the same to its last token, or else computes everything; each of its turns writes the whole
    session.

    A history that was cut gets a lineage of its own, a hash under which its rows are stored, and so
    does what is computed after it (store/fingerprint.py). What the store has of a session is looked
    for under the lineage with which it was saved last, or EXACT if these caches have not saved it.

    A history that was stored and is gone is computed again, as any other text. Where that gives
    something else than what was stored, the turn is `lost`, and what it computes gets a lineage of
    its own too.

    Where the model rotates by the length of the text, a history serves as long as the text is
    rotated as it was. A text whose tokens are rotated in several ways is not stored, since no later
    text is rotated so."""

    stores = True

    def __init__(
        self,
        start: NewCache,
        attachment: Attachment,
        store: HistoryStore,
        read_buffer: int | None = None,
    ) -> None:
        """Keep caches of conversations in `store`. `start`: makes a fresh cache for so many tokens.
        `read_buffer`: how many layers to load before a turn begins, None for as many as the paper's
        formula says."""
        super().__init__(start)
        self.store, self.form, self.read_buffer = store, StoredForm(attachment), read_buffer
        self._device, self._stage = attachment.model.device, attachment.stage
        # by session: how what is stored of it is rotated; None: not stored
        self._stages: dict[str, int | None] = {}
        self._lineages: dict[str, str] = {}  # by session
        # of caches that are in use
        self._lineage_of: WeakKeyDictionary[KVCache, str] = WeakKeyDictionary()
        # from which token on
        self._sent: WeakKeyDictionary[KVCache, tuple[int, UploadToHost]] = WeakKeyDictionary()
        # by session, with the tokens asked for
        self._ahead: dict[str, tuple[list[int], HistoryLoad | None]] = {}
        self._held: dict[str, tuple[int, int]] = {}  # by session: what is to be found of it
        # of it, by whom
        self._asked: WeakKeyDictionary[KVCache, tuple[str, Sequence[int]]] = WeakKeyDictionary()

    def expect(self, size: int) -> None:
        self.store.expect(size)

    def _find(self, session: str, tokens: Sequence[int], capacity: int, whole: int) -> ResumedCache:
        if self._stages.get(session, self._stage(whole)) != self._stage(whole):
            self._give_up(session)
            self._held.pop(session, None)
            cache = self.start(capacity)
            self._lineage_of[cache] = self._lineage(session)
            return ResumedCache(cache, outgrown=True)
        asked, loading = self._ahead.pop(session, (None, None))
        if asked != list(tokens):
            if loading is not None:
                loading.cancel()
            loading = self._open(session, tokens, whole)
        cache, held = self.start(capacity), tokens[: self._to_be_found(session, tokens)]
        if loading is None or not _begun(loading):
            return ResumedCache(cache, lost=self._lost(session, held, cache))
        self._lineage_of[cache], self._asked[cache] = self._lineage(session), (session, held)
        cache.refill_by_layer(loading.tokens, lambda layer: loading.layer(layer)[0])
        cache.fed.stages = {self._stage(whole)}
        return ResumedCache(cache, loading.tokens, loading.tier, loading=loading)

    def _anew(self, found: ResumedCache) -> ResumedCache:
        fresh = super()._anew(found)
        return replace(fresh, lost=self._lost(*self._asked.pop(found.cache), fresh.cache))

    def _to_be_found(self, session: str, tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` should be in the store, by what was saved last; 0
        where computing them again would give the same, so that losing them changes nothing."""
        held = self._held.get(session)
        if held is None or _known_again(tokens[: held[0]]) != held:
            return 0
        return 0 if self._lineage(session) == EXACT and self.form.repeatable else held[0]

    def _lost(self, session: str, held: Sequence[int], cache: KVCache) -> Loss | None:
        """Return why the tokens `held`, which should have been in the store, are gone; None where
        there are none. Note the lineage (a hash that tells recomputed rows from stored ones) of
        `cache`, which will compute them again."""
        if not held:
            return None
        loss = self.store.loss(session) or Loss.DAMAGED
        if not self.form.repeatable:
            self._lineage_of[cache] = recomputed_lineage(self._lineage(session), held)
        return loss

    def ahead(self, session: str, tokens: Sequence[int], whole: int = 0) -> None:
        if session not in self._ahead and self.read_buffer != 0:
            self._ahead[session] = (
                list(tokens),
                self._open(session, tokens, max(whole, len(tokens))),
            )

    def _open(self, session: str, tokens: Sequence[int], whole: int) -> HistoryLoad | None:
        states = self.form.states(len(tokens), self._device, whole)
        lineage = rotated_lineage(self._lineage(session), self._stage(whole))
        return self.store.open(session, tokens, self.read_buffer, states, lineage)

    def _lineage(self, session: str) -> str:
        return self._lineages.get(session, EXACT)

    def save_ahead(self, session: str, tokens: Sequence[int], cache: KVCache) -> float:
        """Begin to copy whole blocks of the prompt's rows to host memory while the answer is
        decoded, for methods that never change a row: no later step writes to them."""
        began = perf_counter()
        if not (self.form.by_token and self.store.threads and cache.fits(cache.capacity)):
            return 0.0
        lineage = rotated_lineage(self._lineage_of.get(cache, EXACT), self._stage(cache.capacity))
        start = self.store.known(session, tokens, lineage)
        if whole := (len(tokens) - start) // self.store.block_tokens * self.store.block_tokens:
            upload = self._upload(cache.contents(), tokens[: start + whole], start, cache.capacity)
            self._sent[cache] = start, upload
        return perf_counter() - began

    def _keep(self, session: str, tokens: Sequence[int], cache: KVCache) -> Sequence[UploadToHost]:
        contents, lineage = cache.contents(), self._lineage_of.pop(cache, EXACT)
        self._lineages[session], self._held[session] = lineage, _known_again(tokens)
        stage = self._stages[session] = (
            self._stage(len(tokens)) if cache.fits(len(tokens)) else None
        )
        if stage is None:
            self._held.pop(session)
            return ()
        lineage = rotated_lineage(lineage, stage)
        known = self.store.known(session, tokens, lineage) if self.form.by_token else 0
        uploads, end = list[UploadToHost](), known
        start, sent = self._sent.pop(cache, (known, None))
        if (
            sent is not None
            and start == known
            and sent.text == list(tokens[known : known + len(sent.text)])
        ):
            uploads, end = [sent], known + len(sent.text)
        rest = self.form.rest(contents)
        uploads.append(self._upload(contents, tokens, end, len(tokens), rest))
        if not self.store.hold(session, known, uploads, lineage):
            uploads = [self._upload(contents, tokens, 0, len(tokens), rest)]
            self.store.hold(session, 0, uploads, lineage)
        return uploads

    def _upload(
        self,
        contents: CacheContents,
        tokens: Sequence[int],
        start: int,
        text: int,
        rest: Tensors = NOTHING,
    ) -> UploadToHost:
        """Begin to copy the rows of `tokens` from `start` on, and `rest`, to host memory. `text`:
        the length of the text for which the keys are rotated."""
        end = len(tokens)
        rows = self.form.rows(contents, start, end) if start < end else {}
        stored = self.form.unrotated(start, end, rows, text)
        return self.store.leave(tokens[start:], rows, rest, stored)

    def shorten(
        self,
        session: str,
        tokens: Sequence[int],
        keep: int,
        capacity: int,
        *,
        sinks: int = 0,
        naive: bool = False,
    ) -> list[int]:
        """Cut a history as `CachesBetweenTurns.shorten` does. Where all state is rows of tokens and
        no first tokens are kept, the store drops the oldest rows where they lie, and nothing is
        loaded."""
        if self.form.stateful:  # the shorter text is computed anew
            return both_ends(tokens, keep, sinks)
        before = self._lineage(session)
        if sinks or not self.form.rows_alone:
            kept = super().shorten(session, tokens, keep, capacity, sinks=sinks)
        else:
            self._give_up(session)
            self.form.check(len(tokens))
            if self.store.known(session, tokens, before) == len(tokens):
                self.store.truncate(session, (keep + 0.5) / len(tokens))
            kept = both_ends(tokens, keep, sinks)
        text = _known_again(kept)
        if self._held.get(session) != text:  # it is to be found, and is not there if it got lost
            self._held[session] = text
            self._lineages[session] = cut_lineage(before, tokens, len(tokens) - len(kept), sinks)
        return kept

    def _note_cut(self, cache: KVCache, fresh: KVCache, tokens: Sequence[int], sinks: int) -> None:
        before, dropped = self._lineage_of.pop(cache, EXACT), len(tokens) - fresh.num_tokens
        self._lineage_of[fresh] = cut_lineage(before, tokens, dropped, sinks)

    def forget(self, session: str) -> None:
        self._give_up(session)
        for known in (self._lineages, self._held, self._stages):
            known.pop(session, None)

    def enqueue(self, session: str) -> None:
        self.store.enqueue(session)

    def dequeue(self, session: str) -> None:
        self.store.dequeue(session)

    def prefetch(self) -> None:
        self.store.prefetch()

    def close(self) -> None:
        for session in list(self._ahead):
            self._give_up(session)
        self.store.close()

    def _give_up(self, session: str) -> None:
        """Cancel a load that was begun ahead of a turn of the session which does not come."""
        _, loading = self._ahead.pop(session, (None, None))
        if loading is not None:
            loading.cancel()


def _begun(loading: HistoryLoad) -> bool:
    """Begin the turn that waits for this load; return False where rows that it needs at its start
    are lost."""
    try:
        loading.begin()
    except HistoryLost:
        return False
    return True
