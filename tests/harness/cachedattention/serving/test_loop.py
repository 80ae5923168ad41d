"""The serving loop on a clock that its own work sets forward: 0.1 s per prompt token, 1 s per step of all slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from harness.cachedattention.serving.figures import Answer
from harness.cachedattention.serving.loop import Clock, ServingLoop
from harness.cachedattention.serving.plan import Session
from harness.cachedattention.turns.caches import CachesBetweenTurns, DevicePrefix, ResumedCache
from harness.cachedattention.turns.stored import StoredCaches
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import NotFiniteError
from methods.base import Method
from methods.full import Full
from methods.snapkv import SnapKV
from tests.harness.cachedattention.turns.test_caches import stored
from tests.talks import session
from tests.timed import Time, Timed, ending
from tests.tiny import fresh, tiny

Kind = Callable[[Attachment], CachesBetweenTurns]


def recompute(kv: Attachment) -> CachesBetweenTurns:
    return CachesBetweenTurns(lambda capacity: kv.start(KVCache, capacity=capacity))


def device_prefix(kv: Attachment) -> CachesBetweenTurns:
    return DevicePrefix(lambda capacity: kv.start(KVCache, capacity=capacity))


def store(kv: Attachment) -> CachesBetweenTurns:
    return stored(kv, host=10**7)


@contextmanager
def server(
    kind: Kind = recompute, method: Method | None = None, slots: int = 2, model: Any = None
) -> Iterator[ServingLoop]:
    time = Time()
    with attached(model or tiny("llama"), method or Full(), budget=0.5) as kv:
        histories, engine = kind(kv), Timed(kv, time)
        yield ServingLoop(engine, histories, Clock(time, time.passes), ending=ending, slots=slots)
        histories.close()


def served(*sessions: Session, **how: Any) -> dict[tuple[str, int], Answer]:
    with server(**how) as loop:
        return {(one.session, one.turn): one for one in loop.serve(sessions)}


def end(answer: Answer) -> float:
    """From the loop's start."""
    return answer.arrived_s + answer.token_s[-1]


def test_two_turns_by_hand() -> None:
    """Turn 1: 10 tokens in 1 s, then 3 steps. Turn 2 comes 5 s later with 6 new tokens behind 14 of history."""
    made = served(session("a", 2.0, (10, 4), (6, 3)))
    first, second = made["a", 1], made["a", 2]
    assert first.arrived_s == 2.0
    assert first.token_s == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert end(first) == pytest.approx(6.0)
    assert second.arrived_s == pytest.approx(11.0)
    assert (second.reused_tokens, second.new_tokens, second.tier) == (0, 20, None)
    assert second.ttft_s == pytest.approx(2.0)
    alive = served(session("a", 2.0, (10, 4), (6, 3)), kind=device_prefix)["a", 2]
    assert (alive.reused_tokens, alive.new_tokens, alive.tier) == (13, 7, "device")  # a last token was never fed
    assert alive.ttft_s == pytest.approx(0.7)


def test_turns_wait_first_come_first_served_and_ttft_counts_it() -> None:
    """Two slots: the third waits until the first has left, and the fourth behind it."""
    made = served(*(session(name, start, (10, 5)) for name, start in zip("abcd", (0.0, 0.5, 0.6, 0.7), strict=True)))
    order = sorted(made.values(), key=lambda one: one.arrived_s + one.queue_s)
    assert [one.session for one in order] == ["a", "b", "c", "d"]
    # a prefills to 1, b to 2 (a halts), both step to 6 and leave; c and d prefill one after the other
    assert [one.queue_s for one in order] == pytest.approx([0.0, 0.5, 5.4, 6.3])
    assert [one.ttft_s for one in order] == pytest.approx([1.0, 1.5, 6.4, 7.3])


def test_a_prefill_halts_the_others() -> None:
    """b's 30 tokens come while a answers."""
    halted = served(session("a", 0.0, (10, 8)), session("b", 1.5, (30, 2)))
    assert max(later - earlier for earlier, later in pairwise(halted["a", 1].token_s)) == pytest.approx(4.0)
    assert halted["b", 1].prefill_s == pytest.approx(3.0)


@pytest.mark.tokens
@pytest.mark.parametrize("kind", [recompute, device_prefix, store])
@pytest.mark.parametrize("method", [Full(), SnapKV(window=4, kernel=3)], ids=["full", "snapkv"])
def test_tokens_are_those_of_each_conversation_alone(kind: Kind, method: Method) -> None:
    sessions = [
        session(str(place), 0.7 * place, (20 + place, 5), (9, 4), (7, 6), think_s=(3.0, 0.0), seed=place)
        for place in range(5)
    ]
    together = served(*sessions, kind=kind, method=method, slots=3)
    for one in sessions:
        alone = served(one, kind=kind, method=method, slots=1)
        assert {key: answer.tokens for key, answer in alone.items()} == {
            key: answer.tokens for key, answer in together.items() if key[0] == one.name
        }
    assert len(together) == 15


def test_an_answer_from_logits_that_are_not_finite_is_no_answer() -> None:
    damaged: Any = fresh("llama")
    damaged.model.layers[1].mlp.down_proj.weight.data.fill_(torch.nan)
    with server(model=damaged) as loop, pytest.raises(NotFiniteError, match=r"layer 1 .*mlp\.down_proj"):
        list(loop.serve([session("a", 0.0, (10, 4))]))


@pytest.mark.tokens
def test_the_next_turn_in_the_queue_loads_ahead() -> None:
    """Each one that had to wait is opened before it has a slot, once, with the text that it then asks for."""
    opened: list[tuple[str, list[int]]] = []

    class Looking(StoredCaches):
        def ahead(self, session: str, tokens: Sequence[int], whole: int = 0) -> None:
            opened.append((session, list(tokens)))
            super().ahead(session, tokens, whole)

        def resume(self, session: str, tokens: Sequence[int], capacity: int, whole: int = 0) -> ResumedCache:
            assert session not in self._ahead or self._ahead[session][0] == tokens
            return super().resume(session, tokens, capacity, whole)

    def looking(kv: Attachment) -> CachesBetweenTurns:
        plain = store(kv)
        assert isinstance(plain, StoredCaches)
        return Looking(plain.start, kv, plain.store)

    talks = [session(name, start, (20, 6), (9, 6), (9, 6)) for name, start in zip("abc", (0.0, 0.1, 0.2), strict=True)]
    made, wanted = (served(*talks, kind=kind, slots=1) for kind in (looking, recompute))
    assert {key: one.tokens for key, one in made.items()} == {key: one.tokens for key, one in wanted.items()}
    assert {name for name, _ in opened} == set("abc")
    assert len(opened) == len({(name, len(tokens)) for name, tokens in opened})
    assert [one.tier for one in made.values() if one.turn > 1] == ["host"] * 6
