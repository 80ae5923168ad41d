"""Finds keys that are alike.

A program takes a block of keys and goes over all keys from the last one on, until each of its own has
found one. Products stay in registers. At most S / 128 programs of a head read all of its S keys, from
the L2 cache. Where none is alike, 131072 keys of 128 channels and 8 heads take 3.5e13 products in 16
bits, about 0.05 to 0.1 s of an H200."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu import common
from kernels.gpu.common import head_rows, load, located, padded, product, program_at

# numbers of a block of keys, by their bytes: products in fp32 take more registers
_NUMBERS = {2: 16384, 4: 4096}
_BLOCKS = tl.constexpr(8)  # blocks that are compared before a program asks whether it may end


def last_alike(keys: Tensor, threshold: float) -> Tensor:
    """Find for each key the last other one that is like it, as kernels/reference.py defines it.
    keys [B G S D] -> [B G S]"""
    (batch, groups, count, dim), size = keys.shape, keys.element_size()
    last = torch.empty(keys.shape[:3], dtype=torch.int64, device=keys.device)
    lengths = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32).clamp_(min=1e-8)
    block = min(256 // size, _NUMBERS[size] // padded(dim))
    _find[(triton.cdiv(count, block), batch * groups)](
        located(keys), lengths, last, threshold, count, groups, dim, block, max(16, block // 2),
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return last


def last_alike_refuses(keys, threshold):
    return common.unfit_heads(keys)


@triton.jit(do_not_specialize=["count"])
def _find(
    keys, lengths, last, threshold, count, GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Find for each key of a block the last other one whose cosine with it is above `threshold`.
    OTHERS: how many keys it is compared with at once."""
    this = program_at(1)
    first, step = head_rows(keys, this // GROUPS, this % GROUPS)
    row, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, padded(DIM))
    live = row < count
    own = load(first + row[:, None] * step + channel, live[:, None] & (channel < DIM))
    lengths += this * count
    # what the product with a unit vector must exceed
    least = tl.where(live, threshold * load(lengths + row, live), float("inf"))
    found = tl.where(live, -1, 0)
    end = count
    while (end > 0) & (tl.min(found, 0) < 0):
        for block in range(_BLOCKS):
            other = end - (block + 1) * OTHERS + tl.arange(0, OTHERS)
            there = other >= 0
            tile = load(first + other[:, None] * step + channel, there[:, None] & (channel < DIM))
            share = 1 / tl.load(lengths + other, mask=there, other=1.0)
            over = product(own, tl.trans(tile)) * share[None, :] - least[:, None]
            alike = (over > 0) & (row[:, None] != other[None, :])
            found = tl.maximum(found, tl.max(tl.where(alike, other[None, :], -1), 1))
        end -= _BLOCKS * OTHERS
    tl.store(last + this * count + row, tl.maximum(found, 0).to(tl.int64), mask=live)
