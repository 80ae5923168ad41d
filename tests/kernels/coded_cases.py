"""Inputs of the operations that read codes: every number of bits, groups of several sizes, views of larger buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.coded import Coded, CodedFloats, Rotated
from kernels.levels import CodedLevels, encode_levels
from kernels.nvfp4 import CodedFloats4, encode_nvfp4
from kernels.quantise import pack, quantise, to_float8
from kernels.reference import Segment


class Shape(NamedTuple):
    bits: int
    batch: int
    heads: int
    groups: int
    dim: int
    tokens: int
    block: int  # tokens that share a range of each channel
    ranges: int  # groups of a value's channels
    value_bits: int = 0  # 0: as of keys
    kept: int = 0  # channels of keys in full


SHAPES = {
    "int8": Shape(8, 2, 8, 2, 128, 192, 32, 4),
    "int4": Shape(4, 1, 9, 3, 64, 160, 16, 2),
    "int2": Shape(2, 1, 5, 1, 128, 192, 64, 8),
    "int4-dim96": Shape(4, 1, 4, 2, 96, 64, 32, 3),
    "int4-dim192": Shape(4, 1, 4, 2, 192, 64, 32, 6),  # rows of more than one vector, and no whole number of them
    "int2-dim24": Shape(2, 1, 4, 2, 24, 32, 16, 3),  # rows of six bytes
    # more heads than a tile has; a head's last vector is a row's last, too
    "int8-dim80-blocks-of-48": Shape(8, 1, 20, 1, 80, 144, 48, 1),
    "int4-values-int2": Shape(4, 1, 8, 2, 128, 96, 32, 4, value_bits=2),
    "int2-values-int8-dim96": Shape(2, 2, 4, 2, 96, 64, 32, 3, value_bits=8),
    "int4-kept4": Shape(4, 1, 4, 2, 64, 160, 32, 2, kept=4),
}
KEPT = "int4-kept4"


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(shape: Shape, spare: int = 0) -> Coded:
    """Keys with channels that are large throughout, in views of room for `spare` blocks more."""
    count = shape.tokens + spare * shape.block
    k, v = (random(seed, shape.batch, shape.groups, count, shape.dim) for seed in (1, 2))
    k[..., :3] += 9
    k_codes, *k_range, _ = quantise(k.unflatten(2, (-1, shape.block)).mT, shape.bits)
    value_bits = shape.value_bits or shape.bits
    v_codes, *v_range, _ = quantise(v.unflatten(3, (shape.ranges, -1)), value_bits)
    packed = pack(k_codes.mT.flatten(2, 3), shape.bits), pack(v_codes.flatten(3), value_bits)
    whole = Coded(*packed, torch.cat(k_range, -1), torch.cat(v_range, -1), shape.bits, shape.block)
    if shape.kept:  # other channels in each block
        which = random(7, *whole.k_range.shape[:3], shape.dim).argsort(-1)[..., : shape.kept]
        kept = k.gather(3, which.repeat_interleave(shape.block, 2))
        whole = whole._replace(kept=kept, which=which.to(torch.uint8))
    return whole.tokens(spare // 2 * shape.block, spare // 2 * shape.block + shape.tokens)


def floats(shape: Sequence[int], spare: int = 0) -> CodedFloats:
    """Keys and values [B G S D] as floats of 8 bits, tokens whose largest numbers are far apart, in views of room for
    `spare` tokens more."""
    batch, groups, tokens, dim = shape
    k, v = (random(seed, batch, groups, tokens + spare, dim) for seed in (1, 2))
    k[:, :, ::2] *= 1e-3
    (k_codes, of_key, _), (v_codes, of_value, _) = to_float8(k), to_float8(v)
    return CodedFloats(*(x[:, :, spare:] for x in (k_codes, v_codes, torch.cat([of_key, of_value], -1))))


def floats4(shape: Sequence[int], block: int, spare: int = 0) -> CodedFloats4:
    """Keys and values [B G S D] as NVFP4, of which some channels are large and some blocks small, in views of room for
    `spare` blocks more."""
    batch, groups, tokens, dim = shape
    k, v = (random(seed, batch, groups, tokens + spare * block, dim) for seed in (1, 2))
    k[..., 3], k[:, :, ::5], v[..., -16:] = 40.0, k[:, :, ::5] * 1e-2, v[..., -16:] * 1e-5
    written = encode_nvfp4(k, v, block)[0]
    views = {name: getattr(written, name)[:, :, spare * block :] for name in ("k", "v", "scales")}
    return written._replace(**views, of_tensor=written.of_tensor[:, :, spare:])


def late(shape: Shape, tokens: int) -> Segment:
    """Return tokens that are no codes."""
    return Segment(*(random(seed, shape.batch, shape.groups, tokens, shape.dim) for seed in (4, 5)))


def levels(shape: Sequence[int], bits: int, seed: int | None, spare: int = 0) -> CodedLevels:
    """Keys and values [B G S D] as levels, with a residual bit where there is a seed, in views of larger tensors."""
    batch, groups, tokens, dim = shape
    k, v = (random(seed, batch, groups, tokens + spare, dim) for seed in (1, 2))
    written = encode_levels(k, v, bits, seed)[0]
    return written._replace(**{name: getattr(written, name)[:, :, spare:] for name in ("k", "v", "norms")})


LEVELS = {  # bits, and whether keys have signs
    "tq2": (2, None, (1, 2, 70, 128)), "tq3": (3, None, (2, 1, 33, 64)), "tq4": (4, None, (1, 2, 1100, 64)),
    "tq2q": (2, 5, (1, 1, 40, 64)), "tq3q-dim80": (3, 5, (1, 2, 40, 80)), "tq4q": (4, 5, (2, 2, 70, 128)),
    "tq4-dim192": (4, None, (1, 2, 70, 192)),
}  # fmt: skip
FLOATS4 = {"nvfp4": (2, 2, 96, 128), "nvfp4-dim80": (1, 3, 64, 80)}
FLOATS = {"fp8": (2, 2, 190, 128), "fp8-dim96": (1, 3, 33, 96)}


def attention() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, shape in SHAPES.items():
        q = random(3, shape.batch, shape.heads, 1, shape.dim)
        yield name, (q, [coded(shape)], 0.1)
        if shape.block == 32:
            yield f"{name}-view", (q, [coded(shape, spare=3)], 0.1)
            yield f"{name}-and-others", (q, [late(shape, 5), coded(shape), late(shape, 70)], 0.1)
    for name, (batch, groups, tokens, dim) in FLOATS.items():
        yield name, (random(3, batch, groups * 3, 1, dim), [floats((batch, groups, tokens, dim), spare=5)], 0.1)
    for name, (batch, groups, tokens, dim) in FLOATS4.items():
        q = random(3, batch, groups * 3, 1, dim)
        yield name, (q, [floats4((batch, groups, tokens, dim), tokens // 2, spare=1)], 0.1)
    for name, (bits, seed, (batch, groups, tokens, dim)) in LEVELS.items():
        written = levels((batch, groups, tokens, dim), bits, seed, spare=3)
        yield name, (random(3, batch, groups * 3, 1, dim), [written], 0.1)

    # rotated, beside plain tokens, whose heads each backend has
    for name, of_levels in {"tq3q-dim96": (3, 5, (1, 2, 40, 96)), "tq4q": LEVELS["tq4q"]}.items():
        bits, seed, (batch, groups, tokens, dim) = of_levels
        plain = Segment(*(random(seed, batch, groups, 9, dim) for seed in (4, 5)))
        turned = Rotated(levels((batch, groups, tokens, dim), bits, seed), 1)
        yield f"{name}-turned", (random(3, batch, groups * 5, 1, dim), [plain, turned], 0.1)
    shape = SHAPES["int4"]
    q = random(3, shape.batch, shape.heads, 1, shape.dim)
    yield "int4-turned", (q, [Rotated(coded(shape), 2), Rotated(coded(shape), 3)], 0.1)


def encoded() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, (bits, batch, _, groups, dim, tokens, block, _, value_bits, _) in SHAPES.items():
        k, v = (random(seed, batch, groups, tokens + 2, dim)[:, :, 2:] for seed in (1, 2))
        k[:, :, :, :3] += 9
        k[..., 5], v[:, :, 7] = 0.3, -2.0  # groups of one number
        if block & (block - 1) == dim & (dim - 1) == 0:
            yield name, (k, v, bits, value_bits or bits, block)
            none = k[:, :, :0], v[:, :, :0], bits, bits, block
    yield "none", none


def rows() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Of each head, chosen ones in no order; all of them; and rows that were moved to where others stood."""
    for name, shape in SHAPES.items():
        written = coded(shape, spare=1)
        heads = shape.batch, shape.groups
        among = torch.rand(*heads, shape.tokens, generator=torch.Generator().manual_seed(4)).argsort(-1)
        some = among[..., : shape.tokens // 3]
        yield f"{name}-some", (written, some, some // shape.block, torch.float32)
        every = torch.arange(shape.tokens).expand(*heads, -1) // shape.block
        yield f"{name}-all", (written, None, every, torch.float32)
        yield f"{name}-moved", (written, None, every.flip(-1), torch.float32)
        recent = random(6, *heads, shape.tokens, shape.dim), torch.tensor([7, 30])[: shape.batch]
        yield f"{name}-recent", (written, None, None, torch.float32, recent)
        yield f"{name}-none", (written, some[..., :0], some[..., :0], torch.float32)
    for name, shape in FLOATS.items():
        some = torch.tensor([7, 30, 1, 0]).expand(*shape[:2], -1)
        yield f"{name}-some", (floats(shape, spare=2), some, some, torch.float32)
        yield f"{name}-moved", (floats(shape), None, torch.arange(shape[2]).expand(*shape[:2], -1), torch.float32)
    for name, shape in FLOATS4.items():
        four, some = floats4(shape, 32, spare=1), torch.tensor([7, 40, 1, 0]).expand(*shape[:2], -1)
        yield f"{name}-some", (four, some, some // 32, torch.float32)
        every = torch.arange(shape[2]).expand(*shape[:2], -1) // 32
        yield f"{name}-moved", (four, None, every.flip(-1), torch.float32)
        yield f"{name}-all", (four, None, None, torch.float32)
    for name, (bits, seed, shape) in LEVELS.items():
        some = torch.tensor([7, 30, 1, 0]).expand(*shape[:2], -1)
        yield f"{name}-some", (levels(shape, bits, seed, spare=2), some, some, torch.float32)
