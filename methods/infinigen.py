"""InfiniGen: guesses a layer's tokens from the attention input of the layer before it (OSDI'24,
arXiv 2406.19707).

The rule: once per model, an orthogonal matrix A per KV head is computed that turns the rotated
queries of a calibration text so that few columns hold most of them. A prompt's keys, turned by A,
are kept on the device in those columns in which the prompt's own queries or keys are largest
(partial keys). At each step, layer l's query projection is applied to the input of layer l-1. The
guessed query times the partial keys tells which tokens come within `alpha` of the largest logit of
a query head. How many they are, as the mean over the KV heads and at most the budget, is how many
tokens every KV head fetches. Each sequence of a batch has a number of its own.

The released code takes one mean count for all sequences. Its Llama code takes columns from one
fixed prompt, and the largest logit of the first head for all heads; here the paper's rule holds.
The mean is over counts per KV head, which are larger with grouped query heads.

With rotary positions A must act after the rotation, on queries and keys alike; folded into the
weights, as for OPT, it would destroy the logits. With grouped heads a token's score is its best
margin in the group; the paper has no groups.

The budget replaces the paper's cap on fetched tokens. Generated tokens count when the largest logit
is sought. A limited host pool (`pool_capacity`) loses a token of each KV head for every one that
comes in. In the paper each prompt token fetches others before it enters the pool; the seal replays
that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from kernels import ops
from kernels.matmul import matmul
from kernels.partial import Guess, NewPartial
from kernels.partial import narrowed as narrowed_queries
from kernels.per_sequence import CountedOnDevice, PerSequence, most_of
from kernels.ragged import Ragged, filled, leading
from kernels.reference import Segment
from methods.abilities.kept_codec import KeptCodec
from methods.base import (
    AttnInput,
    CacheState,
    Cost,
    KVLayer,
    LayerSpec,
    LayerWorkload,
    Reading,
)
from methods.base.pieces import pieces
from methods.base.request import QUERIES
from methods.base.state import queues
from methods.budget import Plan, check_layers
from methods.layers import Layer, Padded, Policy, Storage
from methods.layers.limited_pool import Eviction, Fetched, Pooled, PooledMethod, leading_columns
from methods.parts import costs
from methods.parts.partial_keys import GrowingRows, column_mass, largest, narrowed, skewed, skewing

OF_EACH = {"basis": Padded(3, changes=False, most="widest"), "partial": None}


class Follower(NamedTuple):
    """Hold the policy of the next layer (`read`) for which this layer guesses the tokens to read.
    `rows`: which of the sequences that step together that policy serves; None: all."""

    read: InfiniGenRead
    rows: slice | None = None

    def guess(self, x: AttnInput, new: NewPartial | None) -> NewPartial | None:
        if self.rows is None:
            return self.read.guess(x, new)
        own = replace(x, hidden=x.hidden[self.rows], cos=x.cos[self.rows], sin=x.sin[self.rows])
        self.read.guess(own, None)
        return new


class InfiniGenRead(Pooled, capturable=True, of_each=OF_EACH):
    """Read in each step the prompt tokens that were guessed from the attention input of the layer
    before. There are no sinks and no window: the whole budget limits that choice.

    A sequence reads n' tokens per KV head: how many come within `alpha` of the largest logit, on
    average over its heads, from one to the budget. On a GPU, and while steps are captured in a CUDA
    graph, the host does not know n': as many tokens as the budget allows are chosen, best first,
    and the device reads or moves the first n' of them."""

    diagnostics = (*Pooled.diagnostics, "counts", "read_in_steps")
    method: InfiniGen
    # policies of the next layer: for several sequences, one for all or one each
    followers: tuple[Follower, ...] = ()
    basis: Tensor  # [B G D d'], the chosen columns of A
    partial: GrowingRows  # [B G C d'], skewed keys of all tokens, those of the prompt first
    guessed: Fetched | None = None  # rows and counts for the current step
    # [B], n' of each sequence: so many of its `rows` [B G max n'], which stand best first, are read
    counts: Tensor
    # [B], prompt tokens read in joint steps of several sequences
    read_in_steps: Tensor | None = None
    like_before = True  # the layer before rotates as this one does
    all_alike = True  # all layers do

    def split(self, budget: int) -> Plan:
        return Plan(sinks=0, local=0, top=budget)

    def index(self, keys: Tensor) -> None:
        """Build what later steps guess from: the prompt's keys [B G S D], skewed (multiplied by the
        matrix A of the KV head) and reduced to the columns in which the prompt's queries, or keys,
        are largest."""
        width, _ = self.method.columns(self.spec.head_dim)
        chosen = largest(self.query_mass, width)
        if self.method.column_rule == "union":
            chosen |= largest(column_mass(keys, self.spec.num_kv_heads, self._skew), width)
        columns = skewed(
            torch.eye(self.spec.head_dim, device=keys.device).expand(*keys.shape[:2], -1, -1),
            self._skew,
        )
        self.basis = narrowed(columns, chosen).to(keys.dtype)
        self.partial = GrowingRows(self.cache, matmul(keys, self.basis), self.request.capacity)
        if self.slots is not None:
            kept = ops.gather_rows(self.partial.filled, self.fill())
            self.partial = GrowingRows(self.cache, kept, self.store.k_rows.shape[2])

    def guessed_query(self, before: AttnInput) -> Tensor:
        """Return a guess of this layer's rotated query: its query projection applied to the
        attention input of the layer before, at the same position. [B H T D]"""
        return ops.rotate(*self._rotating(before))

    def _rotating(self, before: AttnInput) -> tuple[Tensor, Tensor, Tensor]:
        """Return a guess of this layer's query before its rotation, [B H T D], and the cos and sin
        by which this layer rotates it, [1|B T R]: a query that the model changes after its rotation
        is already rotated. The layer before may rotate otherwise, where a model has layers that do
        not rotate."""
        device, finish = self.request.device, self.spec.finish_query
        cos, sin = before.cos, before.sin
        places = (before.start, before.hidden.shape[1], device)
        if not self.like_before:
            turns = self.spec.rope(self.cache.counters.positions(*places))
            cos, sin = (part.to(before.cos.dtype) for part in turns)
        query = self.spec.project_query(before.hidden.to(device))
        cos, sin = cos.to(device), sin.to(device)
        if finish is not None:
            rotated = ops.rotate(query, cos, sin)
            query = finish(rotated, self.cache.counters.positions(*places))
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        return query, cos, sin

    def fetches(self, q: Tensor) -> Fetched:
        return self.nearest(narrowed_queries(q, self.basis, self.spec.scale))

    def nearest(self, query: Tensor) -> Fetched:
        """Choose the prompt tokens to read for queries [B G g d'] in the chosen columns, by
        approximate logits: in every KV head as many of the best as come, on average over the KV
        heads, within `alpha` of a query head's largest logit, from one to the budget. Return rows
        [B G K] and how many of them each sequence reads, [B]. Nothing is fetched here."""
        assert self.plan is not None
        (logits, tops), limit = self.partial.scores(query), cast(int | PerSequence, self.plan.top)
        if self.pool is not None:
            logits, tops = self.present(logits), None
        ranks, counts = ops.group_margins(
            logits, tops, self.sealed, self.method.alpha, limit, self.read_in_steps
        )
        if self.method.group_rank == "prob_sum":
            weights = ops.group_weights(leading(logits, self.sealed), 1.0, "sum")
            ranks = weights if isinstance(weights, Ragged) else self.present(weights)
        if not self._reads_counts:
            counted = CountedOnDevice(counts, most_of(limit))
            return filled(ops.top_k(ranks, counted)), counts
        rows = ops.top_k(ranks, int(counts.max()))
        if len(counts) > 1:
            rows = rows.gather(2, ranks.gather(2, rows).argsort(2, descending=True))
        return rows, counts

    @property
    def _reads_counts(self) -> bool:
        """Return whether the host reads how many tokens a step fetches. On a GPU it does not, since
        it would have to wait for the device."""
        return not (self.cache.counters.running or queues(self.request.device))

    def guess(self, before: AttnInput, new: NewPartial | None) -> NewPartial | None:
        """Choose the prompt tokens that this layer reads in the coming step, from the attention
        input of the layer before, and start to fetch them if they are not on the device. Write the
        partial key `new` of that layer in the same launch, or return it if that is not possible."""
        if self.plan is None or not self.selects_next:
            return new
        takes = new is None or new.k.device == self.request.device
        guess = Guess(*self._rotating(before), self.basis, self.spec.scale)
        self.guessed = self.nearest(ops.partial_products(guess, new if takes else None))
        if self.layer.far is not None:
            self._send_for(*self.guessed)  # they arrive while the layer before computes
        return None if takes else new

    def select(self, q: Tensor, top: int) -> Tensor:
        """Return the tokens that were chosen while the layer before computed, [B G K]. The query q
        is not used: it is known too late to fetch tokens for it."""
        assert self.guessed is not None
        (rows, self.counts), self.guessed = self.guessed, None
        if self.pool is not None:
            self.pool.fetched(rows, self.counts)
        return rows

    def decode(self, x: AttnInput) -> Tensor:
        new = None if self.plan is None else self.partial.take_in(x.k, self.basis)
        for follower in self.followers:
            new = follower.guess(x, new)
        if new is not None:
            ops.partial_products(None, new)
        return super().decode(x)

    def lend(self, x: AttnInput) -> Tensor:
        if self.plan is not None:  # what was guessed for the layer's own queries serves others
            assert self.rows is not None
            self.guessed = self.rows, self.counts
        out = super().lend(x)
        self.guessed = None
        return out

    def fetch(self, rows: Tensor) -> Segment:
        if self.arrival is None:
            self._send_for(rows, self.counts)
        return super().fetch(rows)

    def _send_for(self, rows: Tensor, counts: Tensor) -> None:
        unread = (
            None
            if self._reads_counts
            else torch.where(leading_columns(rows, counts), -1, 0).expand(rows.shape)
        )
        self.send_for(rows, unread)

    def attend(self, q: Tensor, *segments: Segment) -> Tensor:
        """Attend to segments under one softmax, q [B H 1 D] -> [B H 1 D]; of the chosen rows each
        sequence reads only as many as its count says."""
        if self.plan is None or (self._reads_counts and len(self.counts) == 1):
            return super().attend(q, *segments)
        # the chosen rows are the first segment if they were fetched, else the one with `rows`
        fetched = self.layer.far is not None
        limited = (
            x._replace(live=self.counts) if x.rows is not None or (fetched and not place) else x
            for place, x in enumerate(segments)
        )
        return super().attend(q, *limited)

    def bind(self, layer: Storage) -> None:
        super().bind(layer)
        self.guesses = not self.request.covers_all(self.spec.index)
        shape = (
            (self.request.batch, self.spec.num_kv_heads, self.spec.head_dim) if self.guesses else 0
        )
        self.query_mass = torch.zeros(shape, device=self.request.device)  # sum of |q A|

    def observe(self, x: AttnInput) -> None:
        for read in (follower.read for follower in self.followers if follower.read.rehearses):
            for part in pieces(x.q.shape[2]):
                hidden, cos, sin = (whole[:, part] for whole in (x.hidden, x.cos, x.sin))
                before = replace(x, hidden=hidden, cos=cos, sin=sin, start=x.start + part.start)
                read.rehearsed.append(read.guessed_query(before))
        if self.guesses:
            self.query_mass += column_mass(x.q, self.spec.num_kv_heads, self._skew)

    @property
    def _skew(self) -> Tensor | None:
        """Return the orthogonal matrix A of each KV head, [G D D], which concentrates queries in
        few columns; None if keys are not skewed."""
        matrices = self.request.prepared if self.method.skew else None
        return matrices[self.spec.index] if isinstance(matrices, tuple) else None

    @property
    def widest(self) -> int:
        """Return the most columns that partial keys (keys reduced to a few columns) can have, which
        is at most twice the fewest."""
        return self.method.columns(self.spec.head_dim)[1]

    def forget(self, count: int, rows: Tensor) -> None:
        if self.plan is not None:
            self.partial.keep_of_last(count, rows)

    def grow(self, more: int) -> None:
        super().grow(more)
        if self.plan is not None:
            self.partial.grow(more)

    def count_replayed(self, steps: int) -> None:
        super().count_replayed(steps)
        if self.plan is not None:
            self.partial.length += steps

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"query_mass": self.query_mass}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.query_mass.copy_(state["query_mass"])

    def together_refusal(self) -> str | None:
        # a guess then needs the positions, which each sequence has for itself
        if not self.all_alike:
            return "some layers do not rotate, and others guess for them"
        if self.spec.finish_query is not None:
            return "the model norms or scales queries after their rotation"
        return super().together_refusal()

    def joined(self) -> dict[str, Tensor]:
        read = self.read_in_steps
        return super().joined() | ({} if read is None else {"read_in_steps": read})

    def link(self, members: Sequence[Policy], joint: Mapping[int, Policy]) -> None:
        """Find the policies of the next layer for which this joint policy guesses: one for all
        sequences, or one each where the next layer takes a step for one sequence after the other.
        `members`: the policies of the single sequences that this one stands for; `joint`: the id of
        a member's policy -> the joint policy that steps instead of it."""
        if self.plan is not None:
            self.read_in_steps = torch.zeros(
                self.request.batch, dtype=torch.int64, device=self.request.device
            )
        reads = [
            follower.read
            for member in members
            for follower in cast(InfiniGenRead, member).followers
        ]
        places = {id(joint.get(id(read), read)): joint.get(id(read), read) for read in reads}
        if len(places) < 2:
            self.followers = tuple(Follower(cast(InfiniGenRead, read)) for read in places.values())
            return
        ends = accumulate(read.request.batch for read in reads)
        rows = [slice(end - read.request.batch, end) for read, end in zip(reads, ends, strict=True)]
        self.followers = tuple(map(Follower, reads, rows))

    def hand_back(self, member: Policy, own: slice) -> None:
        super().hand_back(member, own)
        if self.read_in_steps is not None:
            assert isinstance(member, InfiniGenRead)
            if self.rows is not None and member.plan is not None:
                member.rows = self.rows[own, ..., : member.plan.top]
            member.counts = self.counts[own].clone()
            member.read_in_steps = self.read_in_steps[own].clone()
            self.read_in_steps[own] = 0

    @property
    def reading(self) -> Reading:
        prompt, generated = super().reading
        if self.plan is None or self.rows is None:
            return prompt, generated
        counts = self.counts.double().mean().item() if self._reads_counts else self.counts
        return counts, generated

    def readings(self, steps: int) -> Reading:
        read, self.read_in_steps = self.read_in_steps, None
        prompt, generated = super().readings(steps)
        return prompt if read is None else read, generated

    def check_choice(self, rows: Tensor, top: int | None) -> None:
        """Raise `ReturnedError` unless each head's chosen `rows` are different tokens of the
        prompt. Rows beyond a sequence's count are not read and may be any."""
        given = f"{type(self).__name__}.select returned"
        choosing = (self.spec.num_kv_heads, self.spec.num_heads)
        self.layer.check_rows(given, self.selected_rows(), self.sealed, heads=choosing, gaps=True)

    def selected_rows(self) -> Tensor | None:
        """Return the prompt tokens that the last step read, [B G K], with -1 where a sequence reads
        fewer tokens than another; None if it read all."""
        rows = super().selected_rows()
        return None if rows is None else rows.masked_fill(~leading_columns(rows, self.counts), -1)


@dataclass(frozen=True, kw_only=True)
class InfiniGen(PooledMethod):
    """Define InfiniGen, which guesses a layer's tokens from the attention input of the layer
    before, by its parameters. conf/method/infinigen.yaml explains each."""

    offloads = True
    no_latents = "it skews the keys of each head, and all heads share one latent"
    takes = {KeptCodec: None}
    needs = (QUERIES,)
    tunable = {
        "alpha": (4, 8, 16, 99),
        "partial_ratio": (0.1, 0.2, 0.4, 1),
        "column_rule": ("query",),
    }
    alpha: float = 5.0
    partial_ratio: float = 0.2
    dense_layers: tuple[int, ...] = (0, 1)
    skew: bool = True
    calibration_tokens: int = 2048
    column_rule: Literal["query", "union"] = "union"
    group_rank: Literal["margin_max", "prob_sum"] = "margin_max"
    pool_capacity: float | None = None
    pool_policy: Eviction = "counter"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha < 0:
            raise ValueError(
                f"alpha={self.alpha} is negative: it is a distance below the largest logit, 4 to 5."
            )
        if not 0 < self.partial_ratio <= 1:
            raise ValueError(
                f"partial_ratio={self.partial_ratio} must be a share of columns, above 0 and up to 1."
            )
        if 0 not in self.dense_layers:
            raise ValueError(
                f"dense_layers={self.dense_layers} must hold 0: no layer before it could guess for it."
            )
        if self.calibration_tokens < 1:
            raise ValueError(
                f"calibration_tokens={self.calibration_tokens} must be at least 1, 2048 in the paper."
            )
        for name, choices in (
            ("column_rule", ("query", "union")),
            ("group_rank", ("margin_max", "prob_sum")),
        ):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r} is unknown: choose {' or '.join(choices)}.")

    def columns(self, head_dim: int) -> tuple[int, int]:
        """Return the fewest and the most columns of a partial key, which holds a part of a key's
        `head_dim` columns: more than `partial_ratio` of them where those of queries and of keys are
        united."""
        width = int(self.partial_ratio * head_dim)
        return width, min(2 * width, head_dim) if self.column_rule == "union" else width

    def reads_whole(self, case: LayerWorkload) -> bool:
        return super().reads_whole(case) or case.spec.index in self.dense_layers

    def cost(self, case: LayerWorkload) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case)
        case, tables = self.kept(case)
        mass = costs.FP32 * case.spec.num_kv_heads * case.spec.head_dim
        index = Cost(self._partial_bytes(case, case.capacity + 1) + mass)
        index = index.reading(self._partial_bytes(case, case.sealed))
        return costs.select(case, Plan(0, 0, case.budget), index_bytes=0) + index + tables

    def _partial_bytes(self, case: LayerWorkload, rows: int) -> int:
        """Return the most bytes of `rows` rows of partial keys (keys reduced to a few columns) and
        of the basis that reduces queries to the same columns, for all KV heads of a layer. One more
        row than there are tokens is held, filled with zeros; on a GPU instead as many as round the
        number up to a multiple of 16."""
        dim = case.spec.head_dim
        return case.spec.num_kv_heads * self.columns(dim)[1] * (rows + dim) * case.element_bytes

    def prepare(
        self, specs: Sequence[LayerSpec], observe: Callable[[int], Iterator[AttnInput]]
    ) -> tuple[Tensor, ...] | None:
        """Compute once per model, from calibration text, the matrix A of every layer, [G D D]: per
        KV head the principal directions of the queries of its query heads, stacked. None if `skew`
        is off."""
        if not self.skew:
            return None
        inputs = zip(specs, observe(self.calibration_tokens), strict=True)
        return tuple(skewing(x.q, spec.num_kv_heads) for spec, x in inputs)

    def check_model(self, spec: LayerSpec) -> None:
        check_layers("method.dense_layers", self.dense_layers, spec.num_layers)
        if self.columns(spec.head_dim)[0] < 1:
            raise ValueError(
                f"partial_ratio={self.partial_ratio} is less than one column of a key of {spec.head_dim}: choose at "
                f"least {1 / spec.head_dim:.4g}."
            )

    def start(self, specs: Sequence[LayerSpec], cache: CacheState) -> list[KVLayer]:
        cache = cache.with_dense(self.dense_layers)
        reads = [InfiniGenRead() for _ in specs]
        for read, following in pairwise(reads):
            read.followers = (Follower(following),)
        for before, after in pairwise(specs):
            reads[after.index].like_before = before.rope_like == after.rope_like
        for read in reads:
            read.all_alike = all(other.like_before for other in reads)
        return [Layer(spec, cache, self, read) for spec, read in zip(specs, reads, strict=True)]
