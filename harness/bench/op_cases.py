"""The operations of kernels/ops.py with inputs in the shapes in which methods call them: one layer,
one sequence, `budget` chosen tokens of `tokens`.

The operations of the model around a method run on one token and on a prompt, in a model whose
hidden size is that of all query heads together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.bench.common.operations import parameters
from harness.bench.common.synthetic import LayerShape
from kernels.block import DecoderBlock, Head, Linear
from kernels.coded import Coded
from kernels.partial import BESIDE, Guess, NewPartial
from kernels.reference import Segment, pq_held
from kernels.sampled import Sample
from kernels.top_p import KeyCodes, quantised_keys
from methods.base.pieces import pieces
from methods.tiers.codec import Encoded, IntCodec

ROOM = 64  # rows that a store keeps free after the prompt
SINKS = 32
FIRST = 10  # tokens that LM-Infinite always reads
PAGE, CHUNK = 16, 8  # tokens: Quest's page, ShadowKV's chunk
CHANNELS = 16  # SparQ's
# of the prompt, tokens of a page, share of the channels: RocketKV's at 5 %
KEPT, BOUNDED, FACING = 0.4, 2, 0.5
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


@dataclass(frozen=True)
class Inputs:
    """Makes random inputs; as in a run, they are views of larger tensors."""

    shape: LayerShape
    tokens: int
    budget: int
    prefill: int  # tokens of a prompt: its attention grows with their square

    def __post_init__(self) -> None:
        least, parts = 2 * SINKS + 1, max(parts for parts, _ in CODES)
        if self.budget < least:
            raise ValueError(
                f"--budget {self.budget} leaves nothing beside sinks and recent tokens: give {least} or more."
            )
        if self.tokens < self.budget:
            raise ValueError(
                f"--tokens {self.tokens} is less than the --budget {self.budget} that is chosen of them."
            )
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
        k, v = (
            self.random(1, self.shape.kv_heads, self.tokens + ROOM, self.shape.head_dim)
            for _ in range(2)
        )
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
        k, v = self.kv
        parts = [codec.encode(k[:, :, part], v[:, :, part]) for part in pieces(whole, codec.block)]
        tokens, blocks = (
            tuple(map(_joined, zip(*kind, strict=True))) for kind in zip(*parts, strict=True)
        )
        return codec.codes(Encoded(tokens, blocks))

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


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts], 2)


def _case(op: str, what: str, /, flops: float = 0.0, **arguments: Any) -> OpCase:
    """Return a case of an operation. `arguments` have the names that its reference gives them."""
    return OpCase(op, what, parameters(op).bind(**arguments).args, flops)


def _attention(x: Inputs) -> Iterator[OpCase]:
    shape = x.shape
    chosen = f"{x.budget} of {x.tokens}"
    flops = 4.0 * shape.heads * shape.head_dim
    flops_chosen = flops * x.budget
    over: dict[str, Any] = {"q": x.q, "scale": x.scale}
    whole = [Segment(*x.kv)]
    yield _case("segment_attention", f"Full, {x.tokens}", flops * x.tokens, segments=whole, **over)
    what = f"per KV head, {chosen}"
    of_groups = over | {"segments": x.segments(shape.kv_heads)}
    yield _case("segment_attention", what, flops_chosen, **of_groups)
    what_own, own = f"per query head, {chosen}", x.segments(shape.heads)
    yield _case("segment_attention", what_own, flops_chosen, segments=own, **over)
    yield _case("segment_attention_with_lse", what, flops_chosen, **of_groups)
    queries_and_means = x.random(1, shape.kv_heads, 2 * x.group, shape.head_dim)
    lses = x.random(1, shape.kv_heads, x.group, 1, dtype=torch.float32) + 9
    sums = x.random(1, shape.kv_heads, 1, shape.head_dim, dtype=torch.float32)
    yield _case(
        "attention_with_mean",
        f"SparQ, {chosen}",
        2 * flops_chosen,
        q=queries_and_means,
        segments=x.segments(shape.kv_heads),
        scale=x.scale,
        chosen=1,
        lses=lses,
        sink_logits=None,
        value_sum=sums,
        v=sums.to(shape.dtype),
        count=x.count,
    )
    for bits in BITS:
        what, codes = f"KIVI of {bits} bits, {x.tokens}", [x.coded(bits)]
        yield _case("coded_attention", what, flops * x.tokens, segments=codes, **over)
    outs = [x.random(*x.q.shape) for _ in range(2)]
    lses_of_outs = [torch.randn_like(x.q[..., 0, 0].float()) for _ in range(2)]
    yield _case("merge_attention", "two parts", outs=outs, lses=lses_of_outs)
    yield _case("merge_attention_with_lse", "two parts", outs=outs, lses=lses_of_outs)


def _scores(x: Inputs) -> Iterator[OpCase]:
    groups, dim = x.shape.kv_heads, x.shape.head_dim
    landmarks = x.random(1, groups, x.tokens // CHUNK, dim)
    yield _case(
        "row_scores", f"ShadowKV, {x.tokens // CHUNK} of {dim}", q=x.grouped(dim), x=landmarks
    )
    yield _case(
        "row_scores_with_lse",
        f"vAttention, {x.tokens} of {dim}",
        q=x.grouped(dim),
        x=x.kv[0],
        scale=x.scale,
    )
    by_page = x.random(1, groups, x.tokens // PAGE, 2 * dim)
    yield _case(
        "page_scores", f"Quest, {x.tokens // PAGE} of {2 * dim}", q=x.grouped(dim), bounds=by_page
    )
    # InfiniGen's columns of queries, and of keys too
    for partial in (max(1, int(PARTIAL * dim)), max(1, int(2 * PARTIAL * dim))):
        index = x.random(1, groups, partial, (x.tokens + ROOM) // BESIDE * BESIDE).mT
        yield _case(
            "live_scores",
            f"InfiniGen, {x.tokens} of {partial}",
            q=x.grouped(partial),
            x=index,
            live=x.count,
        )
    basis = x.random(1, groups, dim, partial)
    new = NewPartial(x.random(1, groups, 1, dim), basis, index, x.count)
    guess = Guess(x.q, *x.shape.rope(x.count), basis, x.scale)
    yield _case("partial_products", f"InfiniGen, {x.shape.heads} of {dim}", guess=guess, new=new)
    yield _case(
        "live_scores",
        f"Oracle, {x.tokens} of {dim}",
        q=x.grouped(dim),
        x=x.kv[0],
        live=x.count,
    )
    yield _case(
        "add_received",
        f"H2O, {x.budget}",
        sums=x.random(1, groups, x.budget, dtype=torch.float32),
        q=x.q,
        k=x.kv[0][:, :, : x.budget],
        lse=x.random(1, x.shape.heads, dtype=torch.float32),
        scale=x.scale,
        live=x.count.clamp(max=x.budget),
    )
    places = torch.arange(x.budget, device=x.q.device).unsqueeze(0)
    yield _case(
        "pick_overwritten",
        f"TOVA, {x.budget}",
        logits=x.random(1, groups, x.shape.heads // groups, x.budget, dtype=torch.float32),
        lse=x.random(1, x.shape.heads, dtype=torch.float32),
        scale=x.scale,
        places=places,
        row=places[:, 0].clone(),
        counts=places.new_zeros(1, 4),
    )
    yield _case(
        "pick_channels",
        f"SparQ, {CHANNELS} of {dim}",
        q=x.grouped(dim),
        r=CHANNELS,
        scale=x.scale,
        spread=True,
        facing=False,
    )
    yield _case(
        "channel_sums",
        f"SparQ, {x.tokens} of {CHANNELS}",
        q=x.grouped(CHANNELS),
        x=x.kv[0].transpose(2, 3).contiguous(),
        channels=x.rows(groups, dim, CHANNELS),
    )
    pages = round(KEPT * x.tokens / BOUNDED)
    facing = round(FACING * dim)
    yield _case(
        "channel_weights",
        f"RocketKV, {pages} of {facing}",
        q=x.grouped(facing),
        x=x.random(1, groups, 2 * dim, pages),
        channels=x.rows(groups, 2 * dim, facing),
        scale=x.scale,
        reduce="sum",
        times=BOUNDED,
    )
    yield _case(
        "row_weights",
        f"ShadowKV, {landmarks.shape[2]} of {dim}",
        q=x.grouped(dim),
        x=landmarks,
        scale=x.scale,
        reduce="largest",
    )
    yield _case("group_weights", f"{x.tokens}, sum", logits=x.logits, scale=x.scale, reduce="sum")
    yield _case(
        "group_weights", f"{x.tokens}, largest", logits=x.logits, scale=x.scale, reduce="largest"
    )
    yield _case(
        "group_margins",
        f"InfiniGen, {x.tokens}",
        logits=x.logits,
        tops=torch.stack([part.amax(-1) for part in x.logits.split(256, -1)], -1),
        candidates=x.tokens,
        reach=ALPHA,
        most=x.budget,
    )
    parts = (quantised_keys(x.kv[0][:, :, part]) for part in pieces(x.tokens))
    yield _case(
        "estimated_logits",
        f"mass, {x.budget} of {x.tokens}",
        q=x.grouped(dim),
        keys=KeyCodes(*map(_joined, zip(*parts, strict=True))),
        rows=x.rows(x.shape.heads, x.tokens, x.budget),
    )
    logits = x.random(1, x.shape.heads, 1, x.budget, dtype=torch.float32)
    tops = logits.amax(-1, keepdim=True)
    yield _case(
        "carrying", f"mass, {x.budget}", logits=logits, tops=tops, always=tops, mass=0.9, scale=1.0
    )
    log_weights, counts = logits[:, :, 0], torch.zeros_like(logits[:, :, 0, 0], dtype=torch.int64)
    yield _case("count_read", f"mass, {x.budget}", log_weights=log_weights, counts=counts)
    segments = [Segment(*x.kv)]
    yield _case(
        "log_sum_exps", f"mass, {x.tokens}", q=x.grouped(dim), segments=segments, scale=x.scale
    )
    for size in (1, CHUNK, PAGE):
        best, among = x.budget // size, x.tokens // size
        yield _case(
            "top_k",
            f"{best} of {among}",
            scores=x.logits[:, :, 0, :among].contiguous(),
            count=best,
        )


def _sampled(x: Inputs) -> Iterator[OpCase]:
    what, heavy = f"vAttention, {x.budget} of {x.tokens}", x.budget // 2
    rows = x.rows(x.shape.heads, x.tokens, x.budget)
    yield _case("first_places", what, rows=rows)
    yield _case(
        "uniform_draws",
        what,
        position=x.count,
        key=1,
        groups=x.shape.heads,
        count=x.budget,
        among=x.tokens,
    )
    logits = x.random(1, x.shape.heads, 1, x.tokens, dtype=torch.float32)
    lse = logits.logsumexp(-1)
    yield _case(
        "sampled_weights",
        what,
        logits=logits,
        lse=lse,
        always=lse - 3,
        rows=rows,
        heavy=heavy,
        sample=Sample(x.tokens, (x.budget - heavy) // 2, 0.05, 2.0, 1.0),
    )


def _quantised(x: Inputs) -> Iterator[OpCase]:
    groups, dim, device = x.shape.kv_heads, x.shape.head_dim, x.shape.device
    for parts, bits in CODES:
        centroids = x.random(1, groups, parts, 2**bits, dim // parts)
        codes = torch.randint(2**bits, (1, groups, x.tokens, parts), device=device).to(torch.uint8)
        what = f"PQCache m={parts} b={bits}, {x.tokens}"
        weighed: dict[str, Any] = {
            "q": x.q,
            "centroids": centroids,
            "codes": codes,
            "scale": x.scale,
        }
        yield _case("pq_weights", what, **weighed)
        if parts == 2:
            held = pq_held(codes, 2**bits)
            count = min(x.budget, x.tokens)
            yield _case("pq_best", f"{what}, {count} chosen", **weighed, held=held, count=count)
        points = x.kv[0].unflatten(3, (parts, -1)).transpose(2, 3)
        initial = torch.randperm(x.tokens, device=device)[: 2**bits]
        yield _case(
            "kmeans",
            f"{what}, {ROUNDS} rounds",
            2.0 * (ROUNDS + 1) * points.numel() * len(initial),
            x=points,
            initial=initial,
            iterations=ROUNDS,
            tolerance=0.0,
        )


def _alike(x: Inputs) -> Iterator[OpCase]:
    keys = x.kv[0][:, :, : x.budget]
    flops = 2.0 * keys.numel() * keys.shape[2]
    yield _case("last_alike", f"R-KV, {keys.shape[2]}", flops, keys=keys, threshold=0.5)


def _rows(x: Inputs) -> Iterator[OpCase]:
    groups, dim = x.shape.kv_heads, x.shape.head_dim
    rows = x.rows(groups, x.tokens, x.budget)
    chosen = f"{x.budget} of {x.tokens}"
    keys = x.kv[0]
    yield _case("gather_rows", chosen, x=keys, rows=rows)
    pages = x.rows(x.shape.heads, x.tokens // PAGE, x.budget // PAGE)
    what = f"Quest, {x.budget // PAGE} pages"
    yield _case("token_rows", what, chunks=pages, size=PAGE, last=x.tokens // PAGE)
    slots = torch.where(rows % 4 == 0, -1, rows % x.budget)  # three of four are held
    yield _case(
        "gather_tiers",
        chosen,
        far=keys,
        rows=rows,
        held=keys[:, :, : x.budget],
        slots=slots,
    )
    yield _case(
        "put_rows",
        chosen,
        x=torch.empty_like(keys),
        rows=rows,
        values=x.random(*rows.shape, dim),
    )
    k, v = (side[:, :, : x.tokens // GROUP * GROUP] for side in x.kv)
    bits = BITS[1]
    yield _case(
        "encode_codes", f"int{bits}, {x.tokens}", k=k, v=v, bits=bits, value_bits=bits, group=GROUP
    )
    coded = x.coded(bits)
    at = rows % coded.k.shape[2]
    blocks = at // coded.block
    yield _case(
        "decode_rows",
        f"int{bits}, {chosen}",
        coded=coded,
        rows=at,
        blocks=blocks,
        dtype=x.shape.dtype,
    )
    rank = max(1, round(RANK * groups * dim))
    cos, sin = x.shape.rope(torch.arange(x.tokens))
    chunks = x.rows(groups, x.tokens // CHUNK, max(1, x.budget // CHUNK))
    yield _case(
        "rebuild_keys",
        f"ShadowKV rank {rank}, {chosen}",
        2.0 * chunks.numel() * CHUNK * rank * dim,
        u=x.random(1, x.tokens, rank),
        basis=x.random(1, groups, rank, dim),
        chunks=chunks,
        size=CHUNK,
        cos=cos[0],
        sin=sin[0],
    )


def _prefill(x: Inputs) -> Iterator[OpCase]:
    shape = x.shape
    last = x.random(1, shape.heads, WINDOW, shape.head_dim)
    flops = 2.0 * shape.heads * shape.head_dim
    what, products = f"SnapKV, {WINDOW} of {x.tokens}", flops * WINDOW * x.tokens
    yield _case("column_sums", what, products, q=last, k=x.kv[0], scale=x.scale)
    # as a model hands it over
    q = x.random(1, x.prefill, shape.heads, shape.head_dim).transpose(1, 2)
    k, v = (x.random(1, shape.kv_heads, x.prefill, shape.head_dim) for _ in range(2))
    prompt: dict[str, Any] = {"q": q, "k": k, "scale": x.scale}
    whole = flops * x.prefill * (x.prefill + 1)  # two products over half of a square
    yield _case("prefill_attention", f"{x.prefill}", whole, v=v, **prompt)
    yield _case("prefill_attention_with_column_sums", f"H2O, {x.prefill}", whole, v=v, **prompt)
    window = max(1, x.prefill // 4)
    near = 2 * flops * (x.prefill * window - window * (window - 1) / 2)
    what = f"LM-Infinite, {window} of {x.prefill}"
    windowed = prompt | {"first": 0, "window": window}
    yield _case("windowed_attention", what, near, v=v, **windowed)
    lse = torch.randn_like(q[..., 0].float()) + 12  # above every logit's likely sum
    yield _case("windowed_sums", what, near / 2, lse=lse, **windowed)


def _model(x: Inputs) -> Iterator[OpCase]:
    dim = x.shape.head_dim
    channels = x.shape.heads * dim
    block = _block(x, channels)
    token = x.random(1, 1, channels)
    what = f"a token of {channels}"
    cos, sin = x.shape.rope(torch.tensor([x.tokens]))
    yield _case("attention_inputs", what, x=token, block=block, cos=cos, sin=sin)
    last = torch.tensor([x.tokens - 1], device=x.shape.device)
    keys, values = (torch.empty_like(side) for side in x.kv)
    yield _case(
        "attention_inputs_stored",
        what,
        x=token,
        added=x.random(1, 1, channels),
        block=block,
        cos=cos,
        sin=sin,
        keys=keys,
        values=values,
        row=last,
    )
    yield _case("rotate", what, x=x.q, cos=cos, sin=sin)
    all_cos, all_sin = x.shape.rope(torch.arange(x.tokens))
    first = x.kv[0][:, :, :FIRST].float()
    what_first = f"LM-Infinite, {FIRST} keys"
    yield _case(
        "rotate_to",
        what_first,
        x=first,
        cos=all_cos,
        sin=all_sin,
        at=last,
        dtype=x.shape.dtype,
    )
    yield _case("block_output", what, x=token, attended=x.q, block=block)
    yield _case("block_output_apart", what, x=token, attended=x.q, block=block)
    head = Head(1e-5, block.norm, Linear(x.random(WORDS, channels)))
    yield _case("token_logits", f"{what}, {WORDS} words", x=token, head=head)
    yield _case("likeliest_tokens", f"of {WORDS} words", logits=x.random(1, WORDS), out=None)

    def flops(*linears: Linear) -> float:
        return 2.0 * x.prefill * sum(linear.weight.numel() for linear in linears)

    prompt = x.random(1, x.prefill, channels)
    what = f"a prompt of {x.prefill}, {channels} and {len(block.gate.weight)} channels"
    cos, sin = x.shape.rope(torch.arange(x.prefill))
    inputs = flops(block.q, block.k, block.v)
    yield _case("attention_inputs", what, inputs, x=prompt, block=block, cos=cos, sin=sin)
    attended = x.random(1, x.prefill, x.shape.heads, dim).transpose(1, 2)
    products = flops(block.o, block.gate, block.up, block.down)
    yield _case("block_output", what, products, x=prompt, attended=attended, block=block)


def _block(x: Inputs, channels: int) -> DecoderBlock:
    """Return the weights of a decoder layer with so many channels."""
    groups = x.shape.kv_heads * x.shape.head_dim
    inner = round(INNER * channels)

    def linear(rows: int, columns: int = channels) -> Linear:
        return Linear(x.random(rows, columns))

    return DecoderBlock(
        head_dim=x.shape.head_dim,
        eps=1e-5,
        norm=x.random(channels),
        q=linear(channels),
        k=linear(groups),
        v=linear(groups),
        q_norm=None,
        k_norm=None,
        o=linear(channels),
        mlp_norm=x.random(channels),
        gate=linear(inner),
        up=linear(inner),
        down=linear(channels, inner),
    )


GROUPS = (_attention, _scores, _sampled, _quantised, _alike, _rows, _prefill, _model)


def cases(inputs: Inputs) -> Iterator[OpCase]:
    for group in GROUPS:
        yield from group(inputs)
