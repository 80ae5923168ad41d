"""Rows in pinned host memory beside a GPU; the same on a CPU, where host and device are one memory."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from harness.engine.attach import Attachment, attached
from harness.engine.attach_options import AttachOptions
from harness.engine.batch.running_sequence import Generation
from harness.engine.engine import Engine
from kernels import ops, reference
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged
from methods.abilities.kept_codec import KeptCodec
from methods.base import CacheState, Method
from methods.pools import Pool, rows_for
from methods.pools.batched import BatchedHostRows
from methods.tiers.codec import IntCodec
from methods.tiers.traffic import Traffic
from tests.kernels.op_cases import pick, random
from tests.methods.test_contract import NAMES, small
from tests.methods.test_no_waiting import devices
from tests.tiny import prompt, tiny

OFFLOADING: dict[str, Method] = {name: small(name) for name in NAMES if small(name).offloads}
for kivi in ("kivi", "kivi_2bit"):  # its prompts are shorter than 128 tokens
    OFFLOADING[kivi] = replace(OFFLOADING[kivi], group=16, residual=32)  # type: ignore[call-arg]
OFFLOADING["pqcache with a block cache"] = replace(small("pqcache"), cache_tokens=16, cache_block=4)  # type: ignore[call-arg]


def model_on(device: str) -> Any:
    return deepcopy(tiny("llama")).to(device)  # type: ignore[arg-type]


@devices
@pytest.mark.parametrize("name", OFFLOADING)
def test_placement_changes_no_token(name: str, device: str) -> None:
    """Over two prompts, the second in chunks."""
    made: dict[str, list[Generation]] = {}
    model = model_on(device)
    for placement in ("device", "host"):
        with attached(
            model, OFFLOADING[name], budget=0.5, placement=placement, calibration=prompt(64, seed=9)  # type: ignore[arg-type]
        ) as kv:  # fmt: skip
            engine = Engine(kv)
            made[placement] = [engine.generate(prompt(80, seed=seed), max_new_tokens=12) for seed in range(2)]
    for near, far in zip(*made.values(), strict=True):
        assert near.tokens == far.tokens
        assert far.kv["host"] > 0 == near.kv["host"]


@devices
@pytest.mark.parametrize("name", ["pqcache", "quest", "sparq", "full_offloaded", "kivi"])
def test_codes_give_the_same_tokens_in_every_place(name: str, device: str) -> None:
    """KIVI has codes of its own, and Full none."""
    method, model = OFFLOADING[name], model_on(device)
    codec, made = IntCodec(bits=4, group=8) if not KeptCodec.refusal(method) else None, []
    for placement in ("device", "host", "disk"):
        with attached(model, method, budget=0.5, placement=placement, codec=codec) as kv:  # type: ignore[arg-type]
            made.append(Engine(kv).generate(prompt(80), max_new_tokens=12))
    assert made[0].tokens == made[1].tokens == made[2].tokens
    assert [one.kv["host"] > 0 for one in made] == [False, True, False]
    assert [one.kv["disk"] > 0 for one in made] == [False, False, True]


@devices
def test_rows_come_from_pinned_memory_as_they_went_there(device: str) -> None:
    kv = Attachment(model_on(device), OFFLOADING["pqcache"], AttachOptions(budget=40, placement="host"))
    cache = CacheState(kv.request(capacity=60))
    store = Pool(kv.specs[0], cache, 60)
    k, v = (random(seed, 1, 2, 50, 16).to(device) for seed in (1, 2))
    store.append(k[:, :, :31], v[:, :, :31])
    store.append(k[:, :, 31:], v[:, :, 31:])
    rows = pick(3, 1, 2, 50, 9).to(device)
    found, wanted = (
        store.gather(rows).wait()[:2],
        [x.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, 16)) for x in (k, v)],
    )
    held = rows_for(k, cache, 0)
    stored = [held.stored, *(rows.stored for rows in store._tokens)]  # type: ignore[attr-defined]
    assert {x.device.type for x in stored} == {"cpu"}
    assert {x.is_pinned() for x in stored} == {device == "cuda"}
    for one, other, whole, given in zip(found, wanted, store.whole().wait()[:2], (k, v), strict=True):
        assert one.device == other.device
        assert torch.equal(one, other)
        assert torch.equal(whole, given)
    assert torch.equal(held.gather(rows, cache.traffic), wanted[0])
    assert cache.traffic.to_host_bytes == 3 * k.nbytes


@devices
def test_the_device_reads_pinned_rows_in_place(device: str) -> None:
    """Without a wait for their numbers; what a slot holds is read there."""
    far, held = random(1, 1, 2, 50, 16), random(2, 1, 2, 4, 16).to(device)
    rows, slots = pick(3, 1, 2, 50, 9).to(device), torch.tensor([-1, 0, 3] * 6).view(1, 2, 9).to(device)
    far = far.pin_memory() if device == "cuda" else far
    ops.gather_tiers(far, rows, held, slots)  # compiled
    if device == "cuda":
        assert ops.gather_tiers.refusal("triton", far, rows, held, slots) is None
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = ops.gather_tiers(far, rows, held, slots)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert found.device == held.device
    assert torch.equal(found.cpu(), reference.gather_tiers(far, rows.cpu(), held.cpu(), slots.cpu()))


@devices
def test_the_device_reads_pinned_rows_of_several_sequences_in_place(device: str) -> None:
    """Chosen rows, and channels for their scores; a free slot has none."""
    parts = [random(seed, 1, 2, size, 16) for seed, size in enumerate((50, 9))]
    pinned = [part.pin_memory() if device == "cuda" else part for part in parts]
    where = torch.device(device)
    chosen = [pick(seed, 1, 2, size, 9) for seed, size in enumerate((50, 9))]
    rows = torch.cat([*chosen, torch.zeros_like(chosen[0])]).to(device)
    each = Ragged.filled_up(rows, PerSequence([9, 9], dead=1))
    moved, traffic = BatchedHostRows(pinned, where, dead=1), Traffic.batched(3, where)
    found = moved.gather(each, traffic)
    assert found.device.type == device
    for one, part, at in zip(found, parts, chosen, strict=False):
        assert torch.equal(one[:, :9].cpu(), reference.gather_rows(part, at)[0])
    assert traffic.tallies["to_device_bytes"].tolist() == [2 * 9 * 16 * 4] * 2 + [0]
    turned = [part.mT.contiguous() for part in parts]
    turned = [part.pin_memory() for part in turned] if device == "cuda" else turned
    by_channel = BatchedHostRows(turned, where, 3, dead=1)
    q, channels = random(3, 3, 2, 3, 4).to(device), pick(4, 3, 2, 16, 4).to(device)
    sums, _ = ops.channel_sums(q, by_channel.in_place(4, traffic), channels)
    for i, part in enumerate(parts):
        wanted, _ = reference.channel_sums(q[i : i + 1].cpu(), part.mT, channels[i : i + 1].cpu())
        torch.testing.assert_close(sums.parts[i].cpu(), wanted)
    assert traffic.tallies["to_device_bytes"].tolist() == [2 * (9 * 16 + 4 * size) * 4 for size in (50, 9)] + [0]
