"""Rows that are stored in few bits: near what was given, in any blocks, smaller, and never taken for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.cachedattention.store.history_store import HistoryStore
from methods.full import Full
from methods.tiers.block import Tensors
from methods.tiers.codecs import codec_of
from tests.harness.cachedattention.turns.test_caches import MB, NEW, PRINT, Talk, lasting, stored
from tests.methods.test_contract import attach

TOKENS = 150


def rows(tokens: int = TOKENS) -> Tensors:
    """Keys with channels that are large throughout, as models have them."""
    torch.manual_seed(3)
    scale = torch.tensor([20.0, *[1.0] * 15])
    return {f"{layer}.{name}": torch.randn(1, 2, tokens, 16) * scale for layer in range(2) for name in "kv"}


def test_a_store_holds_less_and_gives_back_all(tmp_path: Path) -> None:
    given, tokens = rows(), list(range(TOKENS))
    sizes = {}
    for codec in ("int8g16", "int4g16", None):
        how = {"codec": codec_of(codec)} if codec else {}
        with HistoryStore(PRINT, disk=9 * MB, folder=tmp_path / str(codec), block_tokens=32, **how) as store:
            store.put("a", tokens[:100], {name: x[:, :, :100] for name, x in given.items()})
            assert store.extend("a", 100, tokens[100:], {name: x[:, :, 100:] for name, x in given.items()})
            store.flush()
            found = store.get("a", [*tokens, 1])
            assert found.tokens == TOKENS
            for name, x in given.items():
                assert (found.layers[name] - x).abs().max() < (0.01 if codec is None else 0.7 if "8" in codec else 6)
            sizes[codec] = store.bytes_by_tier()["disk"]
            dropped = store.truncate("a", 0.5)  # in the midst of a block
            rest = store.get("a", tokens[dropped:], store.lineage("a"))
            assert rest.tokens == 75
            assert rest.layers["1.v"].shape == (1, 2, 75, 16)
    assert sizes["int4g16"] < 0.5 * sizes["int8g16"] + 0.2 * sizes[None]
    assert sizes["int8g16"] < 0.6 * sizes[None]


@pytest.mark.tokens
def test_conversations_go_on_from_eight_bits() -> None:
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB, codec=codec_of("int8g8"))).turns()
        plain = Talk(kv, stored(kv, host=9 * MB)).turns()
    assert [found.reused for found in talk.found] == [found.reused for found in plain.found]
    assert [found.tier for found in talk.found] == [None, "host", "host", "host"]
    assert len(talk.said) == len(wanted.said)
    assert talk.said[:NEW] == wanted.said[:NEW]  # a first turn finds nothing
    sizes = [one.caches.store.bytes_by_tier()["host"] for one in (talk, plain)]  # type: ignore[attr-defined]
    assert sizes[0] < sizes[1]
