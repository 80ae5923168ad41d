"""CachedAttention in virtual time: decoded rows leave while decoding goes on, and as much is hidden as can be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from harness.conversations.conversation import Conversation
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from methods.full import Full
from methods.tiers.transfer.engine import TransferEngine
from methods.tiers.transfer.links import Links
from tests.harness.conversations.test_histories import MB, stored
from tests.methods.test_contract import attach
from tests.methods.tiers.test_transfer_engine import VirtualClock
from tests.tiny import prompt

PROMPT, DECODED, BLOCK = 27, 120, 8
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # 3 layers, keys and values, 2 heads of 16 in fp32
STEP_S = 1.0


def turn_s(share: float, early: bool) -> tuple[float, float]:
    """Take a turn whose steps take a second each, on a link that takes `share` of one for a token's rows; they leave
    `early`, or with the answer. -> seconds behind its end until all have left, and seconds in which they were on their
    way"""
    clock = VirtualClock()
    engine = TransferEngine(links=Links(bus=TOKEN_BYTES / (share * STEP_S)), clock=clock)
    with attach(Full(), None) as kv, torch.inference_mode():
        histories = stored(kv, host=9 * MB, engine=engine)
        talk, model = Conversation(histories, "alice", PROMPT + DECODED + 1, 2), Engine(kv)

        def prefill(cache: KVCache, ids: Sequence[int]) -> torch.Tensor:
            return model.prefill(cache, torch.tensor([list(ids)]))

        talk.ask(prompt(PROMPT)[0].tolist())
        talk.resume()
        logits = talk.compute(prefill)
        assert logits is not None
        cache, said = talk.found.cache, [int(logits.argmax())]
        cache.seal()
        for _ in range(DECODED):
            said.append(int(model.run(torch.tensor([said[-1:]]), cache).argmax()))
            clock.compute(STEP_S)
            if early:
                talk.decoded(said, lambda: None)
        talk.answered(said, "length")
        saved, ended = talk.save(), clock.now()
        hidden_s = saved.hidden_s()  # waits
        assert ended == DECODED * STEP_S  # nobody has waited for the link
        histories.close()
        return clock.now() - ended, hidden_s


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
def test_decoded_rows_leave_while_decoding_goes_on(share: float) -> None:
    """The prompt's whole blocks leave at once, another one once it is full, and what fills none with the answer."""
    tokens, leaving = PROMPT + DECODED, [(0, PROMPT // BLOCK * BLOCK)]
    leaving += [(end - PROMPT, BLOCK) for end in range(leaving[0][1] + BLOCK, tokens, BLOCK)]
    leaving += [(DECODED, tokens % BLOCK)]
    free = 0.0
    for moment, count in leaving:
        free = max(free, moment * STEP_S) + count * share * STEP_S
    exposed, moving = turn_s(share, early=True)
    assert moving == pytest.approx(tokens * share * STEP_S)
    assert exposed == pytest.approx(free - DECODED * STEP_S)
    assert moving - exposed >= 0.95 * min(moving, DECODED * STEP_S)
    off, _ = turn_s(share, early=False)
    assert off == pytest.approx(moving - leaving[0][1] * share * STEP_S)
