"""Numbers of docs/kernels.md: benchmarks of captured steps and codes, sizes of compiled kernels, limits in the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from harness.terminal.tables import digits
from kernels.block import MOST_INNER
from kernels.cpu.prompt import LEAST_TOKENS
from methods.tiers.codec import Codec
from methods.tiers.floats import FloatCodec
from methods.tiers.integers import IntCodec
from tests.numbers.files import line, machine, ranged, row, rows, table

ROOT = Path(__file__).parents[2]
GRAPHS, CODES = (f"bench/{name}/result" for name in ("graphs", "codes"))
TITLES = {"full": "Full", "snapkv": "SnapKV", "pqcache": "PQCache"}
WIDTH = 128  # of a head, in both tables of codes
CODECS: dict[str, Codec] = {
    "int8": IntCodec(bits=8),
    "fp8": FloatCodec(),
    "int4": IntCodec(bits=4),
    "int2": IntCodec(bits=2),
}


def held() -> list[str]:
    return [*_limits(), *_captured(), *_launches(), *_beside_full(), *_errors(), *_shared()]


def _limits() -> Iterator[str]:
    team = (ROOT / "kernels" / "cpu" / "team.cpp").read_text("utf-8")
    found = re.search(r"LOST = MS / 2;.*SHORTEST = (\d+) \* MS, LONGEST = (\d+) \* MS;", team, re.DOTALL)
    assert found
    yield f"more than 0.5 ms, at first for {found[1]} ms, and for up to {found[2]} ms"
    yield f"Prompts of at least {LEAST_TOKENS} tokens"
    most = (MOST_INNER[dtype] for dtype in (torch.float32, torch.bfloat16))
    yield "at most {} channels in fp32 or {} in bf16".format(*most)


def _captured() -> Iterator[str]:
    assert machine(GRAPHS)["threads"] == 2
    for one in rows(GRAPHS, tokens=4096):
        yield line(TITLES[one["method"]], ranged(one["tpot_s"], 1, 1e3), f"{100 * one['of_limit']:.0f}")


def _launches() -> Iterator[str]:
    """As they stand on the page: tests/harness/engine/test_launches.py counts them."""
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    yield from re.findall(r"^\| `\w+` \| \d+ \| \d+ \| \d+ \|$", page, re.MULTILINE)


def _bytes(codec: Codec) -> float:
    layout = codec.layout(WIDTH, torch.bfloat16)
    return layout.token_bytes + layout.block_bytes / codec.block


def _beside_full() -> Iterator[str]:
    full = row(CODES, backend="cpu", what="Full, 65536")
    yield f"Full's {digits(1e3 * full['time_s'][0])} ms"
    shares = []
    for bits in (8, 4, 2):
        one = row(CODES, backend="cpu", what=f"KIVI of {bits} bits, 65536")
        share = _bytes(CODECS[f"int{bits}"]) / (2 * 2 * WIDTH)
        yield line(f"int{bits}", f"{share:.2f}", ranged(one["beside_rival"], 2))
        shares.append(f"{100 * one['of_limit'][0]:.0f}")
    yield f"they read at {shares[1]} and {shares[2]} % of the bandwidth, int8 at {shares[0]} %"


def _errors() -> Iterator[str]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 8, 4096, WIDTH, generator=generator) for _ in range(2))
    k[..., :3] += 9
    q = torch.randn(1, 8, 1, WIDTH, generator=generator)
    for name in ("int8", "fp8", "int4"):
        decoded = CODECS[name].decode_whole(CODECS[name].encode(k, v), torch.float32)
        pairs = (*zip(decoded, (k, v), strict=True), (_attended(q, *decoded), _attended(q, k, v)))
        yield line(name, f"{_bytes(CODECS[name]):.0f}", *(f"{_error(got, wanted):.3f}" for got, wanted in pairs))


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q.double() @ k.double().mT / WIDTH**0.5, -1) @ v.double()


def _error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).square().mean().sqrt() / wanted.double().square().mean().sqrt())


def _shared() -> Iterator[str]:
    sizes = table("shared_memory")
    for one in sizes:
        kernel, *cells = one.values()
        yield line(f"`{kernel}`", *(f"{int(cell):,}" for cell in cells))
    small = 99 * 2**10
    (only,) = (one["kernel"] for one in sizes if int(one["sm_89"]) > small)
    yield f"99, or {small:,} bytes"
    yield f"all but `{only}` fit on a card of 99 KiB"
