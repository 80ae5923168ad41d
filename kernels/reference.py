"""Defines every operation in plain torch; the other backends are tested against it.

Letters in shapes are those of methods/base/. Products, softmax and sums run in fp32, whatever the
dtype of the inputs: a product of fp16 numbers may be beyond fp16, and bf16 has 8 bits of a logit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kernels import ops
from kernels.per_sequence import CountedOnDevice, PerSequence
from kernels.ragged import Ragged, by_sequence, filled, with_sizes
from kernels.rope import rotate
from kernels.windowed import windowed_attention

# why a backend refuses values with fewer channels than keys
NARROW = "takes values as wide as keys, got {} and {} channels"


class Segment(NamedTuple):
    """Name keys and values to attend to: all S tokens, or of each KV head (or each query head) only
    the tokens whose indices are in `rows`.

    `live`: only the first `live` of S (or of `rows`) exist, and nothing after them is read. It lies
    on the device, so that a decode step that was captured in a CUDA graph can be replayed while the
    number of tokens grows (methods/base/state.py).

    `log_weights`: added to the scaled logits of the listed tokens before the softmax, so that a
    token with the log-weight log(n) counts as n tokens. A token with minus infinity is not read:
    its key and value may be anything.

    Sequences of different lengths have a `Ragged` (kernels/ragged.py), which holds a tensor per
    sequence, instead of each tensor."""

    k: Tensor  # [B G S D]
    v: Tensor  # [B G S Dv]
    rows: Tensor | None = None  # [B G K] or [B H K], indices into S, no repeats
    live: Tensor | None = None  # [1] or [B], int64
    # fp32, [B G|H K] as `rows`, or [B G S] without `rows`; None: 0 everywhere
    log_weights: Tensor | None = None

    @property
    def lists(self) -> tuple[int, int]:
        """Return how many lists of tokens a sequence has, one per KV head or per query head, and how
        many tokens a list has."""
        listed = self.k if self.rows is None else self.rows
        return listed.shape[1], listed.shape[2]

    def weights_of(self, count: int) -> Tensor | None:
        """Return the log-weights of the first `count` tokens of each list, contiguous. There may be
        more, where one tensor serves sequences of different lengths."""
        return None if self.log_weights is None else self.log_weights[..., :count].contiguous()

    def unfit_weights(self) -> str | None:
        """Return why the log-weights are not one fp32 number per listed token; None if they are."""
        if self.log_weights is None:
            return None
        shape, (lists, count) = self.log_weights.shape, self.lists
        if (
            shape[:2] == (self.k.shape[0], lists)
            and shape[2] >= count
            and self.log_weights.dtype == torch.float32
        ):
            return None
        return f"takes one log-weight in float32 per listed token, got {list(shape)} {self.log_weights.dtype}"

    def weighted(self, logits: Tensor) -> Tensor:
        """Return scaled logits [B groups g K] of the listed tokens with the log-weights added, minus
        infinity for tokens that are not read."""
        if (added := self.weights_of(logits.shape[-1])) is None:
            return logits
        added = _of_groups(added, logits.shape[1]).unsqueeze(2)
        return (logits + added).masked_fill(added == float("-inf"), float("-inf"))

    def without_missing(self, scores: Tensor, value: float) -> Tensor:
        """Return scores [B ... S], with `value` instead of those of missing tokens, which are the
        tokens from `live` on."""
        return scores if self.live is None else without_missing(scores, self.live, value)


def without_missing(scores: Tensor, live: Tensor, value: float) -> Tensor:
    """Return scores [B ... S] with `value` in place of those of tokens that do not exist, which are
    the tokens from index `live` ([1] or [B], int64) on."""
    missing = torch.arange(scores.shape[-1], device=scores.device) >= live.unsqueeze(-1)  # [1|B S]
    return scores.masked_fill(missing.view(-1, *[1] * (scores.dim() - 2), scores.shape[-1]), value)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal attention of the last T of S tokens. q [B H T D], k [B G S D], v [B G S Dv] ->
    [B H T Dv]"""
    return windowed_attention(q, k, v, scale, k.shape[2] - q.shape[2], k.shape[2])[0]


@by_sequence
def segment_attention(q: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    """Attend from one token per sequence to the tokens of all segments together, under one softmax.
    q [B H 1 D] -> [B H 1 Dv]"""
    return segment_attention_with_lse(q, segments, scale)[0]


@by_sequence
def segment_attention_with_lse(
    q: Tensor, segments: Sequence[Segment], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from one token per sequence to the tokens of all segments under one softmax, and
    return the log-sum-exp of the softmax too, for `merge_attention`. q [B H 1 D] -> [B H 1 Dv],
    [B H] (fp32)

    The query heads that read the same rows are folded into the token axis, so no key or value is
    repeated for them."""
    batch, heads, _, dim = q.shape
    groups = max(s.lists[0] for s in segments)
    folded = q.view(batch * groups, heads // groups, dim)
    parts = [_parts(s, groups) for s in segments]
    logits = [_products(folded, s, k) for s, (k, _) in zip(segments, parts, strict=True)]
    joined = (logits[0] if len(logits) == 1 else torch.cat(logits, -1)).mul_(scale)
    sizes = [part.shape[-1] for part in logits]
    for segment, part in zip(segments, joined.split(sizes, -1), strict=True):
        if segment.log_weights is not None:
            part.copy_(segment.weighted(part.unflatten(0, (batch, groups))).flatten(0, 1))
    shares = joined.softmax(-1)
    # perhaps no token is read
    if any(x.live is not None or x.log_weights is not None for x in segments):
        shares = shares.masked_fill(joined.amax(-1, keepdim=True) == float("-inf"), 0)
    weights = shares.split(sizes, -1)
    out = torch.bmm(weights[0], parts[0][1].flatten(0, 1).float())
    for weight, (_, v) in zip(weights[1:], parts[1:], strict=True):
        out = torch.baddbmm(out, weight, v.flatten(0, 1).float())
    return out.view(batch, heads, 1, -1).to(q.dtype), joined.logsumexp(-1).view(batch, heads)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Merge attention over separate parts of the keys, each perhaps with its own queries, into one
    softmax over all of them. `lses`: the log-sum-exp of each part's logits.

    outs [B H T D], zeros where a query has seen no key of a part; lses [B H T], or [B H] of one
    token, minus infinity there -> [B H T D], zeros if it has seen no key of any part"""
    least = torch.finfo(lses[0].dtype).min  # in place of minus infinity, of which all make NaN
    joined = torch.stack(tuple(lses)).clamp_min(least)
    shares = joined.softmax(0).view(len(lses), *outs[0].shape[:3], 1)
    return (torch.stack(tuple(outs)).float() * shares).sum(0).to(outs[0].dtype)


def merge_attention_with_lse(
    outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge attention over separate parts of the keys, as `merge_attention` does, and return the
    log-sum-exp of all of them too. -> [B H T D], and [B H T], or [B H] of one token, as in `lses`
    (fp32)"""
    return merge_attention(outs, lses), reduce(torch.logaddexp, lses)


def _products(folded: Tensor, segment: Segment, k: Tensor) -> Tensor:
    """Multiply the queries with a segment's keys; products with missing keys are minus infinity.
    folded [B*groups g D], for g query heads of a group; k [B groups K D] -> [B*groups g K]"""
    logits = torch.bmm(folded.float(), k.flatten(0, 1).float().transpose(1, 2))
    return segment.without_missing(logits.unflatten(0, k.shape[:2]), float("-inf")).flatten(0, 1)


def _parts(segment: Segment, groups: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the tokens that a segment names, [B groups K D] each, repeated so
    that there are `groups` heads. Values of tokens that are missing or not read are zero, since
    zero weight times NaN is NaN."""
    rows = segment.rows  # those from `live` on may be any numbers
    rows = None if rows is None else segment.without_missing(rows, 0)
    k, v = (_rows_of(x, rows, groups) for x in (segment.k, segment.v))
    if (added := segment.weights_of(v.shape[2])) is not None:
        v = v.masked_fill(_of_groups(added == float("-inf"), groups).unsqueeze(3), 0)
    return k, segment.without_missing(v.transpose(2, 3), 0).transpose(2, 3)


def _of_groups(x: Tensor, groups: int) -> Tensor:
    """Repeat the heads of x [B G ...] so that there are `groups` of them."""
    return x if x.shape[1] == groups else x.repeat_interleave(groups // x.shape[1], 1)


def _rows_of(x: Tensor, rows: Tensor | None, groups: int) -> Tensor:
    """Return the tokens `rows` of x, with its KV heads repeated so that there are `groups` heads. x
    [B G S D]; rows [B G|H K], or None for all S -> [B groups K D]"""
    if rows is not None:
        per_group = rows.shape[1] // x.shape[1] * rows.shape[2]
        x = gather_rows(x, rows.reshape(*x.shape[:2], per_group)).view(*rows.shape, x.shape[3])
    return _of_groups(x, groups)


def _replaced(out: Tensor, numbers: Tensor, new: Tensor) -> Tensor:
    """Write new [B G K*n D] into `out` except where one of numbers [B G K] is negative."""
    each = new.shape[2] // max(1, numbers.shape[2])
    there = (numbers >= 0).repeat_interleave(each, 2).unsqueeze(3)
    return out.copy_(torch.where(there, new, out.view(new.shape)).view(out.shape))


@by_sequence
def gather_rows(x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy rows (tokens) of each KV head. x [B G S D], rows [B G K] -> [B G K D]

    out [B G K D], contiguous: they are written there; where a row is negative it stays as it is.
    Without `out` no row may be negative, and backends need not notice one.

    They are read by one flat index_select over all heads' rows: ten times faster on a CPU than
    `gather` with an expanded index."""
    if out is not None:
        return _replaced(out, rows, gather_rows(x, rows.clamp(min=0)))
    if (flat := _flat_rows(x)) is None:
        return x.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]))
    return flat.index_select(0, _flat_index(x, rows)).view(*rows.shape, x.shape[3])


@by_sequence
def gather_tiers(far: Tensor, rows: Tensor, held: Tensor | None, slots: Tensor | None) -> Tensor:
    """Copy rows (tokens) of each KV head out of two places: `far`, which may be host memory, and
    `held`, a cache on the device. far [B G S D], held [B G C D], rows and slots [B G K] ->
    [B G K D], on the device of `rows`

    `slots` says where in `held` each row is; -1: nowhere, so it is read from `far`. Without
    `slots`, all are read from `far`. Kernels of a GPU read pinned host memory in place, so that no
    row number moves to the host."""
    fetched = gather_rows(far, rows.to(far.device)).to(rows.device)
    if held is None or slots is None:
        return fetched
    return torch.where(slots.unsqueeze(-1) >= 0, gather_rows(held, slots.clamp(min=0)), fetched)


@by_sequence
def put_rows(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write `values` into the rows (tokens) `rows` of each KV head of x. x [B G S D], rows [B G K],
    values [B G K D]. If a row occurs twice, either value may stay.

    For several sequences, the rows of one may be shorter than D: its values are then zero in the
    channels that are missing, and backends may write these zeros after its rows."""
    values = values[..., : x.shape[3]]
    if (flat := _flat_rows(x)) is None:
        x.scatter_(2, rows.unsqueeze(-1).expand(values.shape), values)
    else:
        flat.index_copy_(0, _flat_index(x, rows), values.reshape(-1, x.shape[3]))


def _flat_rows(x: Tensor) -> Tensor | None:
    """View x [B G S D] as one matrix [N D] that holds the rows of all heads one after the other,
    perhaps with unused rows between two heads. Return None if the strides do not allow it."""
    (batch, groups, stored, dim), (over, step, row, channel) = x.shape, x.stride()
    if channel != 1 or row != dim or step % dim or (batch > 1 and over != groups * step):
        return None
    return x.as_strided((((batch * groups - 1) * (step // dim)) + stored, dim), (dim, 1))


def _flat_index(x: Tensor, rows: Tensor) -> Tensor:
    """Return the places [B*G*K] of rows [B G K] of each head in the matrix that `_flat_rows` makes
    of x."""
    batch, groups = rows.shape[:2]
    per_head = x.stride(1) // x.shape[3]
    heads = per_head * torch.arange(batch * groups, device=rows.device)
    return (rows + heads.view(batch, groups, 1)).view(-1)


def _or_of_counted(run: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Let `top_k` also take counts that only the device knows (`CountedOnDevice`). Their greatest
    possible number is chosen, the largest scores first, so that each sequence uses as many of the
    leading ones as its count says."""

    @wraps(run)
    def served(scores: Tensor | Ragged, count: int | PerSequence) -> Tensor:
        if not isinstance(count, CountedOnDevice):
            return run(cast(Tensor, scores), cast(int, count))
        whole = filled(scores)
        if isinstance(scores, Ragged):
            whole = without_missing(whole, scores.counts, float("-inf"))
        best = whole.topk(min(count.most, whole.shape[-1]), dim=-1).indices
        return cast(Tensor, Ragged.filled_up(best, count, best.dim() - 1))

    return cast(Callable[[Tensor, int], Tensor], served)


@_or_of_counted
@by_sequence
def top_k(scores: Tensor, count: int) -> Tensor:
    """Find the indices of the `count` largest scores, unsorted. [... S] -> [... count]

    Among equal scores the compiled backends take the first, torch any. If sequences have different
    counts, zeros follow the smaller ones."""
    return scores.topk(count, dim=-1, sorted=False).indices


def first_places(rows: Tensor) -> Tensor:
    """Return for each entry of rows [B G K] the index, in its head, of the first entry with the
    same value: an entry that gets its own index is no repetition. Nothing waits for the device."""
    ordered, order = rows.sort(dim=-1, stable=True)
    again = torch.cat(
        [torch.zeros_like(order[..., :1], dtype=torch.bool), ordered[..., 1:] == ordered[..., :-1]],
        -1,
    )
    begins = (
        torch.arange(rows.shape[-1], device=rows.device)
        .expand_as(order)
        .masked_fill(again, 0)
        .cummax(-1)
        .values
    )
    return torch.empty_like(order).scatter_(-1, order, order.gather(-1, begins))


@by_sequence
def row_scores(q: Tensor, x: Tensor) -> Tensor:
    """Multiply the g query heads of each group (those that share a KV head) with every row of an
    index, such as keys or means of chunks. q [B G g C], x [B G S C] -> [B G g S] (fp32)

    For several sequences, the rows of one may be shorter than C: its queries are then zero in the
    channels that are missing, and the memory after its rows must contain finite numbers, because
    backends read it."""
    return q[..., : x.shape[3]].float() @ x.float().transpose(-1, -2)


def row_scores_with_lse(q: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Multiply the query heads of each group with every row, as `row_scores` does, and return besides
    the log-sum-exp of each head's scaled scores. q [B G g C], x [B G S C] -> [B G g S] (fp32), and
    numbers whose log-sum-exp is that of a head, [B G g n], where n is left to the backend"""
    scores = ops.row_scores(q, x)
    return scores, (scores * scale).logsumexp(-1, keepdim=True)


def live_scores(q: Tensor, x: Tensor | Ragged, live: Tensor) -> tuple[Tensor | Ragged, Tensor]:
    """Multiply the query heads of each group with the first `live` rows of each sequence ([1] or
    [B], int64), as `row_scores` does; the other rows get minus infinity. q [B G g C], x [B G S C]
    -> [B G g S] (fp32), and numbers of which the largest is each head's largest score, [B G g n],
    where n is left to the backend"""
    scores = without_missing(filled(ops.row_scores(q, x)), live, float("-inf"))
    tops = scores.amax(-1, keepdim=True)
    return with_sizes(scores, x, 3), tops


def add_received(
    sums: Tensor, q: Tensor, k: Tensor | Ragged, lse: Tensor, scale: float, live: Tensor | None
) -> None:
    """Add the attention weights that one query of each sequence gives its first `live` tokens (all
    of them if None), summed over the query heads of each KV head, to the first S entries of `sums`
    [B G C] (fp32), in place. H2O (arXiv 2306.14048)

    q [B H 1 D], k [B G S D], lse [B H]: the log-sum-exp of each query's whole softmax."""
    logits = filled(ops.row_scores(q.view(*k.shape[:2], -1, q.shape[3]), k)).flatten(1, 2)
    weights = (logits * scale - lse.unsqueeze(-1)).exp()
    if live is not None:
        weights = without_missing(weights, live, 0)
    sums[..., : weights.shape[2]].add_(weights.unflatten(1, (k.shape[1], -1)).sum(2))


def row_weights(
    q: Tensor, x: Tensor | Ragged, scale: float, reduce: str, live: Tensor | None = None
) -> Tensor | Ragged:
    """Turn the products of the query heads of each group with every row of an index (`row_scores`)
    into one softmax weight per KV head and row (`group_weights`). q [B G g C], x [B G S C] ->
    [B G S] (fp32)

    live: only the first `live` rows of each sequence ([1] or [B], int64) count, as in
    `live_scores`; the others weigh nothing."""
    scores = ops.row_scores(q, x) if live is None else ops.live_scores(q, x, live)[0]
    return ops.group_weights(scores, scale, reduce)


def channel_scores(q: Tensor, x: Tensor, channels: Tensor) -> Tensor:
    """Multiply queries and keys only in the chosen channels. q [B G g r], x [B G D S], channels [B
    G r] -> [B G g S] (fp32)

    SparQ (arXiv 2312.04985): x holds the keys one channel per row, so that only r of its D rows are
    read."""
    return q.to(x.dtype).float() @ gather_rows(x, channels).float()


@by_sequence
def channel_sums(q: Tensor, x: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply queries and keys only in the chosen channels, as `channel_scores` does. Return the
    products summed over the g query heads of a group, [B G S], and for each head the log-sum-exps
    of its products over each of P parts of the tokens, [B G g P]; here P is 1."""
    scores = channel_scores(q, x, channels)
    return scores.sum(2), scores.logsumexp(-1, keepdim=True)


@by_sequence
def channel_weights(
    q: Tensor, x: Tensor, channels: Tensor, scale: float, reduce: str, times: int
) -> Tensor:
    """Turn the products of queries and keys in the chosen channels (`channel_scores`) into one
    softmax weight per KV head and token (`group_weights`), and repeat each `times` times, for the
    tokens of a page. q [B G g r], x [B G D S], channels [B G r] -> [B G S * times] (fp32)"""
    weights = ops.group_weights(channel_scores(q, x, channels), scale, reduce)
    return weights if times == 1 else weights.repeat_interleave(times, -1)


@by_sequence
def group_weights(logits: Tensor, scale: float, reduce: str) -> Tensor:
    """Turn logits into one weight per KV head and token: the softmax over the S candidates in each
    query head, then over the query heads of a group their sum (`reduce` "sum") or the largest
    ("largest").

    logits [B G g S], before the factor `scale` -> [B G S] (fp32)"""
    weights = (logits.float() * scale).softmax(-1)
    return weights.sum(2) if reduce == "sum" else weights.amax(2)


@by_sequence
def group_margins(
    logits: Tensor,
    tops: Tensor | None,
    candidates: int,
    reach: float,
    most: int,
    read: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return how far the logits of the first `candidates` tokens lie below the largest logit of
    their query head, and how many tokens a sequence is to read (InfiniGen, arXiv 2406.19707). Of
    the g query heads of a group, the one in which a token lies least far below counts.

    logits [B G g S] -> the margins [B G candidates] (fp32, 0 or negative), and the numbers of
    tokens [B]: how many margins are at least -`reach`, as the mean over KV heads, rounded down, and
    from 1 to `most`. `tops` [B G g n], if given: their maximum is taken as the largest logit of a
    query head. `read` [B], if given: the numbers of tokens are added to it, in place."""
    largest = (logits if tops is None else tops).float().amax(-1, keepdim=True)
    margins = (logits.float() - largest)[..., :candidates].amax(2)
    return margins, mean_counts((margins >= -reach).sum(-1), most, read)


def mean_counts(near: Tensor, most: int | PerSequence, read: Tensor | None) -> Tensor:
    """Return how many tokens each sequence is to read, [B]: the mean over its KV heads of the
    counts `near` [B G], rounded down, and from 1 to `most`. If `read` [B] is given, add the result
    to it."""
    limit = (
        most.on(near.device) if isinstance(most, PerSequence) else torch.full_like(near[:, 0], most)
    )
    counts = near.double().mean(1).long().clamp(min=1).minimum(limit)
    if read is not None:
        read += counts
    return counts


def pq_scores(q: Tensor, centroids: Tensor, codes: Tensor) -> Tensor:
    """Approximate the logits, unscaled, of product-quantised keys. q [B H 1 D], centroids
    [B G m C d'], codes [B G S m] -> [B G g S] (fp32)

    PQCache (arXiv 2407.12820): each sub-vector has a table of q . centroid; codes look it up, and
    the results are summed."""
    batch, groups, parts, clusters, width = centroids.shape
    split = q.reshape(batch, groups, -1, parts, width).permute(0, 1, 3, 4, 2)  # [B G m d' g]
    table = (centroids.float() @ split.float()).flatten(0, 3)  # a row per centroid, g wide
    first = torch.arange(0, table.shape[0], clusters, device=q.device).view(batch, groups, 1, parts)
    picked = table.index_select(0, (codes + first).view(-1)).view(
        batch, groups, codes.shape[2], parts, -1
    )
    return picked.sum(3).transpose(2, 3)


@by_sequence
def pq_weights(q: Tensor, centroids: Tensor, codes: Tensor, scale: float) -> Tensor:
    """Return the softmax of the logits that `pq_scores` approximates from codes, times `scale`,
    summed over the query heads of a group. q [B H 1 D], centroids [B G m C d'], codes [B G S m] ->
    [B G S] (fp32)"""
    return group_weights(pq_scores(q, centroids, codes), scale, "sum")


def pq_held(codes: Tensor, clusters: int) -> Tensor:
    """Count the tokens of each cell, a pair of codes of product-quantised keys with two parts of
    `clusters` centroids each. codes [B G S 2] -> [B G clusters**2] (int32)"""
    cells = codes[..., 0].long() * clusters + codes[..., 1]
    held = torch.zeros((*codes.shape[:2], clusters**2), dtype=torch.int32, device=codes.device)
    return held.scatter_add_(2, cells, held.new_ones(1).expand_as(cells))


def pq_best(
    q: Tensor,
    centroids: Tensor,
    codes: Tensor,
    held: Tensor,
    scale: float,
    count: int | PerSequence,
) -> Tensor:
    """Find the `count` tokens with the largest weights that `pq_weights` computes from codes of two
    parts. q [B H 1 D], centroids [B G 2 C d'], codes [B G S 2] -> [B G count]

    held [B G C*C]: what `pq_held` counted in the codes, by which other backends choose among pairs
    of codes in place of tokens."""
    return ops.top_k(ops.pq_weights(q, centroids, codes, scale), count)


@by_sequence
def rebuild_keys(
    u: Tensor, basis: Tensor, chunks: Tensor, size: int, cos: Tensor, sin: Tensor,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rebuild the keys of chunks, each of `size` consecutive tokens, from low-rank factors, and
    rotate them.

    u [B S r], basis [B G r D], numbers of chunks [B G K], cos, sin [P R] -> [B G K * size D].
    ShadowKV (arXiv 2410.21465): a token's position is its row of u, of cos and of sin; both halves
    of cos and sin are alike. Sequences that differ have cos, sin [1 P R].

    out, contiguous: the keys are written there; where a chunk is negative it stays as it is."""
    if out is not None:
        new = rebuild_keys(u, basis, chunks.clamp(min=0), size, cos, sin)
        return _replaced(out, chunks, new)
    positions = ops.token_rows(chunks, size)
    batch, groups, count = positions.shape
    cos, sin = cos.flatten(0, -2), sin.flatten(0, -2)
    rows = gather_rows(u.unsqueeze(1), positions.reshape(batch, 1, groups * count)).unflatten(
        2, (groups, count)
    )
    # every KV head as a sequence of its own
    plain = (rows.squeeze(1) @ basis).float().flatten(0, 1).unsqueeze(1)
    at = positions.flatten(0, 1)
    return (
        rotate(plain, cos[at].float(), sin[at].float())
        .unflatten(0, (batch, groups))
        .squeeze(2)
        .to(u.dtype)
    )


def last_alike(keys: Tensor, threshold: float) -> Tensor:
    """Return for each key the number of the last other one whose cosine with it is more than
    `threshold`, which is positive; 0 if there is none. keys [B G S D] -> [B G S]. R-KV (arXiv
    2505.24133)"""
    units = unit_vectors(keys)
    numbers = torch.arange(units.shape[2], device=units.device, dtype=torch.int32)
    last = torch.empty(units.shape[:3], dtype=torch.int64, device=units.device)
    for start in range(0, units.shape[2], 256):  # bounds the matrix of products
        part = slice(start, start + 256)
        alike = units[:, :, part] @ units.mT
        alike.diagonal(start, -2, -1).zero_()
        last[:, :, part] = torch.where(alike > threshold, numbers, 0).amax(-1)
    return last


def unit_vectors(x: Tensor) -> Tensor:
    """Return x [... D] with vectors of length 1, in fp32."""
    return normalize(x.float(), dim=-1, eps=1e-8)


def likeliest_tokens(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the most likely token of each row of logits [B V], the first of equal ones, and below
    it 1 where the row holds neither NaN nor infinity (its sum is finite), else 0: [2 B] int64. NaN
    counts as the largest. The result is written to `out` if it is given."""
    out = (
        torch.empty(2, len(logits), dtype=torch.int64, device=logits.device) if out is None else out
    )
    out[0] = logits.argmax(-1)
    out[1] = logits.sum(-1, dtype=torch.float32).isfinite()
    return out
