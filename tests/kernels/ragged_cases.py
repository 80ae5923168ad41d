"""Inputs of operations that take several sequences of different sizes, one of them of a single token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged
from kernels.reference import Segment, pq_held
from kernels.top_p import KeyCodes, quantised_keys
from tests.kernels import coded_cases
from tests.kernels.op_cases import OpCase, draw, pick, picky, random

SIZES = (1,), (90, 1, 33)
DIM = 64


def attention() -> Iterator[OpCase]:
    """Sinks, chosen rows, and all tokens so far with room for more of them."""
    for sizes in SIZES:
        for groups, share in ((2, 3), (1, 4)):
            k, v = (_stored(seed, sizes, groups) for seed in (1, 2))
            rows = Ragged([pick(seed, 1, groups, size, (size + 2) // 3) for seed, size in enumerate(sizes)])
            first = PerSequence([min(size, 4) for size in sizes])
            sinks = segment(k.slice(0, first), v.slice(0, first))
            segments = [sinks, segment(k, v, rows), segment(k, v, live=torch.tensor(sizes))]
            q = 2 * random(3, len(sizes), groups * share, 1, DIM)
            for op in ("segment_attention", "segment_attention_with_lse"):
                yield OpCase(op, f"{len(sizes)}-of-each-g{share}", (q, segments, 0.2))
            added = random(4, len(sizes), groups, max(sizes))
            some = segments[1]._replace(log_weights=added.masked_fill(added > 0.5, float("-inf")))
            late = segments[2]._replace(log_weights=random(5, len(sizes), groups, max(sizes) + 38))
            yield OpCase(op, f"{len(sizes)}-of-each-g{share}-weighted", (q, [sinks, some, late], 0.2))
    per_head = segment(k, v, pick(4, 3, 4, 1, 1), torch.tensor([1]))
    yield OpCase("segment_attention", "rows-of-one-number", (q, [per_head], 0.2))


def attention_with_mean() -> Iterator[OpCase]:
    """Sequences that have different numbers of pieces of each segment."""
    sizes = 300, 5, 140
    k, v = (_stored(seed, sizes, 2) for seed in (1, 2))
    rows = Ragged([pick(seed, 1, 2, size, (size + 1) // 2) for seed, size in enumerate(sizes)])
    first = PerSequence([size // 4 for size in sizes])
    segments = [
        segment(k.slice(0, first), v.slice(0, first)),
        segment(k, v, rows),
        segment(k, v, None, first.on(torch.device("cpu"))),
    ]
    q, means = random(3, 3, 2, 6, DIM), (9 * random(4, 3, 2, 1, DIM), random(5, 3, 2, 1, DIM))
    args = q, segments, 0.2, 1, 5 + random(6, 3, 2, 3, 2), random(7, 6), *means, torch.tensor(sizes)
    yield OpCase("attention_with_mean", "3-of-each", args)


def segment(k: Ragged, v: Ragged, rows: Ragged | Tensor | None = None, live: Tensor | None = None) -> Segment:
    return Segment(cast(Tensor, k), cast(Tensor, v), cast(Tensor, rows), live)


def pq_weights() -> Iterator[OpCase]:
    """The last sequences have more tokens than a block."""
    for sizes, clusters in ((SIZES[0], (5,)), (SIZES[1], (16, 4, 13)), ((300, 2), (8, 8))):
        each = list(enumerate(zip(sizes, clusters, strict=True)))
        codes = [torch.randint(count, (1, 2, size, 2), generator=draw(i)).to(torch.uint8) for i, (size, count) in each]
        centroids = Ragged([random(i, 1, 2, 2, count, DIM // 2) for i, (_, count) in each], 3)
        args = (random(3, len(sizes), 6, 1, DIM), centroids, Ragged(codes), 0.3)
        yield OpCase("pq_weights", f"{len(sizes)}-of-each", args)


def pq_best() -> Iterator[OpCase]:
    for case in pq_weights():
        q, centroids, codes, scale = case.args
        each = zip(codes.parts, centroids.parts, strict=True)
        held = Ragged([pq_held(own, part.shape[3]) for own, part in each])
        counts = [(size + 1) // 2 for size in codes.sizes]
        yield OpCase("pq_best", f"some-{case.name}", (q, centroids, codes, held, scale, PerSequence(counts)))
        yield OpCase("pq_best", f"one-{case.name}", (q, centroids, codes, held, scale, 1))


def top_k() -> Iterator[OpCase]:
    """The last sequences have a row that is cut into pieces, and others that are too short to fill them."""
    for sizes, counts in ((SIZES[0], (1,)), (SIZES[1], (30, 1, 33))):
        scores = Ragged([random(seed, 1, 2, size) for seed, size in enumerate(sizes)])
        yield OpCase("top_k", f"some-of-{len(sizes)}", (scores, PerSequence(counts)))
        yield OpCase("top_k", f"one-of-{len(sizes)}", (scores, 1))
        yield OpCase("top_k", f"some-of-{len(sizes)}-alike", (random(9, len(sizes), 2, 50), PerSequence(counts)))
    scores = Ragged([random(seed, 1, 1, size) for seed, size in enumerate((9001, 1, 40))])
    yield OpCase("top_k", "some-of-9001", (scores, PerSequence((20, 1, 40))))
    scores = Ragged([random(seed, 1, 2, size) for seed, size in enumerate((20_001, 1, 4100))])
    yield OpCase("top_k", "some-of-20001", (scores, PerSequence((700, 0, 4100))))


def estimated_logits() -> Iterator[OpCase]:
    """Rows of KV heads and of query heads; each sequence names as many."""
    for sizes in SIZES:
        each = [quantised_keys(random(seed, 1, 2, size, DIM)) for seed, size in enumerate(sizes)]
        keys = KeyCodes(*(cast(Tensor, Ragged(parts)) for parts in zip(*each, strict=True)))
        for lists in (2, 6):
            rows = random(7, len(sizes), lists, 40).abs().mul(1000).long() % torch.tensor(sizes).view(-1, 1, 1)
            q = random(5, len(sizes), 2, 3, DIM)
            yield OpCase("estimated_logits", f"{len(sizes)}-of-each-{lists}", (q, keys, rows))


def index() -> Iterator[OpCase]:
    """Scores of an index, of which the last sequence's has rows shorter than the others', and what is made of them."""
    for sizes, reach in ((SIZES[0], 1.0), (SIZES[1], 5.0)):
        count, shape = len(sizes), (len(sizes), 2, 3)
        keys = _stored(4, sizes, 2).slice(0, PerSequence(sizes))
        yield OpCase("row_scores", f"{count}-of-each", (random(5, *shape, DIM), keys))
        yield OpCase("row_weights", f"{count}-of-each", (random(5, *shape, DIM), keys, 0.3, "largest"))
        wider = random(5, *shape, 40)
        wider[-1, ..., 25:] = 0
        short = [40] * (count - 1) + [25]
        parts = [pad(random(i, 1, 2, *rows), (0, 0, 0, 1)) for i, rows in enumerate(zip(sizes, short, strict=True))]
        yield OpCase("row_scores", f"{count}-shorter", (wider, Ragged([part[:, :, :-1] for part in parts])))
        logits = Ragged([9 * random(seed, 1, 2, 3, size) for seed, size in enumerate(sizes)], 3)
        for reduce in ("sum", "largest"):
            yield OpCase("group_weights", f"{count}-of-each-{reduce}", (logits, 0.3, reduce))
        candidates = PerSequence([size - size // 5 for size in sizes])
        limits = PerSequence([size - size // 2 for size in sizes])
        several = 9 * random(6, *shape, max(sizes)), None, candidates, reach, limits
        yield OpCase("group_margins", f"some-of-{count}", several)
    long = Ragged([random(seed, 1, 1, 2, size) for seed, size in enumerate((4100, 3))], 3)
    yield OpCase("group_weights", "4100-and-3", (long, 0.3, "sum"))


def pages() -> Iterator[OpCase]:
    for sizes in SIZES:
        shape = len(sizes), 2, 3, DIM // 2
        yield OpCase(
            "page_scores",
            f"{len(sizes)}-of-each",
            (random(5, *shape), _stored(1, sizes, 2).slice(0, PerSequence(sizes))),
        )
        chunks = cast(Tensor, Ragged([pick(seed, 1, 2, 90, size) for seed, size in enumerate(sizes)]))
        yield OpCase("token_rows", f"{len(sizes)}-of-each", (chunks, 4))
        live = torch.tensor(sizes)
        wider = random(6, len(sizes), 2, 3, DIM)
        yield OpCase("live_scores", f"{len(sizes)}-of-each", (wider, _stored(5, sizes, 2), live))
        yield OpCase("row_weights", f"live-of-{len(sizes)}", (wider, _stored(5, sizes, 2), 0.3, "sum", live))
        wider[-1, ..., 25:] = 0
        parts = [random(seed, 1, 2, DIM, (size + 20) // 16 * 16).mT for seed, size in enumerate(sizes)]
        parts[-1] = parts[-1].mT[:, :, :25].mT
        yield OpCase("live_scores", f"{len(sizes)}-by-channel", (wider, Ragged(parts), live))
        tables = (Ragged([random(seed, 1, size, 32) for size in sizes], 1) for seed in (2, 3))
        args = wider, *tables, torch.tensor(sizes) - 1, torch.float32
        yield OpCase("rotate_to", f"{len(sizes)}-of-each", args)
        counts = PerSequence([min(size, 40) for size in sizes])
        q = picky(random(7, len(sizes), 2, 3, 40), torch.tensor(counts.values))
        yield OpCase("pick_channels", f"some-of-{len(sizes)}", (q, counts, 0.3, False, False))
        last = PerSequence([90 + size for size in sizes])
        for whole in (chunks, pick(3, len(sizes), 2, 90, 5)):
            name = f"{len(sizes)}-of-each" if whole is chunks else f"{len(sizes)}-alike"
            yield OpCase("token_rows", f"{name}-and-last", (whole, 4, last))


def channels() -> Iterator[OpCase]:
    for sizes in (*SIZES, (300, 5)):
        keys = [random(seed, 1, 2, 16, size + 3)[..., :size] for seed, size in enumerate(sizes)]
        args = random(7, len(sizes), 2, 3, 5), Ragged(keys, 3), pick(8, len(sizes), 2, 16, 5)
        yield OpCase("channel_sums", f"{len(sizes)}-of-each-{sizes[0]}", args)
        yield OpCase("channel_weights", f"{len(sizes)}-of-each-{sizes[0]}", (*args, 0.3, "sum", 3))


def chosen() -> Iterator[OpCase]:
    """Rows of one number for all, and of a number for each; and keys that are rebuilt from them."""
    for sizes in SIZES:
        x = Ragged([part[:, :, :size] for part, size in zip(_stored(4, sizes, 2).parts, sizes, strict=True)])
        some = Ragged([pick(seed, 1, 2, size, (size + 2) // 3) for seed, size in enumerate(sizes)])
        yield OpCase("gather_rows", f"{len(sizes)}-of-each", (x, some))
        yield OpCase("gather_rows", f"one-of-{len(sizes)}", (x, pick(1, len(sizes), 2, 1, 1)))
        yield OpCase("gather_tiers", f"{len(sizes)}-of-each", (x, some, None, None))
        held, slots = random(8, len(sizes), 2, 3, DIM), torch.tensor([[0, -1, 2, -1], [-1, -1, 1, 0]])
        again = pick(1, len(sizes), 2, 1, 1).expand(-1, -1, 4)
        yield OpCase("gather_tiers", f"held-of-{len(sizes)}", (x, again, held, slots.expand(len(sizes), -1, -1)))
        u = Ragged([random(seed, 1, size, 12)[..., :10] for seed, size in enumerate(sizes)], 1)
        basis = Ragged([random(seed, 1, 2, 10, DIM) for seed, _ in enumerate(sizes)])
        angles = [random(seed, 1, size + 4, DIM // 2).repeat(1, 1, 2) for seed, size in enumerate(sizes)]
        turns = (Ragged([way(part) for part in angles], 1) for way in (torch.cos, torch.sin))
        yield OpCase("rebuild_keys", f"{len(sizes)}-of-each", (u, basis, some, 1, *turns))


def codes() -> Iterator[OpCase]:
    """Codes of several blocks, of one, and of none; and rows of them: chosen ones, and all of a few blocks."""
    for bits, dim, block in ((4, DIM, 16), (8, 96, 32)):
        of_each = []
        for tokens in (320, 0, 32):
            written = coded_cases.coded(
                coded_cases.Shape(bits, 1, 6, 2, dim, tokens + block, block, dim // 32), spare=1
            )
            of_each.append(written.tokens(0, tokens))
        for name, members in (("3", of_each), ("1", of_each[:1])):
            joined = _joined(members)
            q = random(3, len(members), 6, 1, dim)
            yield OpCase("coded_attention", f"{name}-of-each-int{bits}", (q, [joined], 0.2))
        yield OpCase("coded_attention", f"none-int{bits}", (q, [of_each[1]], 0.2))
        joined = _joined([of_each[0], of_each[2]])
        rows = pick(5, 2, 2, 32, 20)
        yield OpCase("decode_rows", f"some-of-each-int{bits}", (joined, rows, rows // block, torch.float32))
        last = joined.tokens(joined.k.sizes - 32, joined.k.sizes)
        recent = random(6, 2, 2, 32, dim), torch.tensor([5, 20])
        yield OpCase("decode_rows", f"last-of-each-int{bits}", (last, None, None, torch.float32, recent))


def other_codes() -> Iterator[OpCase]:
    """Keys with channels in full, values of other bits, floats of 4 bits, and levels."""
    sizes, shape = (320, 32, 64), coded_cases.SHAPES[coded_cases.KEPT]._replace(value_bits=2)
    kept = [coded_cases.coded(shape._replace(tokens=tokens, block=32), spare=1) for tokens in sizes]
    floats4 = [coded_cases.floats4((1, 2, tokens, shape.dim), 32, spare=1) for tokens in sizes]
    of_levels = [coded_cases.levels((1, 2, tokens, shape.dim), 3, None, spare=1) for tokens in sizes]
    rows, q = pick(5, 3, 2, 32, 20), random(3, 3, shape.heads, 1, shape.dim)
    for name, members in (("kept", kept), ("nvfp4", floats4), ("tq3", of_levels)):
        joined = _joined(members)
        yield OpCase("coded_attention", f"3-of-each-{name}", (q, [joined], 0.2))
        yield OpCase("decode_rows", f"some-of-each-{name}", (joined, rows, rows // 32, torch.float32))


def _joined(members: Sequence[Any]) -> Any:
    every = members[0]._asdict().items()
    tensors = {name: Ragged([getattr(x, name) for x in members]) for name, x in every if isinstance(x, Tensor)}
    return members[0]._replace(**tensors)


def _stored(seed: int, sizes: Sequence[int], groups: int) -> Ragged:
    """[1 G S D] of each sequence; behind its tokens memory holds anything."""
    parts = [random(seed + 7 * place, 1, groups, size + 5, DIM) for place, size in enumerate(sizes)]
    for part, size in zip(parts, sizes, strict=True):
        part[:, :, size:] = float("nan")
    return Ragged(parts)


@cache
def ragged_cases() -> list[OpCase]:
    groups = (
        attention, attention_with_mean, pq_weights, pq_best, top_k, index, pages, channels, chosen, codes,
        other_codes,
        estimated_logits,
    )  # fmt: skip
    return [case for group in groups for case in group()]
