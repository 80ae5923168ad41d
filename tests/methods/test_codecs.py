"""Methods over a pool of few bits: wherever it lies, the same; and close to the plain one where the bits are many."""

from __future__ import annotations

from functools import cache
from itertools import cycle, product

import pytest
import torch

from harness.checks.trial import Step, turn
from harness.config.catalogue import entries
from harness.engine.attach import attached
from harness.engine.footprint import footprint
from methods.abilities.kept_codec import KeptCodec
from methods.base import Budget
from methods.tiers.codec import Codec, FloatCodec, IntCodec, Plain
from methods.tiers.codecs import codec_of
from tests.methods.test_contract import NAMES, assert_same, small
from tests.tiny import prompt, tiny

ENCODING = [name for name in NAMES if not KeptCodec.refusal(small(name))]
RULES = {name: entry.facts().get("rule", "") for name, entry in entries("method").items()}
EVICTING = [name for name in ENCODING if "evicts" in RULES.get(name, "") and "selects" not in RULES[name]]
LEVELS = [codec_of(name) for name in ("tq4", "tq3", "tq2", "tq4q", "tq3q", "tq2q", "int4g8h")]
APART = [codec_of(name) for name in ("nvfp4", "int4+3/int2g8", "int8/int2g8h")]
LENGTH = 83


@cache
def steps(name: str, codec: Codec | None, placement: str = "device") -> tuple[list[Step], tuple[int, int, int]]:
    """-> the steps, and the bytes on device, host and disk after them"""
    method, calibration = small(name), prompt(64, seed=9)
    with attached(
        tiny("llama"), method, budget=0.4, placement=placement, calibration=calibration, codec=codec  # type: ignore[arg-type]
    ) as kv:  # fmt: skip
        cache = kv.cache(capacity=LENGTH + 8, batch=2)
        made = turn(kv, cache, prompt(LENGTH, batch=2))
        held = footprint(cache.layers)
    return made, (held["device"], held["host"], held["disk"])


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *((name, IntCodec(bits=4, group=8)) for name in ENCODING[::2]),
        *[*zip(ENCODING, cycle(LEVELS), strict=False)][1::2],
        ("pqcache", FloatCodec()),
        *product(("pqcache", "rocketkv", "coded"), APART),
        ("snapkv", APART[1]),
    ],
)
def test_codes_are_the_same_wherever_they_lie(name: str, codec: Codec) -> None:
    wanted, (device, *_) = steps(name, codec)
    for place, placement in enumerate(("host", "disk") if small(name).offloads else (), 1):
        found, held = steps(name, codec, placement)
        assert_same(found, wanted)
        assert held[place] > 0
        assert held[0] < device
    plain, (whole, *_) = steps(name, None)
    assert device < whole
    assert not torch.equal(plain[0].logits, wanted[0].logits)


@pytest.mark.parametrize("name", ENCODING)
def test_more_bits_are_closer(name: str) -> None:
    """The first step: later ones follow their own tokens. RocketKV chooses by codes as well, so a choice may flip."""
    plain = steps(name, None)[0][0].logits
    errors = [float((steps(name, IntCodec(bits=bits, group=8))[0][0].logits - plain).std()) for bits in (2, 4, 8)]
    assert errors[0] > errors[1] > 3 * errors[2]
    assert errors[2] < 0.2 * float(plain.std())


@pytest.mark.parametrize("name", EVICTING)
def test_what_evicting_methods_keep_may_be_encoded_without_loss(name: str) -> None:
    """Tokens that leave the store, as they are, change nothing: in two turns, with generated tokens that leave."""
    seen = []
    for codec in (None, Plain()):
        with attached(tiny("llama"), small(name), budget=Budget(0.4, generated=5), codec=codec) as kv:
            cache = kv.cache(capacity=LENGTH + 60, batch=2)
            turns = [turn(kv, cache, prompt(length, batch=2), steps=8) for length in (LENGTH, 30)]
            away = [layer.far is not None for layer in cache.layers]  # type: ignore[attr-defined]
            assert away == [codec is not None] * len(away)
            seen.append([*turns[0], *turns[1]])
    assert_same(*seen)


@pytest.mark.parametrize(
    ("codec", "of_token", "of_block"),
    [
        ("nvfp4", 2 * 8 + 2, 2 * 4),  # a scale of each 16 channels; and two in fp32
        ("int4/int2", 8 + 4 + 2 * 2, 2 * 16 * 2),
        ("int4+3/int8", 8 + 16 + 2 * 2 + 3 * 4, 2 * 16 * 2 + 3),  # the model is in fp32
    ],
)
def test_a_whole_prompt_takes_the_bytes_of_its_blocks(codec: str, of_token: int, of_block: int) -> None:
    """On the device, and in the bytes that a step reads; 19 tokens fill no block, and 3 more come."""
    with attached(tiny("llama"), small("coded"), codec=codec_of(codec)) as kv:
        cache = kv.cache(capacity=LENGTH + 3, batch=2)
        turn(kv, cache, prompt(LENGTH, batch=2), steps=3)
        heads, plain = 2 * 2, 2 * 16 * 4
        for layer in cache.layers:
            pool = layer.far  # type: ignore[attr-defined]
            sides = [x.nbytes for x in pool.held().values()]
            assert sum(sides) == heads * (64 * of_token + 2 * of_block + 19 * plain)
            read = heads * (64 * of_token + 2 * of_block + (19 + 3) * plain)
            assert layer.bytes_read == read


@pytest.mark.parametrize("name", EVICTING)
def test_a_step_reads_the_bytes_that_its_codec_writes(name: str) -> None:
    """Not a cache that fell back to plain rows: the tensors, their dtypes and sizes after the first step, by hand."""
    with attached(tiny("llama"), small(name), budget=0.4, codec=codec_of("tq3q")) as kv:
        cache = kv.cache(capacity=LENGTH + 8, batch=2)
        turn(kv, cache, prompt(LENGTH, batch=2), steps=1)
        kept = 0
        for layer in cache.layers:
            pools = getattr(layer.far, "pools", [layer.far])  # type: ignore[attr-defined]
            written = [x for pool in pools for x in pool.held().values()]
            tokens = sum(x.shape[0] * x.shape[1] * x.shape[2] for x in written[::3])
            assert {x.dtype for x in written} == {torch.uint8, torch.float16}
            assert sum(x.nbytes for x in written) == tokens * (2 * 16 * 3 // 8 + 6)
            kept += tokens
            assert layer.store.length == 1  # type: ignore[attr-defined]
        assert kept == 4 * 33 * len(cache.layers)  # the budget, by sequence and KV head
