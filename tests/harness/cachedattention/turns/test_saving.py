"""Rows leave the device while the turn decodes and while the next job runs; nothing but the time is another."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch

from harness.cachedattention.store.disk import HistoryWarning
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.store.lanes import WriteBuffer
from harness.cachedattention.store.upload import UploadToHost
from harness.cachedattention.turns.conversation import Conversation
from harness.cachedattention.turns.stored import StoredCaches
from harness.engine.attach import attached
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import RunningSequence
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from methods.base import AttnInput
from methods.full import Full
from tests.harness.cachedattention.turns.test_caches import LENGTHS, MB, NEW, TIERS, Talk, lasting, stored
from tests.methods.test_contract import attach, small
from tests.tiny import prompt, tiny

HERE = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no CUDA device on this machine")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])


LAST = 5  # copies of a layer, from 0: of the first turn's prompt, then of the others' rows
TAIL_BYTES = (LENGTHS[0] % 8 + NEW - 1) * 2 * 2 * 16 * 4  # of a layer in the second: keys and values, 2 heads of 16


class Held:
    """The last layer of the first turn leaves when `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here, self.go, self.error = threading.Event(), threading.Event(), ""
        self.blocks: list[int] = []  # copied by each call
        self._calls, self._copies = count(), UploadToHost._copies
        monkeypatch.setattr(UploadToHost, "_copies", lambda *given: self._held(*given))

    def _held(self, leaving: UploadToHost, number: int, rows: Any, rest: Any) -> Any:
        if next(self._calls) == LAST:
            self.here.set()
            assert self.go.wait(600)
            if self.error:
                raise RuntimeError(self.error)
        made = list(self._copies(leaving, number, rows, rest))
        self.blocks.append(len(made))
        return made

    def let_go_in_the_next_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once its first layer is computed."""
        attend = KVCache.attend

        def noting(cache: KVCache, layer: int, x: AttnInput) -> torch.Tensor:
            out = attend(cache, layer, x)
            self.go.set()
            return out

        monkeypatch.setattr(KVCache, "attend", noting)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go.set()


def saved_one_turn(talk: Talk) -> None:
    talk.turns(LENGTHS[:1])
    assert isinstance(talk.caches, StoredCaches)
    talk.caches.store.flush()


def contents(histories: StoredCaches) -> list[tuple[str, tuple[int, ...], int, dict[str, Any]]]:
    """Of every block in memory: session, tokens, size and rows."""
    histories.store.flush()
    return [
        (key, block.tokens, block.size, {name: x.tolist() for name, x in (block.rows or {}).items()})
        for key, parts in histories.store.contents.blocks.items()
        for block in parts
    ]


@pytest.mark.tokens
@devices
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("full", {"architecture": "gemma3_text", "tier": "device"}),
        ("pqcache", {"placement": "host"}),
        ("h2o", {"tier": "disk", "write_buffer": 0}),
    ],
    ids=str,
)
def test_tokens_and_contents_are_the_same_as_without_threads(
    name: str, how: dict[str, Any], device: str, tmp_path: Path
) -> None:
    tier, placement = how.get("tier", "host"), how.get("placement", "device")
    settings = {key: how[key] for key in how.keys() & {"write_buffer"}} | TIERS[tier] | {"on": device}
    model = deepcopy(tiny(how.get("architecture", "llama"))).to(device)  # type: ignore[arg-type]
    with attached(model, small(name), budget=0.4, placement=placement, calibration=prompt(64, seed=9)) as kv:
        talks = [
            Talk(kv, stored(kv, tmp_path / str(threads) if tier == "disk" else None, io_threads=threads, **settings))
            for threads in (0, 2)
        ]
        for talk in talks:
            talk.turns()
        apart, beside = (talk.caches for talk in talks)
        assert isinstance(apart, StoredCaches)
        assert isinstance(beside, StoredCaches)
        assert talks[0].said == talks[1].said == lasting(kv).said
        assert contents(apart) == contents(beside)
        told, other = (one.store.statistics for one in (apart, beside))
        assert (told.hits, told.moved, told.reused_tokens) == (other.hits, other.moved, other.reused_tokens)
        assert told.leaving_s > told.leaving_hidden_s == 0
        assert other.leaving_s >= other.leaving_hidden_s >= 0
        apart.close()
        beside.close()


def test_rows_of_the_prompt_leave_before_the_turn_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(Full(), None) as kv:
        talk, lengths = Talk(kv, stored(kv, host=9 * MB)), []
        histories: Any = talk.caches
        leave = histories.store.leave

        def noting(tokens: list[int], *more: Any) -> Any:
            lengths.append(len(tokens))
            return leave(tokens, *more)

        monkeypatch.setattr(histories.store, "leave", noting)
        talk.turns()
        # blocks of 8 begin behind what is stored; what fills none goes with the answer
        assert lengths == [56, 5 + NEW - 1, 24, 3 + NEW - 1, NEW + 3, 16, 2 + NEW - 1]
        assert sum(lengths) == len(talk.fed)
        histories.close()


@pytest.mark.tokens
def test_a_turn_begins_while_the_one_before_is_saved(monkeypatch: pytest.MonkeyPatch, held: Held) -> None:
    """Its last layer waits for the last one saved, and for no other."""
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB))
        histories: Any = talk.caches
        talk.turns(LENGTHS[:1])
        assert histories.store.tier("alice") == "host"
        assert histories.store.contents.leaving.held >= TAIL_BYTES
        held.let_go_in_the_next_turn(monkeypatch)
        talk.turns(LENGTHS[1:])
        assert talk.said == wanted.said
        assert [found.reused for found in talk.found] == [found.reused for found in wanted.found]
        histories.close()


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_write_buffer_bounds_what_waits_behind_a_turn(
    layers: int, monkeypatch: pytest.MonkeyPatch, held: Held
) -> None:
    waited, wait = [], WriteBuffer._wait

    def lets_go(saving: WriteBuffer) -> None:
        waited.append(saving.held)
        if not layers:
            held.go.set()
        wait(saving)

    monkeypatch.setattr(WriteBuffer, "_wait", lets_go)
    with attach(Full(), None) as kv:
        talk = Talk(kv, stored(kv, host=9 * MB, write_buffer=layers * TAIL_BYTES))
        histories: Any = talk.caches
        talk.turns(LENGTHS[:1])
        left = histories.store.contents.leaving.held
        assert min(layers, 1) * TAIL_BYTES <= left <= layers * TAIL_BYTES
        assert all(size > layers * TAIL_BYTES for size in waited)
        assert waited or layers
        held.go.set()
        histories.close()


def test_what_nobody_wants_any_more_is_let_go_of(held: Held) -> None:
    before = set(threading.enumerate())
    with attach(Full(), None) as kv:
        talk = Talk(kv, stored(kv, host=9 * MB))
        histories: Any = talk.caches
        found: list[Any] = []
        save = histories.save

        def noting(session: str, tokens: list[int], cache: KVCache) -> Any:
            found.extend((ref(cache), save(session, tokens, cache)))
            return found[1]

        histories.save = noting
        talk.turns(LENGTHS[:1])
        gc.collect()
        cache, saved = found
        assert cache() is None
        assert not saved.finished
        assert held.here.wait(600)
        histories.store.truncate("alice", 0.0)
        held.go.set()
        assert saved.hidden_s() > 0
        histories.store.flush()
        assert held.blocks == [7, 7, 7, 2, 2, 0]
        assert [one._given for one in saved.uploads] == [{}, {}]
        assert histories.store.contents.leaving.held == 0
        histories.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("name", "failing", "tier"), [("full", 1, "host"), ("full", 4, "disk"), ("snapkv", 2, "device")]
)
def test_an_error_of_the_thread_costs_the_hit(
    name: str, failing: int, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`failing`: the layer, counted through all that leave; 4 is one of the answer's."""
    with attach(small(name), 0.4) as kv:
        wanted = lasting(kv)
        talk = Talk(kv, stored(kv, tmp_path if tier == "disk" else None, **TIERS[tier]))
        histories: Any = talk.caches
        calls, copies = count(), UploadToHost._copies

        def fails(leaving: UploadToHost, number: int, rows: Any, rest: Any) -> Any:
            if next(calls) == failing:
                raise RuntimeError("CUDA error: out of memory")
            return copies(leaving, number, rows, rest)

        monkeypatch.setattr(UploadToHost, "_copies", fails)
        with pytest.warns(HistoryWarning, match="'alice' is lost.*out of memory"):
            saved_one_turn(talk)
        assert histories.store.tier("alice") is None
        assert histories.store.statistics.lost == 1
        talk.turns(LENGTHS[1:])
        assert [found.tier for found in talk.found] == [None, None, tier, tier]
        if name == "full":  # what evicts keeps other tokens when it computes again
            assert talk.said == wanted.said
        histories.close()
        assert not list(tmp_path.rglob(".*.safetensors.*"))


@pytest.mark.tokens
def test_an_error_that_the_next_turn_meets_first_costs_the_hit(monkeypatch: pytest.MonkeyPatch, held: Held) -> None:
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB))
        histories: Any = talk.caches
        held.error = "cudaErrorUnknown"
        talk.turns(LENGTHS[:1])
        held.let_go_in_the_next_turn(monkeypatch)
        with pytest.warns(HistoryWarning, match="'alice' is lost.*cudaErrorUnknown"):
            talk.turns(LENGTHS[1:])
        assert talk.said == wanted.said
        assert [found.tier for found in talk.found] == [None, None, "host", "host"]
        assert histories.store.statistics.lost == 1
        histories.close()


@pytest.mark.tokens
def test_what_was_begun_ahead_is_left_where_the_store_has_lost_the_session() -> None:
    """Between the prefill and the end of the turn: then all rows are saved."""
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB))
        histories: Any = talk.caches
        ahead = histories.save_ahead

        def loses(session: str, tokens: list[int], cache: KVCache) -> None:
            ahead(session, tokens, cache)
            histories.store.truncate(session, 0.0)

        histories.save_ahead = loses
        talk.turns()
        assert talk.said == wanted.said
        assert [found.tier for found in talk.found] == [None, "host", "host", "host"]
        assert len(histories._early) == 0
        histories.close()


def spoken(kv: Any, histories: StoredCaches, beside: int) -> list[list[int]]:
    """Two turns each of several conversations, whose answers are decoded together: all that was said."""
    engine, lengths, said = Engine(kv), (45, 9), list[list[int]]()
    talks = [Conversation(histories, f"talk {number}", 150, 3) for number in range(beside)]
    for turn, length in enumerate(lengths):
        batch, running = RunningBatch(engine), dict[RunningSequence, Conversation]()
        for number, talk in enumerate(talks):
            talk.ask(prompt(length + number, seed=10 * turn + number)[0].tolist())
            talk.resume()
            logits = talk.compute(lambda cache, ids: engine.prefill(cache, torch.tensor([list(ids)])))
            slot = batch.join(
                talk.found.cache, logits, torch.empty(1, 0, dtype=torch.long), began=0.0,
                max_new_tokens=30 + number, decoded=talk.decoded,
            )  # fmt: skip
            running[slot] = talk
        while running:
            for slot in batch.step():
                said += slot.out.tokens
                talk = running.pop(slot)
                talk.answered(slot.out.tokens[0], slot.out.stops[0])
                talk.save()
    return said


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("name", "placement", "tier", "beside"),
    [
        ("full", "device", "disk", 1),
        ("full", "device", "host", 3),
        ("quest", "device", "host", 3),
        ("pqcache", "host", "host", 3),
        ("pqcache", "disk", "disk", 1),
        ("infinigen", "host", "host", 1),
    ],
)
def test_decoded_rows_leave_in_blocks_and_are_those_that_leave_behind_the_turn(
    name: str, placement: str, tier: str, beside: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, lengths, leave = small(name), list[int](), HistoryStore.leave

    def noting(store: HistoryStore, tokens: list[int], *more: Any) -> UploadToHost:
        lengths.append(len(tokens))
        return leave(store, tokens, *more)

    monkeypatch.setattr(HistoryStore, "leave", noting)
    said, left = [], []
    with attached(
        tiny("llama"), method, budget=0.4 if method.uses_budget else None, placement=placement,
        calibration=prompt(64, seed=9), disk=tmp_path,
    ) as kv:  # fmt: skip
        for threads in (0, 2):
            lengths.clear()
            folder = tmp_path / str(threads) if tier == "disk" else None
            histories = stored(kv, folder, io_threads=threads, **TIERS[tier])
            said.append(spoken(kv, histories, beside))
            sizes = [
                (key, block.tokens, block.size)
                for key, parts in histories.store.contents.blocks.items()
                for block in parts
            ]
            left.append((sorted(sizes), sorted(contents(histories), key=str)))
            histories.close()
    assert sizes
    assert said[0] == said[1]
    assert left[0] == left[1]
    if beside == 1:
        # 45 tokens and 29 decoded ones; then the one that was not fed, 9 tokens and 29: behind prefill, steps and turn
        in_blocks = [40, 8, 8, 8, 8, 2, 8, 8, 8, 8, 7]
        assert lengths == (in_blocks if method.rows_stay else [74, 113])
    else:
        assert lengths.count(8) >= 8 * beside
