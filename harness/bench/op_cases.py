"""The operations of kernels/ops.py with inputs in the shapes in which methods call them: one layer,
one sequence, `budget` chosen tokens of `tokens`.

The operations of the model around a method run on one token and on a prompt, in a model whose
hidden size is that of all query heads together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.bench.common.synthetic import LayerShape
from kernels.block import DecoderBlock, Head, Linear
from kernels.coded import Coded
from kernels.partial import BESIDE, Guess, NewPartial
from kernels.reference import Segment, pq_held
from methods.base.pieces import pieces
from methods.tiers.codec import Encoded, IntCodec

ROOM = 64  # rows that a store keeps free after the prompt
SINKS = 32
FIRST = 10  # tokens that LM-Infinite always reads
PAGE, CHUNK = 16, 8  # tokens: Quest's page, ShadowKV's chunk
CHANNELS = 16  # SparQ's
KEPT, BOUNDED, FACING = 0.4, 2, 0.5  # of the prompt, tokens of a page, share of the channels: RocketKV's at 5 %
PARTIAL = 0.2  # share of the channels: InfiniGen's
ALPHA = 5.0  # InfiniGen's
RANK = 0.15625  # share of all KV heads' channels: ShadowKV's
WINDOW = 32  # queries: SnapKV's
CODES = ((2, 6), (4, 8))  # sub-vectors and bits: PQCache's default, and whole bytes
BITS = (8, 4, 2)  # of codes that attention reads
GROUP = 32  # tokens of a key's channel, and channels of a value, that share a range
ROUNDS = 10  # of k-means
INNER = 3.5  # channels of the MLP, of the model's: Llama 3's
WORDS = 32768  # of the vocabulary


class OpCase(NamedTuple):
    op: str
    what: str  # the method it is for, and its size
    args: tuple[Any, ...]
    flops: float = 0.0  # where they may be the limit
    dtype: torch.dtype | None = None  # of those; None: the shape's


@dataclass(frozen=True)
class Inputs:
    """Makes random inputs; as in a run, they are views of larger tensors."""

    shape: LayerShape
    tokens: int
    budget: int
    prefill: int  # tokens of a prompt: its attention grows with their square
    inner: int | None = None  # channels of the MLP; None: as many times the model's as in Llama 3

    def __post_init__(self) -> None:
        least, parts = 2 * SINKS + 1, max(parts for parts, _ in CODES)
        if self.budget < least:
            raise ValueError(
                f"--budget {self.budget} leaves nothing beside sinks and recent tokens: give {least} or more."
            )
        if self.tokens < self.budget:
            raise ValueError(f"--tokens {self.tokens} is less than the --budget {self.budget} that is chosen of them.")
        if self.shape.head_dim < CHANNELS or self.shape.head_dim % parts:
            raise ValueError(
                f"--head-dim {self.shape.head_dim} does not suit SparQ's {CHANNELS} channels and PQCache's {parts} "
                f"parts: give a multiple of {parts} from {CHANNELS} on."
            )

    def random(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, device=self.shape.device).to(dtype or self.shape.dtype)

    def rows(self, heads: int, among: int, count: int) -> Tensor:
        """Return `count` random token indices below `among` for each head [1 heads count], each
        index once."""
        scores = torch.rand(1, heads, among, device=self.shape.device)
        return scores.topk(min(count, among), sorted=False).indices

    @property
    def group(self) -> int:
        return self.shape.heads // self.shape.kv_heads

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    @property
    def count(self) -> Tensor:
        """The number of tokens, on the device."""
        return torch.tensor([self.tokens], device=self.shape.device)

    @cached_property
    def q(self) -> Tensor:
        return self.random(1, self.shape.heads, 1, self.shape.head_dim)

    @cached_property
    def kv(self) -> tuple[Tensor, Tensor]:
        """The keys and values of the prompt, each [1 G S D]."""
        k, v = (self.random(1, self.shape.kv_heads, self.tokens + ROOM, self.shape.head_dim) for _ in range(2))
        return k[:, :, : self.tokens], v[:, :, : self.tokens]

    @cached_property
    def logits(self) -> Tensor:
        return self.random(1, self.shape.kv_heads, self.group, self.tokens, dtype=torch.float32)

    def grouped(self, width: int) -> Tensor:
        return self.random(1, self.shape.kv_heads, self.group, width)

    def coded(self, bits: int) -> Coded:
        """Return keys and values quantised to `bits` bits; tokens after the last whole block are
        left out."""
        codec = IntCodec(bits=bits, group=GROUP)
        whole = self.tokens // codec.block * codec.block
        parts = [codec.encode(*(x[:, :, part] for x in self.kv)) for part in pieces(whole, codec.block)]
        tokens, blocks = ([torch.cat(same, 2) for same in zip(*kind, strict=True)] for kind in zip(*parts, strict=True))
        return codec.codes(Encoded(tuple(tokens), tuple(blocks)))

    def segments(self, heads: int) -> list[Segment]:
        """Return `budget` tokens as three segments: the first tokens (sinks), tokens chosen among
        the middle ones per head, and the most recent ones."""
        (k, v), recent = self.kv, self.budget // 2
        middle, tail = slice(SINKS, self.tokens - recent), slice(self.tokens - recent, None)
        rows = self.rows(heads, self.tokens - recent - SINKS, self.budget - recent - SINKS)
        return [
            Segment(k[:, :, :SINKS], v[:, :, :SINKS]),
            Segment(k[:, :, middle], v[:, :, middle], rows),
            Segment(k[:, :, tail], v[:, :, tail]),
        ]


def _attention(x: Inputs) -> Iterator[OpCase]:
    shape, chosen = x.shape, f"{x.budget} of {x.tokens}"
    flops = 4.0 * shape.heads * shape.head_dim
    yield OpCase("segment_attention", f"Full, {x.tokens}", (x.q, [Segment(*x.kv)], x.scale), flops * x.tokens)
    per_kv_head = (x.q, x.segments(shape.kv_heads), x.scale)
    yield OpCase("segment_attention", f"per KV head, {chosen}", per_kv_head, flops * x.budget)
    per_head = (x.q, x.segments(shape.heads), x.scale)
    yield OpCase("segment_attention", f"per query head, {chosen}", per_head, flops * x.budget)
    yield OpCase("segment_attention_with_lse", f"per KV head, {chosen}", per_kv_head, flops * x.budget)
    both = x.random(1, shape.kv_heads, 2 * x.group, shape.head_dim)
    lses = x.random(1, shape.kv_heads, x.group, 1, dtype=torch.float32) + 9
    sums = x.random(1, shape.kv_heads, 1, shape.head_dim, dtype=torch.float32)
    args = both, x.segments(shape.kv_heads), x.scale, 1, lses, None, sums, sums.to(shape.dtype), x.count
    yield OpCase("attention_with_mean", f"SparQ, {chosen}", args, 2 * flops * x.budget)
    for bits in BITS:
        what = f"KIVI of {bits} bits, {x.tokens}"
        yield OpCase("coded_attention", what, (x.q, [x.coded(bits)], x.scale), flops * x.tokens)
    parts = [x.random(*x.q.shape) for _ in range(2)], [torch.randn_like(x.q[..., 0, 0].float()) for _ in range(2)]
    yield from (OpCase(name, "two parts", parts) for name in ("merge_attention", "merge_attention_with_lse"))


def _scores(x: Inputs) -> Iterator[OpCase]:
    groups, dim = x.shape.kv_heads, x.shape.head_dim
    landmarks = x.random(1, groups, x.tokens // CHUNK, dim)
    yield OpCase("row_scores", f"ShadowKV, {x.tokens // CHUNK} of {dim}", (x.grouped(dim), landmarks))
    by_page = x.random(1, groups, x.tokens // PAGE, 2 * dim)
    yield OpCase("page_scores", f"Quest, {x.tokens // PAGE} of {2 * dim}", (x.grouped(dim), by_page))
    live, heads = x.count, groups * x.group
    for partial in (max(1, int(PARTIAL * dim)), max(1, int(2 * PARTIAL * dim))):  # columns of queries, and of keys too
        index = x.random(1, groups, partial, (x.tokens + ROOM) // BESIDE * BESIDE).mT
        yield OpCase("live_scores", f"InfiniGen, {x.tokens} of {partial}", (x.grouped(partial), index, live))
    basis, turn = x.random(1, groups, dim, partial), x.shape.rope(live)
    new = NewPartial(x.random(1, groups, 1, dim), basis, index, live)
    yield OpCase("partial_products", f"InfiniGen, {heads} of {dim}", (Guess(x.q, *turn, basis, x.scale), new))
    yield OpCase("live_scores", f"Oracle, {x.tokens} of {dim}", (x.grouped(dim), x.kv[0], live))
    sums, lse = x.random(1, groups, x.budget, dtype=torch.float32), x.random(1, heads, dtype=torch.float32)
    kept = x.kv[0][:, :, : x.budget]
    yield OpCase("add_received", f"H2O, {x.budget}", (sums, x.q, kept, lse, x.scale, live.clamp(max=x.budget)))
    yield OpCase("pick_channels", f"SparQ, {CHANNELS} of {dim}", (x.grouped(dim), CHANNELS, x.scale, True, False))
    by_channel = x.kv[0].transpose(2, 3).contiguous()
    picked = x.grouped(CHANNELS), by_channel, x.rows(groups, dim, CHANNELS)
    yield OpCase("channel_sums", f"SparQ, {x.tokens} of {CHANNELS}", picked)
    pages, facing = round(KEPT * x.tokens / BOUNDED), round(FACING * dim)
    bounds = x.grouped(facing), x.random(1, groups, 2 * dim, pages), x.rows(groups, 2 * dim, facing)
    yield OpCase("channel_weights", f"RocketKV, {pages} of {facing}", (*bounds, x.scale, "sum", BOUNDED))
    yield OpCase(
        "row_weights", f"ShadowKV, {landmarks.shape[2]} of {dim}", (x.grouped(dim), landmarks, x.scale, "largest")
    )
    yield OpCase("group_weights", f"{x.tokens}, sum", (x.logits, x.scale, "sum"))
    yield OpCase("group_weights", f"{x.tokens}, largest", (x.logits, x.scale, "largest"))
    tops = torch.stack([part.amax(-1) for part in x.logits.split(256, -1)], -1)
    yield OpCase("group_margins", f"InfiniGen, {x.tokens}", (x.logits, tops, x.tokens, ALPHA, x.budget))
    for size in (1, CHUNK, PAGE):
        best, among = x.budget // size, x.tokens // size
        yield OpCase("top_k", f"{best} of {among}", (x.logits[:, :, 0, :among].contiguous(), best))


def _quantised(x: Inputs) -> Iterator[OpCase]:
    groups, dim, device = x.shape.kv_heads, x.shape.head_dim, x.shape.device
    for parts, bits in CODES:
        centroids = x.random(1, groups, parts, 2**bits, dim // parts)
        codes = torch.randint(2**bits, (1, groups, x.tokens, parts), device=device).to(torch.uint8)
        what = f"PQCache m={parts} b={bits}, {x.tokens}"
        yield OpCase("pq_weights", what, (x.q, centroids, codes, x.scale))
        if parts == 2:
            held, chosen = pq_held(codes, 2**bits), min(x.budget, x.tokens)
            yield OpCase("pq_best", f"{what}, {chosen} chosen", (x.q, centroids, codes, held, x.scale, chosen))
        points = x.kv[0].unflatten(3, (parts, -1)).transpose(2, 3)
        initial = torch.randperm(x.tokens, device=device)[: 2**bits]
        flops = 2.0 * (ROUNDS + 1) * points.numel() * len(initial)
        yield OpCase("kmeans", f"{what}, {ROUNDS} rounds", (points, initial, ROUNDS, 0.0), flops)


def _rows(x: Inputs) -> Iterator[OpCase]:
    groups, dim = x.shape.kv_heads, x.shape.head_dim
    rows, chosen = x.rows(groups, x.tokens, x.budget), f"{x.budget} of {x.tokens}"
    yield OpCase("gather_rows", chosen, (x.kv[0], rows))
    pages = x.rows(x.shape.heads, x.tokens // PAGE, x.budget // PAGE)
    yield OpCase("token_rows", f"Quest, {x.budget // PAGE} pages", (pages, PAGE, x.tokens // PAGE))
    slots = torch.where(rows % 4 == 0, -1, rows % x.budget)  # three of four are held
    yield OpCase("gather_tiers", chosen, (x.kv[0], rows, x.kv[0][:, :, : x.budget], slots))
    yield OpCase("put_rows", chosen, (torch.empty_like(x.kv[0]), rows, x.random(*rows.shape, dim)))
    whole = x.tokens // GROUP * GROUP
    sealed = (*(side[:, :, :whole] for side in x.kv), BITS[1], GROUP)
    yield OpCase("encode_codes", f"int{BITS[1]}, {x.tokens}", sealed)
    codes = x.coded(BITS[1])
    at = rows % codes.k.shape[2]
    yield OpCase("decode_rows", f"int{BITS[1]}, {chosen}", (codes, at, at // codes.block, x.shape.dtype))
    rank = max(1, round(RANK * groups * dim))
    cos, sin = x.shape.rope(torch.arange(x.tokens))
    chunks = x.rows(groups, x.tokens // CHUNK, max(1, x.budget // CHUNK))
    args = (x.random(1, x.tokens, rank), x.random(1, groups, rank, dim), chunks, CHUNK, cos[0], sin[0])
    yield OpCase("rebuild_keys", f"ShadowKV rank {rank}, {chosen}", args, 2.0 * chunks.numel() * CHUNK * rank * dim)


def _prefill(x: Inputs) -> Iterator[OpCase]:
    shape = x.shape
    last = x.random(1, shape.heads, WINDOW, shape.head_dim)
    flops = 2.0 * shape.heads * shape.head_dim
    yield OpCase("column_sums", f"SnapKV, {WINDOW} of {x.tokens}", (last, x.kv[0], x.scale), flops * WINDOW * x.tokens)
    q = x.random(1, x.prefill, shape.heads, shape.head_dim).transpose(1, 2)  # as a model hands it over
    k, v = (x.random(1, shape.kv_heads, x.prefill, shape.head_dim) for _ in range(2))
    whole = flops * x.prefill * (x.prefill + 1)  # two products over half of a square
    yield OpCase("prefill_attention", f"{x.prefill}", (q, k, v, x.scale), whole)
    yield OpCase("prefill_attention_with_column_sums", f"H2O, {x.prefill}", (q, k, v, x.scale), whole)
    window = max(1, x.prefill // 4)
    near = 2 * flops * (x.prefill * window - window * (window - 1) / 2)
    what = f"LM-Infinite, {window} of {x.prefill}"
    yield OpCase("windowed_attention", what, (q, k, v, x.scale, 0, window), near)
    lse = torch.randn_like(q[..., 0].float()) + 12  # above every logit's likely sum
    yield OpCase("windowed_sums", what, (q, k, lse, x.scale, 0, window), near / 2)


def _model(x: Inputs) -> Iterator[OpCase]:
    channels, groups, dim = x.shape.heads * x.shape.head_dim, x.shape.kv_heads * x.shape.head_dim, x.shape.head_dim
    inner = x.inner or round(INNER * channels)

    def linear(rows: int, columns: int) -> Linear:
        return Linear(x.random(rows, columns))

    block = DecoderBlock(
        dim, 1e-5, x.random(channels), linear(channels, channels), linear(groups, channels), linear(groups, channels),
        None, None, linear(channels, channels), x.random(channels), linear(inner, channels), linear(inner, channels),
        linear(channels, inner),
    )  # fmt: skip
    token, what = x.random(1, 1, channels), f"a token of {channels}"
    angles = x.shape.rope(torch.tensor([x.tokens]))
    yield OpCase("attention_inputs", what, (token, block, *angles))
    row = torch.tensor([x.tokens - 1], device=x.shape.device)
    store = (*(torch.empty_like(side) for side in x.kv), row)
    yield OpCase("attention_inputs_stored", what, (token, x.random(1, 1, channels), block, *angles, *store))
    yield OpCase("rotate", what, (x.q, *angles))
    tables, place = x.shape.rope(torch.arange(x.tokens)), torch.tensor([x.tokens - 1], device=x.shape.device)
    first = x.kv[0][:, :, :FIRST].float()
    yield OpCase("rotate_to", f"LM-Infinite, {FIRST} keys", (first, *tables, place, x.shape.dtype))
    yield OpCase("block_output", what, (token, x.q, block))
    yield OpCase("block_output_apart", what, (token, x.q, block))
    yield OpCase("token_logits", f"{what}, {WORDS} words", (token, Head(1e-5, block.norm, linear(WORDS, channels))))
    yield OpCase("likeliest_tokens", f"of {WORDS} words", (x.random(1, WORDS), None))
    yield from _prompt(x, block, x.random(1, x.prefill, channels))


def _prompt(x: Inputs, block: DecoderBlock, prompt: Tensor) -> Iterator[OpCase]:
    def flops(*linears: Linear) -> float:
        return 2.0 * x.prefill * sum(linear.weight.numel() for linear in linears)

    what = f"a prompt of {x.prefill}, {prompt.shape[2]} and {len(block.gate.weight)} channels"
    angles = x.shape.rope(torch.arange(x.prefill))
    yield OpCase("attention_inputs", what, (prompt, block, *angles), flops(block.q, block.k, block.v))
    attended = x.random(1, x.prefill, x.shape.heads, x.shape.head_dim).transpose(1, 2)
    products = flops(block.o, block.gate, block.up, block.down)
    yield OpCase("block_output", what, (prompt, attended, block), products)


GROUPS = (_attention, _scores, _quantised, _rows, _prefill, _model)


def cases(inputs: Inputs) -> Iterator[OpCase]:
    for group in GROUPS:
        yield from group(inputs)
