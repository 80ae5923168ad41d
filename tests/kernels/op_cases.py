"""Inputs for every operation, at what breaks kernels: odd lengths, empty selections, views of larger buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import reference
from kernels.coded import Codes, Rotated
from kernels.partial import Guess
from kernels.ragged import Ragged
from kernels.reference import Segment, pq_held
from kernels.sampled import Sample
from kernels.top_p import KeyCodes, quantised_keys
from kernels.windowed import windowed_attention
from tests.kernels import coded_cases
from tests.kernels.guarded import GUARD, copied

FRESH = int(os.environ.get("KV_HARNESS_TEST_SEED", "0"))  # other inputs of the same shapes


class OpCase(NamedTuple):
    op: str
    name: str
    args: tuple[Any, ...]  # fp32, on the CPU

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


SHAPES = {  # batch, heads, groups, head size, stored
    "mha": (1, 2, 2, 64, 37),
    "gqa3-dim64": (1, 9, 3, 64, 513),
    "gqa4-dim128": (2, 8, 2, 128, 259),
    "gqa8-dim96": (1, 8, 1, 96, 131),
    "gqa5-dim48": (2, 5, 1, 48, 65),
    "one": (1, 4, 2, 16, 1),
}


def converted(value: Any, dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """Return the same arguments in another dtype and place. Views keep their strides inside a buffer of the old size,
    which lies between guards (tests/kernels/guarded.py)."""
    if isinstance(value, Tensor):
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        moved = copied(whole, dtype if value.is_floating_point() else value.dtype, device)
        return moved.as_strided(value.size(), value.stride(), GUARD + value.storage_offset())
    if isinstance(value, Ragged):
        return Ragged([converted(part, dtype, device) for part in value.parts], value.dim, value.sizes.dead)
    if isinstance(value, Codes | KeyCodes):  # its ranges and scales are fp16, whatever the dtype
        tensors = {name: x for name, x in value._asdict().items() if isinstance(x, Tensor | Ragged)}
        kinds = {"kept": dtype, "of_tensor": torch.float32}
        return value._replace(**{n: converted(x, kinds.get(n, torch.float16), device) for n, x in tensors.items()})
    if isinstance(value, Rotated):
        return Rotated(converted(value.tokens, dtype, device), value.seed)
    if isinstance(value, Segment):
        kept = None if value.log_weights is None else converted(value.log_weights, torch.float32, device)
        return Segment(*(converted(x, dtype, device) for x in value[:4]), kept)
    if isinstance(value, Guess):
        return Guess(*(converted(x, dtype, device) for x in value))
    if isinstance(value, Sample):
        return value
    if isinstance(value, (list, tuple)):
        return [converted(x, dtype, device) for x in value]
    return value


def device_of(backend: str) -> str:
    """Return where a backend's tensors lie: Triton's on the GPU, unless it is interpreted on a machine without one."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 1000 * FRESH)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw(seed))


def stored(seed: int, batch: int, groups: int, count: int, dim: int, spare: int = 5) -> Tensor:
    """[B G S D] as stores hand it out: a view into room for more rows."""
    return random(seed, batch, groups, count + spare, dim)[:, :, :count]


def pick(seed: int, batch: int, groups: int, among: int, count: int) -> Tensor:
    """[B G K] different rows of each head, in no order."""
    same = draw(seed)
    rows = [torch.randperm(among, generator=same)[:count] for _ in range(batch * groups)]
    return torch.stack(rows).view(batch, groups, count)


def segment_attention() -> Iterator[OpCase]:
    for name, (batch, heads, groups, dim, count) in SHAPES.items():
        q = 2 * random(1, batch, heads, 1, dim)
        k, v = stored(2, batch, groups, count, dim), stored(3, batch, groups, count, dim)
        yield OpCase("segment_attention", f"{name}-whole", (q, [Segment(k, v)], 0.2))
        by_token = Segment(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)))
        yield OpCase("segment_attention", f"{name}-by-token", (q, [by_token], 0.2))
        rows = pick(4, batch, groups, count, max(1, count // 3))
        yield OpCase("segment_attention", f"{name}-chosen", (q, [Segment(k, v, rows)], 0.2))
        yield OpCase("segment_attention", f"{name}-int32", (q, [Segment(k, v, rows.int())], 0.2))
        own = pick(7, batch, heads, count, max(1, count // 3))
        yield OpCase("segment_attention", f"{name}-per-head", (q, [Segment(k, v, own), Segment(k, v, rows)], 0.2))
        yield OpCase("segment_attention", f"{name}-live", (q, _live(k, v, rows), 0.2))
        yield OpCase("segment_attention", f"{name}-weighted", (q, weighted(k, v, rows, own), 0.2))
        if count > 30:
            yield OpCase("segment_attention", f"{name}-three", (q, _three(k, v, rows.shape[2]), 0.2))
    yield OpCase("segment_attention", "none-chosen", (q, _three(k := stored(2, 1, 2, 40, 16), k, 0), 0.2))
    q, (k, v) = 2 * random(1, 1, 6, 1, 64), (stored(seed, 1, 2, 300, 64) for seed in (2, 3))
    chosen = [pick(seed, 1, lists, 60, count) for seed, (lists, count) in enumerate(((2, 7), (6, 20), (2, 60), (6, 1)))]
    parts = [Segment(k[:, :, place::5], v[:, :, place::5], rows) for place, rows in enumerate([*chosen, None])]
    yield OpCase("segment_attention", "five", (q, parts, 0.2))
    yield OpCase("segment_attention", "none-live", (q, [Segment(k, v, None, torch.tensor([0]))], 0.2))


def weighted(k: Tensor, v: Tensor, *rows: Tensor) -> list[Segment]:
    """Chosen rows with log-weights, of KV heads and of query heads, none of which are read in the first list; and rows
    that were fetched, of which those that are not read may be anything."""
    shapes = [chosen.shape for chosen in rows] + [k.shape[:3]]
    added = [random(place, *shape).masked_fill(random(place + 9, *shape) > 0.5, -inf) for place, shape in
             enumerate(shapes)]  # fmt: skip
    added[0][:, 0], added[-1][:, :, 0] = -inf, 0.7
    unread = (added[-1] == -inf).unsqueeze(3)
    fetched = Segment(k.masked_fill(unread, nan), v.masked_fill(unread, nan), log_weights=added[-1])
    return [*(Segment(k, v, *both) for both in zip(rows, (None, None), added, strict=False)), fetched]


def _live(k: Tensor, v: Tensor, rows: Tensor) -> list[Segment]:
    """Room for more tokens than there are, behind which memory holds anything; each sequence has its own count of
    chosen ones; and a segment of none."""
    batch, count = k.shape[0], max(1, k.shape[2] // 2)
    k, v = (x.clone().index_fill_(2, torch.arange(count, x.shape[2]), float("nan")) for x in (k, v))
    rows = rows % count
    some = torch.arange(batch) % rows.shape[2]
    return [
        Segment(k, v, None, torch.tensor([count])),
        Segment(k, v, rows, some),
        Segment(k, v, None, torch.tensor([0])),
    ]


def _three(k: Tensor, v: Tensor, chosen: int) -> list[Segment]:
    """Sinks, selected rows between, and a tail, all views of one buffer."""
    middle = slice(3, k.shape[2] - 7)
    rows = pick(4, k.shape[0], k.shape[1], k.shape[2] - 10, min(chosen, k.shape[2] - 10))
    return [
        Segment(k[:, :, :3], v[:, :, :3]),
        Segment(k[:, :, middle], v[:, :, middle], rows),
        Segment(k[:, :, :0], v[:, :, :0]),
        Segment(k[:, :, -7:], v[:, :, -7:]),
    ]


def segment_attention_with_lse() -> Iterator[OpCase]:
    for case in segment_attention():
        yield case._replace(op="segment_attention_with_lse")


def attention_with_mean() -> Iterator[OpCase]:
    """With sinks and window around the chosen tokens, and with chosen ones alone of few that are live."""
    for name, (batch, heads, groups, dim, count) in SHAPES.items():
        group, blocks = heads // groups, 1 + count // 100
        q = random(1, batch, groups, 2 * group, dim)
        k, v = stored(2, batch, groups, count, dim), stored(3, batch, groups, count, dim)
        chosen = pick(4, batch, groups, count, max(1, count // 3))
        few = [Segment(k, v, chosen), Segment(k, v, live=torch.arange(1, batch + 1))]
        segments = _three(k, v, chosen.shape[2]) if count > 30 else few
        whole = (0.1 * q[:, :, group:] @ k.mT).logsumexp(-1, keepdim=True)
        lses = (whole - torch.tensor(float(blocks)).log()).repeat(1, 1, 1, blocks)
        sinks = random(6, heads) if groups > 1 else None
        means = 9 * random(7, batch, groups, 1, dim), random(8, batch, 1, groups, dim).transpose(1, 2)
        args = q, segments, 0.1, int(count > 30), lses, sinks, *means, torch.arange(count, count + batch)
        yield OpCase("attention_with_mean", name, args)


def merge_attention() -> Iterator[OpCase]:
    outs, lses = [random(i, 2, 6, 1, 16) for i in range(3)], [5 * random(i, 2, 6) for i in range(3, 6)]
    yield OpCase("merge_attention", "three", (outs, lses))
    outs, lses = [random(i, 2, 3, 9, 16) for i in range(2)], [5 * random(i, 2, 3, 9) for i in range(3, 5)]
    lses[1][:, :, :4] = lses[0][:, :, 2] = -inf  # queries that saw no key of this part, or of any
    outs[1][:, :, :4] = outs[0][:, :, 2] = 0
    yield OpCase("merge_attention", "many-tokens", (outs, lses))
    views = [random(i, 2, 5, 7, 48).transpose(1, 2)[:, 4:] for i in range(2)], [lse[:, :, 4:] for lse in lses]
    yield OpCase("merge_attention", "views-dim48", views)


def merge_attention_with_lse() -> Iterator[OpCase]:
    for case in merge_attention():
        yield case._replace(op="merge_attention_with_lse")


# queries, keys, place of the first query, window
WINDOWS = {
    "causal": (70, 133, 63, 1000),
    "near": (133, 133, 0, 20),
    "inside-a-block": (12, 78, 66, 70),  # the first queries see a block of 64 keys whole, the later ones do not
    "before-all": (75, 40, -35, 1000),
    "beyond-all": (20, 70, 70, 1000),
    "far-behind": (30, 97, 40, 5),
    "some-see-none": (90, 33, -20, 16),
    "one": (1, 9, 8, 3),
}


def windowed() -> Iterator[OpCase]:
    for name, (new, count, first, window) in WINDOWS.items():
        for batch, heads, groups, dim in ((1, 2, 2, 64), (2, 6, 2, 96), (1, 5, 1, 128)):
            q = random(1, batch, new, heads, dim).transpose(1, 2)
            k, v = stored(2, batch, groups, count, dim), stored(3, batch, groups, count, dim)
            label = f"{name}-dim{dim}"
            yield OpCase("windowed_attention", label, (q, k, v, 0.2, first, window))
            lse = windowed_attention(q, k, v, 0.2, first, window)[1].clamp(min=0).ceil()  # the same in every dtype
            yield OpCase("windowed_sums", label, (q, k, lse, 0.2, first, window))


def prefill_attention() -> Iterator[OpCase]:
    others = {"gqa2-dim80": (2, 4, 2, 80, 97)}
    for name, (batch, heads, groups, dim, count) in (SHAPES | others).items():
        for new in sorted({count, max(1, count // 3), 1}):
            q = random(1, batch, new, heads, dim).transpose(1, 2)  # as the model hands it over
            k, v = stored(2, batch, groups, count, dim), stored(3, batch, groups, count, dim)
            yield OpCase("prefill_attention", f"{name}-{new}of{count}", (q, k, v, 0.2))


def column_sums() -> Iterator[OpCase]:
    shapes = (1, 2, 2, 64, 133, 133), (2, 6, 2, 96, 51, 17), (1, 5, 1, 128, 140, 70), (1, 4, 2, 48, 65, 1)
    folded = (2, 8, 2, 128, 300, 32), (2, 6, 2, 64, 70, 9), (1, 8, 1, 96, 45, 5)  # the queries of a group are one tile
    for batch, heads, groups, dim, count, new in (*shapes, (1, 2, 2, 16, 1, 1), *folded):
        q = random(1, batch, new, heads, dim).transpose(1, 2)
        k = stored(2, batch, groups, count, dim)
        yield OpCase("column_sums", f"dim{dim}-{new}of{count}", (q, k, 0.2))


def prefill_attention_with_column_sums() -> Iterator[OpCase]:
    for case in column_sums():
        q, k, scale = case.args
        args = (q, k, stored(3, *k.shape), scale)
        yield OpCase("prefill_attention_with_column_sums", case.name, args)


def gather_rows() -> Iterator[OpCase]:
    for name, (batch, _, groups, dim, count) in SHAPES.items():
        for chosen in (0, max(1, count // 2)):
            rows = pick(6, batch, groups, count, chosen)
            args = stored(5, batch, groups, count, dim), rows
            yield OpCase("gather_rows", f"{name}-{chosen}", args)
            yield OpCase("gather_rows", f"{name}-{chosen}-into", (args[0], rows - 1, random(7, *rows.shape, dim)))
    yield OpCase("gather_rows", "inner-view", (stored(5, 2, 3, 40, 32)[:, :, 7:], pick(6, 2, 3, 33, 9)))
    yield OpCase("gather_rows", "expanded", (stored(5, 2, 1, 40, 32).expand(-1, 3, -1, -1), pick(6, 2, 3, 40, 9)))
    yield OpCase("gather_rows", "by-token", (random(5, 2, 40, 3, 32).transpose(1, 2), pick(6, 2, 3, 40, 9)))


def gather_tiers() -> Iterator[OpCase]:
    for name, (batch, _, groups, dim, count) in SHAPES.items():
        far, chosen = stored(5, batch, groups, count, dim), max(1, count // 2)
        rows, held = pick(6, batch, groups, count, chosen), stored(7, batch, groups, 5, dim)
        slots = torch.randint(-2, 5, rows.shape, generator=draw(8))
        yield OpCase("gather_tiers", f"{name}-{chosen}", (far, rows, held, slots))
    far, held, rows = stored(5, 2, 3, 12, 2500), stored(7, 2, 3, 5, 2500), pick(6, 2, 3, 12, 9)
    slots = torch.randint(-2, 5, rows.shape, generator=draw(8))
    yield OpCase("gather_tiers", "many-tiles", (far, rows, held, slots))
    yield OpCase("gather_tiers", "one-tier", (stored(5, 2, 3, 40, 32)[:, :, 7:], pick(6, 2, 3, 33, 9), None, None))
    yield OpCase("gather_tiers", "numbers", (stored(5, 2, 3, 40, 1), pick(6, 2, 3, 40, 30), None, None))
    yield OpCase("gather_tiers", "none-chosen", (stored(5, 1, 2, 3, 16), pick(6, 1, 2, 3, 0), None, None))


def row_scores() -> Iterator[OpCase]:
    for name, width in (("dim16", 16), ("dim64", 64), ("dim96", 96), ("dim128", 128), ("dim256", 256), ("dim25", 25)):
        for group, count in ((1, 1), (3, 65), (4, 128), (8, 333)):
            q, x = random(1, 2, 2, group, width), stored(2, 2, 2, count, width)
            yield OpCase("row_scores", f"{name}-g{group}-{count}", (q, x))
    yield OpCase("row_scores", "dim25-by-channel", (random(1, 2, 2, 4, 25), random(2, 2, 2, 25, 304).mT))


def row_weights() -> Iterator[OpCase]:
    """Of an index with several blocks, whole or up to its live rows."""
    for group, count, width, reduce in ((1, 1, 16, "sum"), (3, 65, 96, "largest"), (4, 333, 64, "sum")):
        q, x = random(1, 2, 2, group, width), stored(2, 2, 2, count, width)
        yield OpCase("row_weights", f"g{group}-{count}-{reduce}", (q, x, 0.3, reduce))
    for case in live_scores():
        q, x, live = case.args
        yield OpCase("row_weights", case.name, (q, x, 0.3, "sum", live.clamp(min=1)))


def page_scores() -> Iterator[OpCase]:
    """Queries with zeros in them, and bounds of which one is as large as the other."""
    for dim in (16, 64, 96, 128, 256, 13):
        for group, count in ((1, 1), (3, 65), (4, 128)):
            q, x = random(1, 2, 2, group, dim), stored(2, 2, 2, count, 2 * dim)
            q[..., ::5], x[..., :2, dim:] = 0, x[..., :2, :dim]
            yield OpCase("page_scores", f"dim{dim}-g{group}-{count}", (q, x))


def pick_channels() -> Iterator[OpCase]:
    """One head is zero."""
    for group, dim, r in ((1, 16, 16), (3, 96, 90), (4, 64, 16), (8, 128, 1), (5, 256, 100), (2, 13, 5)):
        q = picky(random(group, 2, 2, group, dim), torch.tensor(r))
        for spread, facing in ((True, False), (False, True)):
            name = f"g{group}-{r}of{dim}" + "-facing" * facing
            yield OpCase("pick_channels", name, (q, r, 0.3, spread, facing))


def live_scores() -> Iterator[OpCase]:
    """Behind what is there memory holds anything."""
    for live in (torch.tensor([20]), torch.tensor([0, 65])):
        q, x = random(1, 2, 2, 3, 64), stored(2, 2, 2, 70, 64)
        x[:, :, int(live.max()) :] = float("nan")
        yield OpCase("live_scores", f"{live.tolist()}-of-70", (q, x, live))
        by_channel = torch.full((2, 2, 50, 560), float("nan")).mT
        by_channel[:, :, : int(live.max()) + 480] = random(3, 2, 2, int(live.max()) + 480, 50)
        yield OpCase("live_scores", f"by-channel-{live.tolist()}", (random(1, 2, 2, 4, 50), by_channel, live + 480))


def partial_products() -> Iterator[OpCase]:
    for batch, groups, share, dim, turning, width in (
        (1, 2, 3, 64, 64, 25),
        (2, 1, 4, 96, 36, 50),
        (2, 2, 1, 20, 20, 1),
    ):
        q, cos, sin = random(1, batch, groups * share, 1, dim), random(2, 1, 1, turning), random(3, batch, 1, turning)
        basis = random(4, batch, groups, dim, width)
        yield OpCase("partial_products", f"dim{dim}-{width}", (Guess(q, cos, sin, basis, 0.3), None))


def rotate() -> Iterator[OpCase]:
    """Heads one after the other in memory, and tokens; all channels turn, or some; all tokens by one position, of each
    sequence or of all."""
    for dim, turning, tokens in ((64, 64, 1), (96, 36, 1), (20, 20, 1), (128, 128, 7), (256, 64, 19)):
        x, (cos, sin) = random(1, 2, 3, tokens, dim), (random(seed, 2, tokens, turning) for seed in (2, 3))
        yield OpCase("rotate", f"dim{dim}-{turning}-{tokens}", (x, cos[:1], sin[:1]))
        by_token = x.transpose(1, 2).contiguous().transpose(1, 2)
        yield OpCase("rotate", f"dim{dim}-{turning}-{tokens}-by-token", (by_token, cos, sin))
        yield OpCase("rotate", f"dim{dim}-{turning}-{tokens}-one-place", (x, cos[:1, :1].clone(), sin[:1, :1].clone()))
        yield OpCase("rotate", f"dim{dim}-{turning}-{tokens}-a-place-of-each", (by_token, cos[:, :1], sin[:, :1]))


def rotate_to() -> Iterator[OpCase]:
    """Some channels or all; to one position, or to one of each sequence."""
    for dim, turning, tokens in ((64, 64, 10), (96, 36, 1), (20, 20, 17)):
        x, (cos, sin) = random(1, 2, 3, tokens, dim), (random(seed, 1, 9, turning) for seed in (2, 3))
        for at in (torch.tensor([8]), torch.tensor([5, 0])):
            yield OpCase("rotate_to", f"dim{dim}-{turning}-{tokens}-to-{at.tolist()}", (x, cos, sin, at, torch.float32))


def picky(q: Tensor, r: Tensor) -> Tensor:
    """Let r channels of each group be so much larger than others that rounding leaves them the largest; one head is
    zero. q [B G g D], r [B] or a number"""
    q[0, 0, 1:2] = 0
    rank = q.abs().sum(2, keepdim=True).argsort(-1, descending=True).argsort(-1)
    return torch.where(rank < r.view(-1, 1, 1, 1), 2 * q, q)


def by_channel(channels: Tensor, picked: Tensor, whole: Tensor | None) -> tuple[Tensor, ...]:
    """Return what `pick_channels` gave in the order of the channels, which is left to backends."""
    order = channels.sort(dim=-1, stable=True).indices
    made = channels.gather(-1, order), picked.gather(-1, order.unsqueeze(2).expand_as(picked))
    return made if whole is None else (*made, whole)


def highest(scored: tuple[Any, Tensor]) -> tuple[Any, Tensor]:
    """Return what `live_scores` gave with one highest score per head: of how many parts is left to backends."""
    return scored[0], scored[1].amax(-1)


def token_rows() -> Iterator[OpCase]:
    for count, size in ((1, 1), (7, 16), (1025, 5), (0, 3)):
        chunks = pick(3, 2, 3, 2000, count)
        yield OpCase("token_rows", f"{count}-of-{size}", (chunks, size))
        yield OpCase("token_rows", f"{count}-of-{size}-and-last", (chunks, size, 2**33))
    yield OpCase("token_rows", "one-for-all-heads", (pick(3, 2, 1, 90, 4).expand(-1, 3, -1), 8))


def channel_sums() -> Iterator[OpCase]:
    for group, count, channels in ((1, 1, 1), (3, 31, 5), (4, 4100, 16), (8, 333, 64), (12, 1040, 7)):
        x = random(2, 2, 2, 64, count + 3)[..., :count]
        args = (random(1, 2, 2, group, channels), x, pick(3, 2, 2, 64, channels))
        yield OpCase("channel_sums", f"g{group}-{channels}x{count}", args)


def channel_weights() -> Iterator[OpCase]:
    for times, case in enumerate(channel_sums(), start=1):
        args = (*case.args, 0.3, "sum" if times % 2 else "largest", times)
        yield OpCase("channel_weights", f"{case.name}-{times}-times", args)


def joined_parts(sums: Tensor | Ragged, lses: Tensor) -> tuple[Tensor | Ragged, Tensor]:
    """Return sums or scores with their log-sum-exps joined, whose parts are left to backends."""
    return sums, lses.logsumexp(-1)


def group_weights() -> Iterator[OpCase]:
    for group, count in ((1, 1), (3, 31), (4, 4100), (8, 333)):
        for reduce in ("sum", "largest"):
            logits = 20 * random(1, 2, 2, group, count)
            yield OpCase("group_weights", f"g{group}-{count}-{reduce}", (logits, 0.3, reduce))


def group_margins() -> Iterator[OpCase]:
    for group, count, candidates in ((1, 1, 1), (3, 31, 30), (4, 4100, 4097), (8, 333, 333), (2, 40, 0)):
        logits = 9 * random(1, 2, 2, group, count)
        yield OpCase("group_margins", f"g{group}-{candidates}of{count}", (logits, None, candidates, 5.0, 9))
        tops = torch.stack([logits.amax(-1), logits.amin(-1), logits.amin(-1)], -1)
        yield OpCase("group_margins", f"g{group}-{candidates}-tops", (logits, tops, candidates, 7.0, 10_000))
    yield OpCase("group_margins", "all", (random(1, 1, 2, 4, 70), None, 70, float("inf"), 60))


def pq_weights() -> Iterator[OpCase]:
    for name, parts, clusters in (("m2b6", 2, 64), ("m4b8", 4, 256), ("m1b3", 1, 8), ("few", 2, 13), ("m2b9", 2, 512)):
        codes = torch.randint(clusters, (2, 2, 333, parts), generator=draw(7))
        codes = codes.to(torch.uint8 if clusters <= 256 else torch.int32)
        for group in (1, 3, 4, 8):
            args = (random(1, 2, 2 * group, 1, 64), random(8, 2, 2, parts, clusters, 64 // parts), codes, 0.3)
            yield OpCase("pq_weights", f"{name}-g{group}", args)
    codes = torch.randint(16, (1, 2, 50, 1), generator=draw(7)).to(torch.uint8)
    yield OpCase("pq_weights", "dim160", (random(1, 1, 4, 1, 160), random(8, 1, 2, 1, 16, 160), codes, 0.3))


def pq_weights_far() -> Iterator[OpCase]:
    q, centroids, codes, _ = next(pq_weights()).args
    far = centroids.clone()
    far[..., 0, :] += 60 * q[:, ::1, 0, :32].view(2, 2, 1, 32)  # a centroid that no token has, far above the others
    yield OpCase("pq_weights", "far-bound", (q, far, codes.clamp(min=1), 1.0))


def pq_best() -> Iterator[OpCase]:
    """Two pieces, and a cell with most of the tokens; odd numbers; all and none are chosen; wide heads."""
    for name, clusters, dim, group, tokens, count in (
        ("usual", 64, 128, 4, 4100, 300), ("few", 13, 96, 3, 70, 1), ("all", 5, 64, 16, 333, 333),
        ("none", 4, 64, 1, 9, 0), ("wide", 64, 256, 2, 900, 800),
    ):  # fmt: skip
        codes = torch.randint(clusters, (2, 2, tokens, 2), generator=draw(7)).to(torch.uint8)
        codes[0, 1, tokens // 3 :] = 2
        q, centroids = random(1, 2, 2 * group, 1, dim), random(8, 2, 2, 2, clusters, dim // 2)
        yield OpCase("pq_best", name, (q, centroids, codes, pq_held(codes, clusters), 0.3, count))
    q, far, codes, scale = next(pq_weights_far()).args
    yield OpCase("pq_best", "far-bound", (q, far, codes, pq_held(codes, far.shape[3]), scale, 40))


def last_alike() -> Iterator[OpCase]:
    """Keys around few centres, some alone; blocks that end early, and channels that fill no tile."""
    for count, dim, centres in ((1, 16, 1), (37, 20, 9), (333, 64, 60), (300, 128, 128)):
        at = torch.randint(centres, (2, 2, count), generator=draw(dim))
        x = torch.eye(dim)[at] + 0.02 * random(count, 2, 2, count, dim)
        yield OpCase("last_alike", f"{count}-of-{dim}", (x * random(dim, 2, 2, count, 1).exp(), 0.5))


def comparable(op: str, result: Any) -> Any:
    """Return what an operation gave without what is left to backends."""
    if op == "pick_channels":
        return by_channel(*result)
    if op in ("channel_sums", "row_scores_with_lse"):
        return joined_parts(*result)
    if op == "estimated_logits":
        return result[0]
    if op == "log_sum_exps":
        return result.logsumexp(-1)
    if op == "carrying":
        return result.exp()
    return highest(result) if op == "live_scores" else result


def row_scores_with_lse() -> Iterator[OpCase]:
    """Of parts and of whole ones."""
    for group, count, width in ((1, 1, 16), (3, 65, 96), (4, 1024, 64), (8, 2090, 32)):
        q, x = random(1, 2, 2, group, width), stored(2, 2, 2, count, width)
        yield OpCase("row_scores_with_lse", f"g{group}-{count}", (q, x, 0.3))


def first_places() -> Iterator[OpCase]:
    for among, count in ((1, 1), (50, 90), (3000, 2100)):
        rows = torch.randint(-1, among, (2, 3, count), generator=draw(5))
        yield OpCase("first_places", f"{count}-of-{among}", (rows,))


def estimated_logits() -> Iterator[OpCase]:
    """Rows of KV heads and of query heads, fewer and more than a task has, of stores with room for more."""
    for name, (batch, heads, groups, dim, count) in SHAPES.items():
        keys = quantised_keys(random(2, batch, groups, count, dim))
        keys = KeyCodes(*(pad(x, (0, 0, 0, 3))[:, :, :count] for x in keys))
        q = random(1, batch, groups, heads // groups, dim)
        for lists in {groups, heads}:
            rows = pick(4, batch, lists, count, max(1, count // 2)).repeat(1, 1, 3)
            yield OpCase("estimated_logits", f"{name}-{lists}", (q, keys, rows))
    few = random(1, 1, 2, 3, 24), quantised_keys(random(2, 1, 2, 9, 24)), pick(4, 1, 2, 9, 5)
    yield OpCase("estimated_logits", "dim24", few)


def carrying() -> Iterator[OpCase]:
    """Of numbers that bf16 holds: of many weights and of few, some of which are equal or missing."""
    for heads, count, spread in ((1, 1, 1), (4, 2050, 2), (3, 333, 9), (1, 40, 0)):
        logits = (spread * random(1, 2, 2, heads, count)).bfloat16().float()
        logits[:, :, :, 3::7] = -inf
        always = random(2, 2, 2, heads, 2).bfloat16().float()
        for mass in (0.2, 0.9, 1.0):
            yield OpCase("carrying", f"{mass}-of-{count}-spread{spread}", (logits, logits, always, mass, 0.5))
    nothing = torch.full((1, 1, 2, 20), -inf)
    yield OpCase("carrying", "nothing", (nothing, nothing, nothing[..., :1], 0.5, 1.0))


def log_sum_exps() -> Iterator[OpCase]:
    """Of whole segments, and of one of which some tokens exist."""
    for group, dim, count in ((3, 96, 1100), (1, 64, 1100), (2, 16, 90)):
        q = random(1, 2, 2, group, dim)
        parts = [Segment(k, k) for k in (stored(2, 2, 2, 3, dim), stored(3, 2, 2, count, dim))]
        some = parts[1]._replace(live=torch.tensor([70, 0]))
        yield OpCase("log_sum_exps", f"g{group}", (q, [*parts, some], 0.3))


def uniform_draws() -> Iterator[OpCase]:
    yield OpCase("uniform_draws", "300-of-9", (torch.tensor([70]), -(2**62) + 5, 3, 300, 9))


def sampled_weights() -> Iterator[OpCase]:
    """Of one head and of three, with draws that are heavy tokens or were drawn before, and samples cut short."""
    for heads, epsilon in ((1, 0.3), (3, 0.02)):
        logits = random(1, 2, 2, heads, 90)
        drawn = torch.randint(90, (2, 2, 70), generator=draw(6))
        lse, rows = logits.logsumexp(-1), torch.cat([pick(4, 2, 2, 90, 20), drawn], -1)
        sample = Sample(90, 10, epsilon, 2.0, 0.5)
        yield OpCase("sampled_weights", f"{heads}", (logits, lse, lse - 3, rows, 20, sample))


def best_by_codes(args: Sequence[Any]) -> Tensor:
    """Return what `pq_best` should: of equal weights the first, in order."""
    q, centroids, codes, _, scale, count = args
    weights = reference.pq_weights(q.double(), centroids.double(), codes, scale)
    return weights.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values


def top_k() -> Iterator[OpCase]:
    for shape in ((1, 2, 1), (2, 3, 1000), (1, 1, 20_001), (1, 1, 70_001)):
        for count in sorted({1, max(1, shape[-1] // 3), shape[-1]}):
            yield OpCase("top_k", f"{count}of{shape[-1]}", (random(9, *shape), count))
    holes = random(9, 1, 2, 200)
    holes[..., ::3], holes[..., 5] = float("-inf"), float("inf")
    yield OpCase("top_k", "all-equal", (torch.ones(2, 2, 300), 17))
    yield OpCase("top_k", "infinite", (holes, 180))
    yield OpCase("top_k", "none", (random(9, 2, 3, 10), 0))
    yield OpCase("top_k", "view", (random(9, 1, 3, 500)[..., 3:451], 20))


def rebuild_keys() -> Iterator[OpCase]:
    for name, (batch, _, groups, dim, count) in SHAPES.items():
        for rank, chosen in ((10, 1), (26, max(1, count // 2)), (10, 0)):
            angles = random(1, count, dim // 2).repeat(1, 2)
            size = 1 if count < 9 else 1 + rank % 7
            chunks = pick(4, batch, groups, count // size, max(1, chosen // size) if chosen else 0)
            u, basis = random(2, batch, count, rank + 2)[..., :rank], random(3, batch, groups, rank, dim)
            args, out = (size, angles.cos(), angles.sin()), random(5, *chunks.shape[:2], chunks.shape[2] * size, dim)
            yield OpCase("rebuild_keys", f"{name}-rank{rank}-{chosen}", (u, basis, chunks, *args))
            yield OpCase("rebuild_keys", f"{name}-rank{rank}-{chosen}-into", (u, basis, chunks - 1, *args, out))
    angles = random(1, 40, 16).repeat(1, 2)
    args = (random(2, 1, 40, 10), random(3, 1, 2, 10, 48), pick(4, 1, 2, 40, 9), 1)
    yield OpCase("rebuild_keys", "32-of-48-turned", (*args, angles.cos(), angles.sin()))


def coded() -> Iterator[OpCase]:
    for name, args in coded_cases.attention():
        yield OpCase("coded_attention", name, args)
    for name, args in coded_cases.encoded():
        yield OpCase("encode_codes", name, args)
    for name, args in coded_cases.rows():
        yield OpCase("decode_rows", name, args)


@cache
def cases() -> list[OpCase]:
    groups = (
        coded, segment_attention, segment_attention_with_lse, attention_with_mean, merge_attention,
        merge_attention_with_lse, prefill_attention, windowed, column_sums, prefill_attention_with_column_sums,
        gather_rows, gather_tiers, row_scores, row_weights, page_scores, token_rows, pick_channels, live_scores,
        partial_products, rotate, rotate_to, channel_sums, channel_weights, group_weights, group_margins, pq_weights,
        pq_weights_far, pq_best, top_k, rebuild_keys, last_alike,
        row_scores_with_lse, first_places, estimated_logits, log_sum_exps, carrying,
        uniform_draws, sampled_weights,
    )  # fmt: skip
    return [case for group in groups for case in group()]
