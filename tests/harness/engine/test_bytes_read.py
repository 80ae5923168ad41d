"""Bytes that a decode step reads of keys, values and indices, against numbers worked out by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from harness import Engine, attached
from harness.engine.footprint import footprint
from harness.engine.trace import Tracer
from methods.base import CacheState, Method
from methods.full import Full
from methods.h2o import H2O
from methods.infinigen import InfiniGen
from methods.infllm import InfLLM
from methods.kivi import Kivi
from methods.layers import Layer
from methods.oracle import Oracle
from methods.pqcache import PQCache
from methods.quest import Quest
from methods.rocketkv import RocketKV
from methods.shadowkv import ShadowKV
from methods.snapkv import SnapKV
from methods.sparq import SparQ
from methods.tiers.rows import HostRows, Place
from tests.methods.synthetic import Sequences, Shape
from tests.tiny import prompt, tiny

PROMPT, BUDGET, NEW = 320, 64, 4  # three steps, which read one, two and three new tokens
LAYERS, HEADS, GROUPS, DIM, FP32 = 3, 8, 2, 16, 4  # of the tiny model
KEY = DIM * FP32  # of one KV head
TOKEN = GROUPS * 2 * KEY
WHOLE = LAYERS * (PROMPT + 2) * TOKEN
SPARSE = LAYERS * (BUDGET + 2) * TOKEN
ONE_SPARSE = (2 * (PROMPT + 2) + BUDGET + 2) * TOKEN  # layers 0 and 1 are dense


def read(method: Method, **more: Any) -> float:
    """Mean over steps."""
    with attached(tiny("llama"), method, budget=None if isinstance(method, (Full, Kivi)) else BUDGET, **more) as kv:
        engine = Engine(kv)
        engine.tracer = Tracer(torch.device("cpu"))
        made = engine.generate(prompt(PROMPT), max_new_tokens=NEW)
    assert made.measured["read_bytes_per_step"] is not None
    return made.measured["read_bytes_per_step"]


EXPECTED = {
    "full": (Full(), WHOLE),
    # all that is kept; the second look at the keys, for their weights, is no index
    "h2o": (H2O(), SPARSE),
    # 32 sinks, 16 recent tokens and 16 chosen of the 272 between: a byte for each of 2 codes, and 64 centroids
    "pqcache": (PQCache(m=2, b=6, sinks=32, recent_ratio=0.5), SPARSE + LAYERS * GROUPS * (272 * 2 + 64 * KEY)),
    # 16 recent tokens: 4 of 16 channels of the 304 before them
    "sparq": (SparQ(r=4, sinks=0, recent_ratio=0.25), SPARSE + LAYERS * GROUPS * 304 * 4 * FP32),
    "sparq, no copy": (
        SparQ(r=4, sinks=0, recent_ratio=0.25, channel_copy=False), SPARSE + LAYERS * GROUPS * 304 * 4 * FP32
    ),
    # 20 pages, two bounds of each
    "quest": (Quest(page_size=16, dense_layers=(0, 1), select_per="kv_head"), ONE_SPARSE + GROUPS * 20 * 2 * KEY),
    # 36 chunks of 8 before the local 32 tokens, of which one is an outlier
    "shadowkv": (ShadowKV(chunk=8, local_chunks=4, outlier_share=0.25), SPARSE + LAYERS * GROUPS * 35 * KEY),
    # 128 tokens kept, 64 pages of 2, 4 channels of one bound of each
    "rocketkv": (RocketKV(split=1.0, page_size=2, r=4), SPARSE + LAYERS * GROUPS * 64 * 4 * FP32),
    # 4 of 16 columns, of the prompt and of the tokens behind it but for the current one
    "infinigen": (
        InfiniGen(alpha=1e9, partial_ratio=0.25, column_rule="query", dense_layers=(0, 1), skew=False),
        ONE_SPARSE + GROUPS * (PROMPT + 1) * 4 * FP32,
    ),
    # 25 tokens of window leave 17 blocks of 16 behind 8 first ones, each with a key per query head
    "infllm": (InfLLM(n_init=8, block=16, local_ratio=0.5), SPARSE + LAYERS * HEADS * 17 * KEY),
    # all keys, by which it chooses
    "oracle": (Oracle(), SPARSE + LAYERS * GROUPS * (PROMPT + 2) * KEY),
    # a copy per query head
    "snapkv": (SnapKV(select_per="query_head", window=16), HEADS // GROUPS * SPARSE),
    # 4 bits of 2 * 16 numbers, four fp16 for a value's range, as many for a token's part of a key's ranges; and 64, 63
    # and 62 values of the last block once more, exact
    "kivi": (Kivi(bits=4, group=16, residual=64), LAYERS * (GROUPS * (PROMPT * 24 + 63 * KEY) + 2 * TOKEN)),
}  # fmt: skip


@pytest.mark.parametrize(("method", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_a_step_reads_what_the_method_s_sizes_say(method: Method, expected: float) -> None:
    assert read(method) == expected


def test_a_token_that_several_query_heads_choose_is_read_once() -> None:
    alone, together = (
        read(Quest(page_size=16, dense_layers=(0, 1), select_per=who)) for who in ("kv_head", "query_head")
    )
    chosen = (together - alone) / TOKEN + BUDGET
    assert BUDGET < chosen < HEADS // GROUPS * BUDGET


# The bytes of a layer are those of every tensor it holds, wherever it keeps it.

ROOM = 2 * 10 * 16 * 4  # K and V of the store
MINE = 4 * 32


@dataclass(slots=True)
class Slotted:
    kept: Tensor


class Private:
    __slots__ = ("__kept",)

    def __init__(self, kept: Tensor) -> None:
        self.__kept = kept


class Further(Slotted):
    """Its base class holds the tensor."""


class OnHost:
    tier = "host"

    def __init__(self, kept: Tensor) -> None:
        self.kept = [kept]


class Newcomer(Layer):
    diagnostics: ClassVar[tuple[str, ...]] = ("last_read",)


def layer() -> Any:
    """Its store takes memory with the first token."""
    s = Sequences(Shape(1, 1, 16), 10)
    made = Newcomer(s.specs[0], CacheState(s.request(None)), Full())
    made.take_in(s.at(0, 0, 1))
    return made


def closure(kept: Tensor) -> Callable[[], Tensor]:
    return lambda: kept


HOLDERS: list[Callable[[Tensor], Any]] = [
    lambda x: x, lambda x: [x], lambda x: {"a": (x,)}, lambda x: deque([x]), Slotted, Private, Further, closure,
    lambda x: partial(torch.add, x), lambda x: partial(torch.add, other=x), lambda x: Slotted(x).__repr__,
]  # fmt: skip


@pytest.mark.parametrize("held_in", HOLDERS)
def test_every_tensor_counts(held_in: Callable[[Tensor], Any]) -> None:
    made = layer()
    made.table = held_in(torch.zeros(32))
    assert footprint([made]) == {"device": ROOM + MINE, "host": 0, "disk": 0}


def test_what_a_layer_names_as_diagnostics_does_not_count() -> None:
    made = layer()
    made.last_read = [torch.zeros(32)]
    assert footprint([made]) == {"device": ROOM, "host": 0, "disk": 0}


def test_bytes_in_a_tier_that_nobody_knows_are_an_error() -> None:
    class Elsewhere(HostRows):
        tier = "elsewhere"

    made = layer()
    made.far = Elsewhere((1, 1, 4, 2), torch.float32, Place(torch.device("cpu")))
    with pytest.raises(ValueError, match="'elsewhere'"):
        footprint([made])


def test_views_count_once_and_a_tier_decides_for_what_it_holds() -> None:
    made = layer()
    made.far = OnHost(torch.zeros(32))
    made.first, made.second, made.itself = made.store.k_rows[:1], made.store.k, made
    assert footprint([made]) == {"device": ROOM, "host": MINE, "disk": 0}
