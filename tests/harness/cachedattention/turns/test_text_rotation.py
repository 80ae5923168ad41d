"""Where the model rotates by the length of the text, histories are kept and change no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from harness.cachedattention.turns.caches import CachesBetweenTurns, DevicePrefix
from harness.cachedattention.turns.conversation import Conversation
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from methods.full import Full
from tests.harness.cachedattention.turns.test_caches import TIERS, stored
from tests.tiny import by_length, prompt

NEW, TURNS, CAPACITY = 6, (20, 12, 14, 8, 10), 160  # crosses BORDER between turns or within an answer
CASES = [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic")]
each_model = pytest.mark.parametrize(("architecture", "kind"), CASES)


@dataclass
class Talk:
    """What a conversation said, what it reused in each turn, and which histories were outgrown."""

    said: list[list[int]] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    outgrown: list[bool] = field(default_factory=list)
    recomputed: int = 0


@contextmanager
def histories(kv: Attachment, where: str) -> Iterator[CachesBetweenTurns]:
    """`where`: recompute, device_prefix or a tier of a store."""
    kinds: dict[str, Callable[[], CachesBetweenTurns]] = {
        "recompute": lambda: CachesBetweenTurns(lambda capacity: kv.start(KVCache, capacity=capacity)),
        "device_prefix": lambda: DevicePrefix(lambda capacity: kv.start(KVCache, capacity=capacity)),
    }
    made = kinds[where]() if where in kinds else stored(kv, **TIERS[where])
    yield made
    made.close()


def talked(
    kv: Attachment, where: str, turns: tuple[int, ...] = TURNS, capacity: int = CAPACITY, by_token: bool = False
) -> Talk:
    engine, talk = Engine(kv, prefill_chunk=16), Talk()
    with histories(kv, where) as kept:
        one = Conversation(kept, "alice", capacity, len(turns), by_token=by_token)
        for number, length in enumerate(turns):
            one.ask(prompt(length, seed=number)[0].tolist())
            one.resume()
            talk.reused.append(one.found.reused)
            talk.outgrown.append(one.found.outgrown)
            logits = one.compute(lambda cache, ids: engine.prefill(cache, torch.tensor([list(ids)])))
            rest = torch.tensor([one.unread], dtype=torch.long)
            made = engine.complete(one.found.cache, logits, rest, began=0.0, max_new_tokens=NEW)
            talk.said.append(made.tokens[0])
            talk.recomputed += made.recomputed
            one.answered(made.tokens[0], "length")
            one.save()
    return talk


@each_model
@pytest.mark.parametrize("where", ["device_prefix", "host"])
@pytest.mark.parametrize("turns", [TURNS, (40, 12, 20, 8), (30, 23, 8, 8)], ids=["between", "jump", "within"])
def test_kept_histories_change_no_answer(architecture: str, kind: str, where: str, turns: tuple[int, ...]) -> None:
    """They are reused while the text is rotated as they are, and computed anew where it no longer is."""
    with attached(by_length(architecture, kind), Full()) as kv:
        talk, wanted = talked(kv, where, turns), talked(kv, "recompute", turns)
    assert talk.said == wanted.said
    assert talk.reused[1] > 0
    if kind == "longrope":
        assert talk.reused[-1] > 0
        assert sum(talk.outgrown) + (talk.recomputed > 0) >= 1
        assert sum(talk.outgrown) <= 1
    else:
        assert not talk.reused[-1]
        assert talk.outgrown[-1]
