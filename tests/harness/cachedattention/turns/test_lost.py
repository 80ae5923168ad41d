"""A history that was stored and is gone is computed again: where that gives something else, the turn says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cachedattention.store.block import Loss
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.turns.stored import StoredCaches, StoredForm
from harness.engine.attach import Attachment
from methods.full import Full
from tests.harness.cachedattention.turns.test_caches import CAPACITY, LENGTHS, MB, Talk, lasting, stored
from tests.histories import full_disk
from tests.methods.test_contract import attach, small, walked

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
