"""Computes costs in bytes that several methods share. Each method adds its own terms, in its own
file; a test compares the sums with what is measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.top_p import BITS, RANGE_BYTES
from methods.base import Cost, LayerWorkload, Plan
from methods.tiers.codec import Codec, Plain
from methods.tiers.tier import DEVICE

FP32, INT32, INT64 = 4, 4, 8  # bytes of an element


def dense(case: LayerWorkload) -> Cost:
    """Return the cost of having everything on the device and reading all of it; nothing moves."""
    held = (case.sealed + case.room) * case.row_bytes
    return Cost(held).reading(case.sealed * case.row_bytes)


def evict(case: LayerWorkload, kept: int, copies: int = 1) -> Cost:
    """Return the cost of a layer that has kept `kept` prompt tokens, in `copies` per KV head (one,
    or one per query head), encoded if the case has a codec, with plain room for the generated
    tokens. A step reads all of them. Where heads keep different numbers of tokens, `kept` is their
    mean, and each head may hold up to a codec's block of plain tokens more or fewer than this says.
    """
    if kept >= case.sealed:
        return dense(case)
    heads = replace(case.spec, num_kv_heads=copies * case.spec.num_kv_heads)
    case = replace(case, spec=heads, placement=DEVICE)
    held = Cost((kept + case.room) * case.row_bytes).reading(kept * case.row_bytes)
    return held + sent_away(case, kept, kept)


def select(case: LayerWorkload, plan: Plan, index_bytes: int) -> Cost:
    """Return the cost of a method that holds all tokens and reads those of `plan`: sinks, a window
    and chosen ones. The tokens between sinks and window lie where `case.placement` says; an index
    of `index_bytes` lies on the device, and a step reads all of it."""
    middle = case.sealed - plan.sinks - plan.local
    held = Cost(case.dense_bytes + index_bytes).reading(sum(plan) * case.row_bytes + index_bytes)
    return (
        held
        + sent_away(case, middle, plan.top)
        + estimates(case, middle, plan.top, plan.sinks + plan.local)
    )


def estimates(case: LayerWorkload, tokens: int, read: int, always: int = 0) -> Cost:
    """Return the cost of copies in 4 bits of `tokens` keys, of which a step reads `read` to estimate
    weights, and the exact keys of `always` tokens as well; nothing if the case asks for none."""
    key = case.spec.num_kv_heads * (case.spec.head_dim * BITS // 8 + RANGE_BYTES)
    if not case.estimated:
        return Cost()
    return Cost(tokens * key).reading(read * key + always * case.key_bytes)


def sent_away(case: LayerWorkload, tokens: int, read: int) -> Cost:
    """Return the change in cost if `tokens` of the prompt leave the device's store for a pool on
    another tier or in fewer bits, and a step reads `read` of them; no change if the case asks for
    neither."""
    if case.placement == DEVICE and case.codec is None:
        return Cost(0)
    left = Cost(-tokens * case.row_bytes).reading(-read * case.row_bytes)
    return left + pool(case, case.codec or Plain(), tokens, read)


def pool(case: LayerWorkload, codec: Codec, tokens: int, read: int) -> Cost:
    """Return the cost of a pool (tokens outside the store, as `codec` encodes them) of `tokens`
    tokens, of which a step reads `read`."""
    heads = case.spec.num_kv_heads
    layout = codec.for_layer(case.spec).layout(
        case.spec.head_dim, {2: torch.bfloat16, 4: torch.float32}[case.element_bytes]
    )
    blocks, rest = divmod(tokens, codec.block)
    beside = blocks * heads * layout.block_bytes + (
        min(tokens, codec.block) * case.row_bytes if rest else 0
    )
    token = heads * layout.token_bytes
    exact = read * rest // max(1, tokens)  # of those that fill no block, if all are chosen alike
    coded = (read - exact) * (token + heads * layout.block_bytes // codec.block)
    held = Cost.placed(case.placement, blocks * codec.block * token, read * token)
    return Cost(beside).reading(coded + exact * case.row_bytes) + held


def offload(case: LayerWorkload, stored: int, moved: int) -> Cost:
    """Return the change in cost if `stored` bytes move from the device to the case's placement, and
    a step moves `moved` of them back."""
    return Cost(-stored) + Cost.placed(case.placement, stored, moved)


def rebuilding(case: LayerWorkload, rank: int, tokens: int) -> int:
    """Return the bytes read to rebuild `tokens` keys of each KV head from low-rank factors: `rank`
    numbers for each key, and the basis."""
    return case.spec.num_kv_heads * rank * (tokens + case.spec.head_dim) * case.element_bytes


def rope_table(case: LayerWorkload) -> Cost:
    """Return the cost of a table with cos and sin of every position. Layers that rotate alike share
    one, which is counted in the first of them; it is zero for the others."""
    channels = case.spec.rotary_dim or case.spec.head_dim
    first = case.spec.index == case.spec.rope_like
    return Cost(2 * case.capacity * channels * case.element_bytes if first else 0)
