"""Pools: every tier with every codec gives back what it was given, within what the codec promises, in counted bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine.footprint import footprint
from methods.base import CacheState, LayerSpec, Request
from methods.pools import Pool
from methods.tiers.codec import Codec, IntCodec, Plain

BATCH, HEADS, DIM, GROUP = 2, 2, 32, 8
TIERS = ("device", "host", "disk")
CODECS: dict[str, Codec] = {"plain": Plain()} | {f"int{bits}": IntCodec(bits=bits, group=GROUP) for bits in (8, 4, 2)}
LENGTHS = (3, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP, 5 * GROUP + 3)
EVERY = pytest.mark.parametrize(("tier", "codec"), list(product(TIERS, CODECS)))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def spec_of(dim: int = DIM) -> LayerSpec:
    def never(_: Tensor) -> Any:
        raise AssertionError("A pool has no use for this.")

    return LayerSpec(0, 1, 2 * HEADS, HEADS, dim, dim**-0.5, never, never)


def cache_of(
    tmp_path: Path, tier: str, codec: str, dtype: torch.dtype = torch.float32, batch: int = BATCH
) -> CacheState:
    return CacheState(
        Request(
            batch=batch,
            capacity=64,
            dtype=dtype,
            device=torch.device("cpu"),
            placement=tier,
            codec=CODECS[codec],
            disk=tmp_path,
        )
    )


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """K with channels of different size, V without. [B G count D]"""
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(BATCH, HEADS, count, DIM, generator=draw) for _ in range(2))
    return (k * torch.linspace(0.1, 9, DIM) + 3).to(dtype), v.to(dtype)


@dataclass
class Holder:
    pool: Pool

    @property
    def request(self) -> Request:
        return self.pool.cache.request


def held(pool: Pool) -> tuple[int, int, int]:
    """Bytes on the device, the host, the disk."""
    made = footprint([Holder(pool)])  # type: ignore[list-item]
    return made["device"], made["host"], made["disk"]


def allowed(codec: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The largest error: half a step of the group, a little for its bounds in fp16, and the rounding of the result."""
    if codec == "plain":
        return torch.zeros_like(k), torch.zeros_like(v)
    levels = 2 ** int(codec[3:]) - 1
    whole = k.shape[2] // GROUP * GROUP
    keys, values = k.float(), v.float()
    grouped = keys[:, :, :whole].unflatten(2, (-1, GROUP))
    half_k = (grouped.amax(3) - grouped.amin(3)) / levels / 2
    grouped = values[:, :, :whole].unflatten(3, (-1, GROUP))
    half_v = (grouped.amax(4) - grouped.amin(4)) / levels / 2
    made = []
    for x, half in ((keys, half_k.repeat_interleave(GROUP, 2)), (values, half_v.repeat_interleave(GROUP, 3))):
        bound = torch.zeros_like(x)
        bound[:, :, :whole] = half * 1.01 + x.abs().amax() * (2**-10 / levels + torch.finfo(k.dtype).eps)
        made.append(bound)
    return made[0], made[1]


@EVERY
@DTYPES
@pytest.mark.parametrize("count", LENGTHS)
def test_what_comes_back_is_within_half_a_step(
    tier: str, codec: str, dtype: torch.dtype, count: int, tmp_path: Path
) -> None:
    pool = Pool(spec_of(), cache_of(tmp_path, tier, codec, dtype), 64)
    k, v = tokens(count, dtype)
    for chunk in torch.arange(count).split(2 * GROUP):
        pool.append(k[:, :, chunk], v[:, :, chunk])
    found = pool.whole().wait()
    assert (pool.length, pool.tier, found.k.dtype) == (count, tier, dtype)
    for x, back, bound in zip((k, v), found[:2], allowed(codec, k, v), strict=True):
        assert bool(((back.float() - x.float()).abs() <= bound).all())
    if codec != "plain" and count >= GROUP:
        assert not torch.equal(found.k, k)


@EVERY
@DTYPES
@pytest.mark.parametrize("count", LENGTHS)
def test_rows_are_those_of_the_whole(tier: str, codec: str, dtype: torch.dtype, count: int, tmp_path: Path) -> None:
    pool = Pool(spec_of(), cache_of(tmp_path, tier, codec, dtype), count)
    pool.append(*tokens(count, dtype))
    whole = pool.whole().wait()
    draw = torch.Generator().manual_seed(1)
    for heads in (HEADS, 2 * HEADS):  # of KV heads, of query heads
        rows = torch.randint(count, (BATCH, heads, 7), generator=draw)
        for x, all_ in zip(pool.gather(rows).wait()[:2], whole[:2], strict=True):
            index = rows.view(BATCH, HEADS, -1, 1).expand(-1, -1, -1, DIM)
            assert torch.equal(x.reshape(BATCH, HEADS, -1, DIM), all_.gather(2, index))
            assert x.shape == (BATCH, heads, 7, DIM)
    unread = rows.clone().random_(2, generator=draw) - 1  # half of the rows have a slot
    before, encoded = pool.cache.traffic.total_bytes, pool.encoded
    for x, all_ in zip(pool.gather(rows, unread).wait()[:2], whole[:2], strict=True):
        index = rows.view(BATCH, HEADS, -1, 1).expand(-1, -1, -1, DIM)
        same = (x.reshape(BATCH, HEADS, -1, DIM) == all_.gather(2, index)).all(-1).view(rows.shape)
        assert bool(same[(unread < 0) | (rows >= encoded)].all())
    moved = 0 if tier == "device" or not encoded else int((unread < 0).sum()) * pool.layout.token_bytes
    assert pool.cache.traffic.settle().total_bytes - before == moved


def formula(codec: str, count: int, item: int) -> tuple[int, int]:
    """Bytes in the tier and beside it on the device, by hand."""
    heads = BATCH * HEADS
    if codec == "plain":
        return heads * count * 2 * DIM * item, 0
    bits, blocks = int(codec[3:]), count // GROUP
    per_token = 2 * DIM * bits // 8 + 2 * 2 * DIM // GROUP
    return heads * blocks * GROUP * per_token, heads * (
        blocks * 2 * 2 * DIM + (GROUP * 2 * DIM * item if count % GROUP else 0)
    )


@EVERY
@DTYPES
@pytest.mark.parametrize("count", [8 * GROUP, 8 * GROUP + 3])
def test_bytes_are_those_of_the_formula(tier: str, codec: str, dtype: torch.dtype, count: int, tmp_path: Path) -> None:
    pool = Pool(spec_of(), cache_of(tmp_path, tier, codec, dtype), count)
    pool.append(*tokens(count, dtype))
    away, beside = formula(codec, count, dtype.itemsize)
    expected = {"device": 0, "host": 0, "disk": 0}
    expected[tier] += away
    expected["device"] += beside
    assert held(pool) == pytest.approx(tuple(expected.values()), rel=0.02)


@EVERY
def test_traffic_is_what_lies_in_the_tier(tier: str, codec: str, tmp_path: Path) -> None:
    count = 4 * GROUP + 2
    cache = cache_of(tmp_path, tier, codec)
    pool, traffic = Pool(spec_of(), cache, 5 * GROUP), cache.traffic
    pool.append(*tokens(count))
    stored = 0 if tier == "device" else count // (1 if codec == "plain" else GROUP) * (1 if codec == "plain" else GROUP)
    row = formula(codec, GROUP, 4)[0] // GROUP
    assert (traffic.to_host_bytes, traffic.to_device_bytes, traffic.from_disk_bytes) == (stored * row, 0, 0)
    pool.gather(torch.arange(6).expand(BATCH, HEADS, -1)).wait()
    moved = 0 if tier == "device" else 6 * row
    assert (traffic.to_device_bytes, traffic.from_disk_bytes) == (moved, moved if tier == "disk" else 0)
    pool.whole().wait()
    assert traffic.to_device_bytes == moved + stored * row


@EVERY
@pytest.mark.parametrize("count", [3, 2 * GROUP, 2 * GROUP + 3])
def test_what_a_pool_hands_over_goes_on_in_another_tier(tier: str, codec: str, count: int, tmp_path: Path) -> None:
    """As it is written: nothing is decoded, and nothing crosses the device."""
    cache = cache_of(tmp_path, tier, codec)
    pool = Pool(spec_of(), cache, 64)
    pool.append(*tokens(count))
    before, held = cache.traffic.total_bytes, pool.held()
    assert cache.traffic.total_bytes == before
    assert sum(x.nbytes for x in held.values()) <= formula(codec, count, 4)[0] + sum(formula(codec, count, 4)[1:])
    for other in TIERS:
        again = Pool(spec_of(), cache_of(tmp_path, other, codec), count)
        again.take(held)
        assert (again.length, again.tier, again.cache.traffic.total_bytes) == (count, other, 0)
        for x, back in zip(pool.whole().wait()[:2], again.whole().wait()[:2], strict=True):
            assert torch.equal(x, back)
    with pytest.raises(ValueError, match="codec"):
        Pool(spec_of(), cache_of(tmp_path, tier, codec, batch=1), count).take(held)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        (lambda cache: IntCodec(bits=3, group=32), "2, 4 or 8"),
        (lambda cache: IntCodec(bits=4, value_bits=3), "4 and 3 bits"),
        (lambda cache: IntCodec(bits=4, group=1), "at least 2"),
        (lambda cache: Pool(spec_of(36), cache, 20), "head size"),
        (lambda cache: Pool(spec_of(), cache, 20).append(*tokens(21)), "capacity"),
    ],
)
def test_what_cannot_be_is_refused(wrong: Callable[[CacheState], object], key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=key):
        wrong(cache_of(tmp_path, "device", "int4"))
