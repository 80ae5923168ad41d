"""Conversations whose caches are stored between turns say what they say with a cache that stays, for every method."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from harness.cachedattention.store.block import BlockFile, Loss
from harness.cachedattention.store.disk import HistoryWarning
from harness.cachedattention.store.fingerprint import Fingerprint
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.store.upload import UploadToHost
from harness.cachedattention.turns.caches import CachesBetweenTurns, DevicePrefix, ResumedCache
from harness.cachedattention.turns.stored import StoredCaches, StoredForm
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from methods.base import AttnInput, Budget
from methods.full import Full
from methods.tiers.codec import IntCodec
from methods.tiers.codecs import codec_of
from methods.tiers.rows import Place
from tests.histories import full_disk
from tests.methods.test_contract import attach, small, walked
from tests.methods.test_no_waiting import devices
from tests.tiny import prompt, tiny

PRINT = Fingerprint(model="tiny", weights="7", tokenizer="ids", rotary="default", dtype="fp32")
LENGTHS, NEW, CAPACITY = (61, 26, 3, 17), 6, 150
MB = 10**6
TIERS = {"host": {"host": 9 * MB}, "disk": {"disk": 9 * MB}}


class Talk:
    """A conversation of one session; each turn is as long as `LENGTHS` says, unless its ids are given."""

    def __init__(
        self,
        kv: Attachment,
        histories: CachesBetweenTurns,
        capacity: int = CAPACITY,
        new: int = NEW,
        session: str = "alice",
    ) -> None:
        self.engine, self.caches, self.capacity, self.new = Engine(kv), histories, capacity, new
        self.session = session
        self.device = self.engine.model.device
        self.fed: list[int] = []
        self.said: list[int] = []  # by all turns
        self.found: list[ResumedCache] = []

    def turn(self, ids: Sequence[int]) -> None:
        text = [*self.fed, *self.said[-1:], *ids]
        found = self.caches.resume(self.session, text[:-1], self.capacity)
        found, logits = self.caches.compute(found, text, self.prefill)
        self.caches.save_ahead(self.session, text, found.cache)
        nothing = torch.empty(1, 0, dtype=torch.long, device=self.device)
        [said] = self.engine.complete(found.cache, logits, nothing, began=0.0, max_new_tokens=self.new).tokens
        self.fed, self.said = [*text, *said[:-1]], [*self.said, *said]
        self.found.append(replace(found, cache=None))  # type: ignore[arg-type]
        self.caches.save(self.session, self.fed, found.cache)

    def prefill(self, cache: KVCache, ids: Sequence[int]) -> torch.Tensor:
        return self.engine.prefill(cache, torch.tensor([list(ids)], device=self.device))

    def turns(self, lengths: Sequence[int] = LENGTHS) -> Talk:
        for length in lengths:
            self.turn(prompt(length, seed=len(self.found))[0].tolist())
        return self


def stored(kv: Attachment, folder: Path | None = None, **settings: Any) -> StoredCaches:
    store = HistoryStore(PRINT, folder=folder, block_tokens=8, **settings)
    return StoredCaches(lambda capacity: kv.start(KVCache, capacity=capacity), kv, store)


@contextmanager
def plain(kv: Attachment, kind: type[CachesBetweenTurns]) -> Iterator[CachesBetweenTurns]:
    histories = kind(lambda capacity: kv.start(KVCache, capacity=capacity))
    yield histories
    histories.close()


def lasting(kv: Attachment) -> Talk:
    with plain(kv, DevicePrefix) as histories:
        return Talk(kv, histories).turns()


@pytest.mark.tokens
@walked
def test_a_stored_history_gives_the_tokens_of_a_cache_that_stayed(name: str) -> None:
    with attach(small(name), 0.4) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB)).turns()
    assert talk.said == wanted.said
    assert [found.tier for found in talk.found] == [None, "host", "host", "host"]
    assert [found.reused for found in talk.found] == [found.reused for found in wanted.found]
    assert talk.found[1].reused == LENGTHS[0] + NEW - 1


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("pqcache", {"placement": "disk", "codec": IntCodec(bits=4, group=16)}),
        ("infinigen", {"placement": "host", "reuse_steps": 2}),
        ("snapkv", {"codec": codec_of("int4+3/int8g16")}),
        ("coded", {"codec": codec_of("nvfp4")}),
        ("adakv", {"codec": codec_of("tq3")}),
        ("h2o", {"budget": Budget(0.4, generated=4)}),
        ("full", {"placement": "host"}),
    ],
)
def test_so_it_does_wherever_and_however_its_tokens_lie(name: str, how: dict[str, Any]) -> None:
    method = replace(small(name), offload=True) if name == "full" else small(name)  # type: ignore[call-arg]
    with attached(tiny("llama"), method, **{"budget": 0.4, "calibration": prompt(64, seed=9)} | how) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB)).turns()
    assert talk.said == wanted.said
    assert [found.tier for found in talk.found[1:]] == ["host"] * 3


@pytest.mark.tokens
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_full_says_what_it_says_over_the_whole_text(tier: str, architecture: str, tmp_path: Path) -> None:
    """Gemma's layers that slide are a rest beside the rows of the others."""
    with attach(Full(), None, architecture) as kv, plain(kv, CachesBetweenTurns) as recompute:
        folder = tmp_path if tier == "disk" else None
        wanted, talk = Talk(kv, recompute).turns(), Talk(kv, stored(kv, folder, **TIERS[tier])).turns()
    assert talk.said == wanted.said
    assert [found.reused for found in wanted.found] == [0] * 4
    assert [found.tier for found in talk.found] == [None, *[tier] * 3]
    assert talk.found[-1].reused == len(talk.fed) - LENGTHS[-1] - NEW


@pytest.mark.tokens
@pytest.mark.parametrize(("name", "reused"), [("full", 56), ("snapkv", 0)])
def test_a_text_that_goes_on_otherwise(name: str, reused: int) -> None:
    """Rows of its beginning, in whole blocks, serve Full; what was kept of the whole serves nothing but the whole."""
    with attach(small(name), 0.4) as kv, plain(kv, CachesBetweenTurns) as recompute:
        histories = stored(kv, host=9 * MB)
        Talk(kv, histories).turns(LENGTHS[:2])
        first = prompt(LENGTHS[0])[0].tolist()
        other = [*first[:60], 5, 6]
        talk, wanted = Talk(kv, histories), Talk(kv, recompute)
        for one in (talk, wanted):
            one.turn(other)
            one.turn(other[:9])
    assert [found.reused for found in talk.found] == [reused, len(other) + NEW - 1]
    if name == "full":
        assert talk.said == wanted.said
    else:
        assert talk.said[:NEW] == wanted.said[:NEW]


# A turn begins while the layers of its history are on their way: each is waited for when it is used.


@pytest.mark.tokens
def test_the_prefill_begins_before_the_last_layer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, tmp_path, disk=9 * MB))
        histories: Any = talk.caches
        talk.turns(LENGTHS[:1])
        histories.store.flush()
        read, go = BlockFile.read, Event()

        def last_waits(file: BlockFile, names: list[str], place: Place) -> Any:
            assert not names[0].startswith(f"{len(kv.model_specs) - 1}.") or go.wait(600)
            return read(file, names, place)

        prefill = KVCache.attend

        def first_lets_go(cache: KVCache, layer: int, x: AttnInput) -> torch.Tensor:
            out = prefill(cache, layer, x)
            go.set()
            return out

        monkeypatch.setattr(BlockFile, "read", last_waits)
        monkeypatch.setattr(KVCache, "attend", first_lets_go)
        talk.turns(LENGTHS[1:])
        assert talk.said == wanted.said
        assert [found.tier for found in talk.found] == [None, "disk", "disk", "disk"]
        told = histories.store.statistics
        assert told.load_s >= told.hidden_s >= 0
        assert sum(found.hidden_s for found in talk.found) == pytest.approx(told.hidden_s)
        assert sum(found.load_s for found in talk.found) > told.exposed_s > 0
        histories.close()


@pytest.mark.tokens
def test_what_was_loaded_ahead_is_what_the_next_turn_takes() -> None:
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB))
        histories: Any = talk.caches
        for number, length in enumerate(LENGTHS):
            ids = prompt(length, seed=number)[0].tolist()
            text = [*talk.fed, *talk.said[-1:], *ids]
            histories.ahead("alice", text[:-1] if number != 2 else text[:5])  # the third time it guesses wrong
            histories.ahead("alice", text[:-1])
            talk.turn(ids)
        assert talk.said == wanted.said
        assert histories.store.statistics.lookups == len(LENGTHS) + 1
        assert [found.reused for found in talk.found][1:] == [
            LENGTHS[0] + NEW - 1,
            *[f.reused for f in wanted.found][2:],
        ]
        assert not histories._ahead


# A history that was stored and is gone is computed again: where that gives something else, the turn says so.

pytestmark = pytest.mark.filterwarnings("ignore::harness.cachedattention.store.disk.HistoryWarning")
EXACT_ON_A_MISS = {"full", "full_offloaded"}


def losing(kv: Attachment, folder: Path, turn: int) -> Talk:
    """A conversation whose save behind turn number `turn` finds the disk full."""
    talk = Talk(kv, stored(kv, folder, disk=9 * MB, threads=0))
    for number in range(len(LENGTHS)):
        with pytest.MonkeyPatch.context() as patch:
            if number == turn:
                full_disk(patch)
            talk.turns(LENGTHS[number : number + 1])
    talk.caches.close()
    return talk


@pytest.mark.tokens
@walked
def test_a_full_disk_changes_no_answer_or_the_turn_says_so(name: str, tmp_path: Path) -> None:
    """A recomputation in one prefill is a sound one for Full alone: other methods choose anew, or have read their
    answers sparsely."""
    with attach(small(name), 0.4) as kv:
        wanted, talk = lasting(kv), losing(kv, tmp_path, turn=1)
        repeatable = StoredForm(kv).repeatable
    assert repeatable == (name in EXACT_ON_A_MISS)
    assert [found.reused > 0 for found in talk.found] == [False, True, False, True]
    assert [found.lost for found in talk.found] == [None, None, None if repeatable else Loss.DISK_FULL, None]
    if repeatable:
        assert talk.said == wanted.said


def damaged(store: HistoryStore) -> None:
    """The last tensor of a file, which is read in the midst of the turn."""
    assert store.contents.disk
    [parts] = store.contents.blocks.values()
    path = store.contents.disk.path(parts[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def removed(store: HistoryStore) -> None:
    assert store.contents.disk
    store.contents.disk.folder.rename(store.contents.disk.folder.with_suffix(".gone"))


@pytest.mark.tokens
@pytest.mark.parametrize("fault", [damaged, removed])
@pytest.mark.parametrize("name", ["full", "quest", "snapkv"])
def test_what_is_found_out_in_the_midst_of_a_turn(
    name: str, fault: Callable[[HistoryStore], None], tmp_path: Path
) -> None:
    with attach(small(name), 0.4) as kv:
        talk = Talk(kv, stored(kv, tmp_path, disk=9 * MB, threads=0)).turns(LENGTHS[:2])
        assert isinstance(talk.caches, StoredCaches)
        fault(talk.caches.store)
        talk.turns(LENGTHS[2:])
        assert talk.found[2].lost == (None if name == "full" else Loss.DAMAGED)
        assert name != "full" or talk.said == lasting(kv).said


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("lost", ["before the cut", "behind the cut", None])
def test_under_overflow_a_loss_changes_fulls_answers_too(sinks: int, lost: str | None) -> None:
    """What stays of a cache was computed in sight of what left; computed again it is not."""
    with attach(Full(), None) as kv:
        histories = stored(kv, host=9 * MB)
        talk = Talk(kv, histories).turns(LENGTHS[:2])
        if lost == "before the cut":
            histories.store.truncate("alice", 0.0)
        talk.fed = histories.shorten("alice", talk.fed, 40, CAPACITY, sinks=sinks)
        if lost == "behind the cut":
            histories.store.truncate("alice", 0.0)
        talk.turns(LENGTHS[2:])
    assert [found.lost is not None for found in talk.found] == [False, False, lost is not None, False]


# Rows leave the device while the turn decodes and while the next job runs; nothing but the time is another.


LAST = 5  # copies of a layer, from 0: of the first turn's prompt, then of the others' rows
TAIL_BYTES = (LENGTHS[0] % 8 + NEW - 1) * 2 * 2 * 16 * 4  # of a layer in the second: keys and values, 2 heads of 16


def counted(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Call `action` before the layer of that number leaves the device, counted through all turns."""
    calls, copies = count(), UploadToHost._layer

    def counting(upload: UploadToHost, layer: int, rows: Any, rest: Any) -> Any:
        if next(calls) == number:
            copied = upload._copied
            monkeypatch.setattr(upload, "_copied", lambda *given: action() or copied(*given))  # type: ignore[func-returns-value]
        return copies(upload, layer, rows, rest)

    monkeypatch.setattr(UploadToHost, "_layer", counting)


def saved_one_turn(talk: Talk) -> None:
    talk.turns(LENGTHS[:1])
    assert isinstance(talk.caches, StoredCaches)
    talk.caches.store.flush()


@pytest.mark.tokens
def test_a_turn_begins_while_the_one_before_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last layer waits for the last one saved, and for no other."""
    go, attend = threading.Event(), KVCache.attend
    counted(monkeypatch, LAST, lambda: None if go.wait(600) else pytest.fail("the next turn waits"))
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB))
        histories: Any = talk.caches
        talk.turns(LENGTHS[:1])
        assert histories.store.tier("alice") == "host"
        assert histories.store.contents.leaving.held >= TAIL_BYTES

        def noting(cache: KVCache, layer: int, x: AttnInput) -> torch.Tensor:
            out = attend(cache, layer, x)
            go.set()  # once its first layer is computed
            return out

        monkeypatch.setattr(KVCache, "attend", noting)
        talk.turns(LENGTHS[1:])
        assert talk.said == wanted.said
        assert [found.reused for found in talk.found] == [found.reused for found in wanted.found]


@pytest.mark.tokens
@pytest.mark.parametrize(("name", "failing", "tier"), [("full", 1, "host"), ("full", 4, "disk"), ("snapkv", 2, "host")])
def test_an_error_of_the_thread_costs_the_hit(
    name: str, failing: int, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`failing`: the layer, counted through all that leave; 4 is one of the answer's."""
    with attach(small(name), 0.4) as kv:
        wanted = lasting(kv)
        talk = Talk(kv, stored(kv, tmp_path if tier == "disk" else None, **TIERS[tier]))
        histories: Any = talk.caches

        def fails() -> None:
            raise RuntimeError("CUDA error: out of memory")

        counted(monkeypatch, failing, fails)
        with pytest.warns(HistoryWarning, match="alice"):
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
@devices
@pytest.mark.parametrize(("name", "placement"), [("full", "device"), ("pqcache", "host"), ("h2o", "device")])
def test_a_device_changes_no_token(name: str, placement: str, device: str) -> None:
    model: Any = deepcopy(tiny("llama")).to(device)  # type: ignore[arg-type]
    with attached(model, small(name), budget=0.4, placement=placement, calibration=prompt(64, seed=9)) as kv:
        assert Talk(kv, stored(kv, host=9 * MB, on=device)).turns().said == lasting(kv).said


# Rows that lie off the device go into a store and come back without crossing it, as they are written.

INT4 = IntCodec(bits=4, group=16)
# methods whose rows a store keeps token by token, and those whose whole state it keeps
BY_TOKEN = ("full", "pqcache", "quest", "sparq")
WHOLE = ("infinigen", "infllm", "kivi", "rocketkv", "shadowkv")
CODED = ("pqcache", "infllm")
CHANGES = {"full": {"offload": True}, "kivi": {"group": 8, "residual": 16}}  # so that something lies away


@dataclass
class Fed:
    """A conversation's first turn, answered and not yet saved."""

    cache: KVCache
    tokens: list[int]


def attach_to(name: str, placement: str = "host", **how: Any) -> Any:
    method: Any = replace(small(name), **CHANGES.get(name, {}))  # type: ignore[type-var]
    return attached(tiny("llama"), method, budget=0.4, placement=placement, calibration=prompt(64, seed=9), **how)


@torch.inference_mode()
def fed(kv: Attachment) -> Fed:
    engine, ids = Engine(kv), prompt(LENGTHS[0])
    cache = kv.start(KVCache, capacity=CAPACITY)
    made = engine.complete(cache, engine.prefill(cache, ids), ids[:, :0], began=0.0, max_new_tokens=NEW)
    return Fed(cache, [*ids[0].tolist(), *made.tokens[0][:-1]])


def crossed(cache: KVCache) -> int:
    """Bytes that went to the device or came from it so far."""
    return cache.traffic.total_bytes


@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, {}) for name in (*BY_TOKEN, *WHOLE)), *((name, {"codec": INT4}) for name in CODED)],
    ids=lambda value: value if isinstance(value, str) else "int4" if value else "plain",
)
def test_saving_moves_nothing_to_the_device(name: str, how: dict[str, Any], placement: str, tmp_path: Path) -> None:
    with attach_to(name, placement, disk=tmp_path, **how) as kv:
        histories, turn = stored(kv, host=9 * MB), fed(kv)
        before, held = crossed(turn.cache), footprint(turn.cache.layers)
        assert held[placement] > 0
        histories.save("alice", turn.tokens, turn.cache)
        histories.store.flush()
        assert crossed(turn.cache) == before
        assert footprint(turn.cache.layers) == held  # nothing came back to stay
        histories.close()
