"""InfLLM: reads a local window and retrieved blocks of the far context, at prefill too (arXiv
2402.04617).

The rule: tokens that leave the window fill blocks. A block's representative is, per query head, the
mean key of the tokens that drew the most attention while they were in the window. An execution
block of queries (a single one when decoding) reads the best blocks, the same for all heads, by the
summed product with its mean query. Tokens at a distance of `n_local` or more are read as if they
all stood n_local - 1 before the query, so no distance exceeds the window. So the prompt's outputs
differ from Full's, and a prefill cannot be shared with this method.

The budget fixes the window and the number of blocks: first tokens, window, the tokens between
window and last block, and the blocks read are within it. A prefill in several chunks spends the
budget of the tokens so far. Window and block of queries shrink with the budget, the released ones
do not. Keys of blocks are stored as if they stood at position 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from kernels.sink_logits import lse_with_sink, with_sink
from methods.abilities.bounded_answer import BoundedAnswer
from methods.abilities.kept_codec import KeptCodec
from methods.base import (
    AttnInput,
    Cost,
    CostError,
    LayerWorkload,
    Plan,
)
from methods.layers import RotatingMethod, Select, Storage, ends
from methods.parts import costs
from methods.parts.rope_table import RopeTable


class InfLLMRead(Select, capturable=True):
    """Read in each step the first tokens, a local window, and the blocks of earlier tokens that
    suit the query best. Keys of blocks are stored as if they stood at position 0, all others in
    their true rotation."""

    by_room = {"mass": 2, "far_k": 2}
    method: InfLLM
    mass: Tensor  # [B H C], attention that each token drew
    representatives: Tensor  # [B H N D], of the blocks
    blocks = 0  # blocks filled so far
    n_local = 0  # length of the window
    # [B G F D], rotated to position 0: first tokens, then tokens after the blocks that left the window
    far_k: Tensor
    # position of the first token that has not left the window; the room after it is for the others
    far_end = 0

    def select(self, q: Tensor, top: int) -> Tensor:
        """Return the tokens of the best blocks, `top` tokens in all and the same for all KV heads,
        [B G top]. The best blocks have the largest product of their representatives with the mean
        of queries q [B H T D], summed over heads."""
        scores = ops.row_scores(q.mean(2, keepdim=True), self.representatives).sum((1, 2))
        best = ops.top_k(scores, top // self.method.block).unsqueeze(1)
        return ops.token_rows(best.expand(-1, self.spec.num_kv_heads, -1), self.method.block)

    def _fill_blocks(self, seen: int) -> None:
        """Make blocks of tokens that have left the window, as soon as there are enough for one:
        move their keys to position 0 and compute their representatives. `seen`: tokens so far."""
        size = self.method.block
        filled = (seen - self.n_local - self.method.n_init) // self.method.block
        if filled <= self.blocks:
            return
        start, end = (self.method.n_init + count * size for count in (self.blocks, filled))
        self.store.k[:, :, start:end] = keys = self._moved(start, end)
        means = representatives(keys, self.mass[:, :, start:end], size, self.method.repr_topk)
        self.representatives = torch.cat([self.representatives, means], 2)
        self.blocks = filled

    def prefill(self, x: AttnInput) -> Tensor:
        self.rope_table.note(x)
        if not self.sparse:
            return self.layer.attend_prompt(x.q)
        tokens, first = self.layer.spendable(), x.start
        # everything is local while the text is short
        self.n_local, reads = (self.layer.seen, 0) if tokens is None else self.method.spend(tokens)
        batch, heads, tokens, _ = x.q.shape
        out = x.q.new_empty(batch, tokens, heads, x.v.shape[3]).transpose(1, 2)
        block = min(self.method.exc_block, self.n_local)
        for q, block_out in zip(x.q.split(block, dim=2), out.split(block, dim=2), strict=True):
            far_q = self._far_query(q, first)
            if count := min(reads, self.blocks):
                self.rows = self.select(far_q, count * self.method.block)
            block_out.copy_(self._execute(q, far_q, first))
            first += q.shape[2]
            self._fill_blocks(first)
        return out

    def _execute(self, q: Tensor, far_q: Tensor, first: int) -> Tensor:
        """Attend from a block of queries, under one softmax, to the chosen blocks of tokens, the
        first tokens and the window, and add to `mass` what each token of the window received. q
        [B H T D] at positions from `first` on; far_q: the same queries rotated for tokens outside
        the window."""
        end, scale = first + q.shape[2], self.spec.scale
        # from there on, tokens are in no block and are no first tokens
        outside = self._after if self.blocks else 0
        far_end = end - self.n_local  # tokens before it are far, at least from the last query
        near = max(outside, first - self.n_local + 1)
        k, v = self.store.k[:, :, near:end], self.store.v[:, :, near:end]
        parts = [(q, k, v, scale, first - near, self.n_local)]
        if self.blocks:
            n_init, every_v = self.method.n_init, self.store.v
            keys, values = self._moved(0, n_init), every_v[:, :, :n_init]
            if self.rows is not None:
                blocks = (x[:, :, n_init:] for x in (self.store.k, every_v))
                more_keys, more_values = (ops.gather_rows(x, self.rows) for x in blocks)
                keys, values = torch.cat([keys, more_keys], 2), torch.cat([values, more_values], 2)
            count = keys.shape[2]
            parts.append((far_q, keys, values, scale, count, end + count))
        if far_end > outside:
            keys, values = self._moved(outside, far_end), self.store.v[:, :, outside:far_end]
            parts.append((far_q, keys, values, scale, first - self.n_local - outside, end))
        outs, lses = zip(*(ops.windowed_attention(*part) for part in parts), strict=True)
        lse, sinks = torch.stack(lses).logsumexp(0), self.spec.sink_logits
        drawn = ops.windowed_sums(
            q, k, lse_with_sink(lse, sinks), scale, first - near, self.n_local
        )
        self.mass[:, :, near:end] += drawn
        return with_sink(ops.merge_attention(outs, lses) if len(parts) > 1 else outs[0], lse, sinks)

    def split(self, budget: int) -> Plan:
        """Say how the budget is spent once the prompt is complete, and arrange the keys for decode
        steps. The plan's window includes the tokens that have left the window but fill no block
        yet."""
        self.n_local, _ = self.method.spend(budget)
        self._fill_blocks(self.sealed)
        size, n_init, self.far_end = self.method.block, self.method.n_init, self._after
        local = self.sealed - self.far_end
        room = n_init + self.request.capacity - self.n_local - self.far_end
        self.far_k = self.store.k.new_empty(*self.store.k.shape[:2], room, self.spec.head_dim)
        self.far_k[:, :, :n_init] = self._moved(0, n_init)
        self._leave(self.sealed - self.n_local)
        return Plan(n_init, local, min((budget - n_init - local) // size, self.blocks) * size)

    def decode(self, x: AttnInput) -> Tensor:
        self.rope_table.note(x)
        return super().decode(x)

    def read(self, x: AttnInput, plan: Plan) -> Tensor:
        far_q = self._far_query(x.q, x.start)
        rows = self.chosen(far_q, plan.top)
        window = x.start - self.n_local + 1
        self._leave(window)
        if self.layer.far is not None:
            self.send_for(rows)  # they arrive while the window is attended to
        near = self._near(window)
        near_out, near_lse = ops.segment_attention_with_lse(x.q, [near], self.spec.scale)
        far_out, far_lse = ops.segment_attention_with_lse(far_q, self._far(rows), self.spec.scale)
        out, lse = ops.merge_attention_with_lse([far_out, near_out], [far_lse, near_lse])
        sinks = self.spec.sink_logits
        drawn = self.layer.weights(x.q, near, lse_with_sink(lse, sinks))
        self.mass.index_add_(2, self._positions(window, x.start + 1), drawn)
        return with_sink(out, lse, sinks)

    def __init__(self, rope_table: RopeTable) -> None:
        self.rope_table = rope_table

    def bind(self, layer: Storage) -> None:
        super().bind(layer)
        spec, request = self.spec, self.request
        shape = (request.batch, spec.num_heads)
        self.sparse = not request.covers_all(spec.index)
        room = request.capacity if self.sparse else 0
        self.mass = torch.zeros(*shape, room, device=request.device)
        self.representatives = torch.empty(
            *shape, 0, spec.head_dim, dtype=request.dtype, device=request.device
        )

    def _far_query(self, q: Tensor, first: int) -> Tensor:
        """Rotate queries [B H T D], at positions from `first` on, as if they stood n_local - 1
        after keys at position 0: so all tokens outside the window are read at that distance."""
        return self.rope_table.move(q, self._positions(first, first + q.shape[2]), self.n_local - 1)

    @property
    def _after(self) -> int:
        """Return the position of the first token after all those that are in blocks."""
        return self.method.n_init + self.blocks * self.method.block

    def _leave(self, window: int) -> None:
        """Note that the tokens before position `window` have left the window: store their keys
        among the far ones, rotated to position 0."""
        if self.far_end < window:
            place = self.far_end - self._after + self.method.n_init
            self.cache.counters.write(self._moved(self.far_end, window), self.far_k, 2, place)
            self.far_end = window

    def _far(self, rows: Tensor) -> list[Segment]:
        first = self.method.n_init
        after = self._after - self.layer.away
        counters = self.cache.counters
        v = self.store.v
        blocks = self.middle()._replace(rows=rows) if self.layer.far is None else self.fetch(rows)
        left = self.far_end - self._after
        if counters.running:
            room = self.far_k.shape[2] - first
            live = counters.tensor(left, self.far_k.device)
            others = Segment(
                self.far_k[:, :, first:], self.store.v_rows[:, :, after : after + room], live=live
            )
        else:
            others = Segment(self.far_k[:, :, first : first + left], v[:, :, after : after + left])
        return [Segment(self.far_k[:, :, :first], v[:, :, :first]), blocks, others]

    def _near(self, window: int) -> Segment:
        """Return keys and values of the window: the n_local tokens from position `window` on."""
        first = window - self.layer.away
        if not self.cache.counters.running:
            return self.store.since(first)
        rows = self._positions(first, first + self.n_local)
        return Segment(
            self.store.k_rows.index_select(2, rows), self.store.v_rows.index_select(2, rows)
        )

    def _moved(self, start: int, end: int) -> Tensor:
        """Return the keys of the tokens from position `start` to `end`, rotated as if they all
        stood at position 0. They must be in the store and not in blocks on the host."""
        positions = self._positions(start, end)
        keys = self.store.k_rows.index_select(
            2, positions - self.layer.away if start else positions
        )
        return self.rope_table.move(keys, positions, 0)

    def _positions(self, start: int, end: int) -> Tensor:
        return self.cache.counters.positions(start, end - start, self.request.device)

    def state(self) -> dict[str, Tensor]:
        """Return what a further turn needs besides keys and values: the attention that each token
        received, the representatives of blocks, and the positions by which keys are rotated, since
        those of blocks are stored at 0."""
        seen = self._positions(0, self.layer.seen)
        rotated = torch.where((seen >= self.method.n_init) & (seen < self._after), 0, seen)
        return {
            "mass": self.mass[..., : self.layer.seen],
            "representatives": self.representatives,
            "rotated": rotated,
        }

    def truncate(self, state: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        return {
            "mass": ends(state["mass"], first, last),
            "representatives": state["representatives"][:, :, :0],
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.rope_table.note_past(self.spec, self.layer.seen)
        self.mass[..., : state["mass"].shape[2]] = state["mass"]
        self.representatives = state["representatives"]
        self.blocks = state["representatives"].shape[2]

    def count_replayed(self, steps: int) -> None:
        super().count_replayed(steps)
        self.far_end += steps


def representatives(keys: Tensor, drawn: Tensor, block: int, top: int) -> Tensor:
    """Return, per query head and block of `block` tokens, the mean key of the `top` tokens that
    drew the most attention.

    keys [B G N*block D], drawn (their attention) [B H N*block] -> [B H N D]"""
    per_head = keys.unflatten(2, (-1, block)).repeat_interleave(
        drawn.shape[1] // keys.shape[1], dim=1
    )
    best = drawn.unflatten(2, (-1, block)).topk(top).indices
    return per_head.gather(3, best.unsqueeze(-1).expand(*best.shape, keys.shape[3])).mean(3)


@dataclass(frozen=True, kw_only=True)
class InfLLM(RotatingMethod):
    """Define InfLLM, which reads a local window and retrieved blocks of earlier tokens, by its
    parameters. conf/method/infllm.yaml explains each."""

    offloads = True
    takes = {KeptCodec: None, BoundedAnswer: "its window slides over these"}
    dense_prefill = False
    window_names = {"sinks": "n_init", "recent_ratio": "local_ratio"}
    policies = (InfLLMRead,)
    tunable = {
        "n_init": (4, 64),
        "block": (8, 32),
        "local_ratio": (0.25, 0.75),
        "repr_topk": (1, 8),
    }

    n_init: int = 32
    block: int = 16
    local_ratio: float = 0.5
    repr_topk: int = 4
    exc_block: int = 512

    def __post_init__(self) -> None:
        if self.n_init < 0:
            raise ValueError(
                f"n_init={self.n_init} is negative: give the number of first tokens that are always read."
            )
        if self.block < 1 or self.exc_block < 1:
            raise ValueError(
                f"block={self.block} and exc_block={self.exc_block} must be at least 1: they are tokens."
            )
        if not 0 < self.local_ratio < 1:
            raise ValueError(
                f"local_ratio={self.local_ratio} must leave room for window and blocks: between 0 and 1."
            )
        if not 1 <= self.repr_topk <= self.block:
            raise ValueError(
                f"repr_topk={self.repr_topk} must lie in 1..{self.block}, the tokens of a block."
            )

    @property
    def smallest_budget(self) -> int:
        """Return the smallest possible budget in tokens: the first tokens, one local token, an
        almost full block, and one block to select."""
        return self.n_init + 2 * self.block

    def spend(self, budget: int) -> tuple[int, int]:
        """Split a budget of tokens: return n_local, the length of the window, and how many blocks a
        step reads. First tokens and an unfinished block are subtracted before."""
        spare = budget - self.n_init - (self.block - 1)
        blocks = max(1, int(spare * (1 - self.local_ratio) / self.block))
        return spare - blocks * self.block, blocks

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        """Return the tokens read when the budget is counted as in InfLLM's paper, where first
        tokens and an unfinished block come on top. Its released code also rounds the blocks up.
        `budget(n)`: the budget in tokens for a prompt of n; `sealed`: the prompt's length."""
        return self.n_init + self.block - 1 + budget(sealed - self.n_init)

    def cost(self, case: LayerWorkload) -> Cost:
        spec, sparse = case.spec, case.budget < case.sealed
        # weights drawn
        shared = costs.rope_table(case) + Cost(costs.FP32 * spec.num_heads * case.capacity * sparse)
        if self.reads_whole(case):
            return costs.dense(case) + shared
        blocks = (case.sealed - self.n_init - self.spend(case.budget)[0]) // self.block
        local = case.sealed - self.n_init - blocks * self.block
        top = min((case.budget - self.n_init - local) // self.block, blocks) * self.block
        representatives = spec.num_heads * blocks * spec.head_dim * case.element_bytes
        # keys moved, outside the blocks
        far = self.n_init + local - self.spend(case.budget)[0] + case.reserve
        chosen = costs.select(
            case, Plan(self.n_init, local, top), representatives + far * case.key_bytes
        )
        return (chosen + shared).reading(chosen.read_bytes_per_step - far * case.key_bytes)

    def at_communication(self, share: float, head_dim: int) -> InfLLM:
        """Return this method with each block represented by a `share` of its tokens, so that
        finding blocks reads that share of the key cache. The paper of PQCache (arXiv 2407.12820)
        compares methods at the same share."""
        tokens = int(share * self.block)
        if not 1 <= tokens <= self.block:
            raise CostError(
                f"comm={share} is less than a token of InfLLM's blocks of {self.block}: set method.block to "
                f"{ceil(1 / share)} or more (128 in the paper)."
            )
        return replace(self, repr_topk=tokens)
