"""InfLLM: a local window and retrieved blocks of the far context, at prefill too (arXiv 2402.04617).

Tokens that leave the window fill blocks. A block's representative is, per query head, the mean key of the tokens that
drew the most attention while they were in the window. An execution block of queries (a single one when decoding) reads
the best blocks, the same for all heads, by the summed product with its mean query. Tokens at a distance of `n_local`
or more are read as if they all stood n_local - 1 before the query, so no distance exceeds the window.

So the prompt's outputs are not Full's: this method cannot take over a shared prefill. The budget fixes window and
number of blocks: first tokens, window, the tokens between window and last block, and the blocks read are within it.
A prefill in several chunks spends the budget of what has come so far. Generated tokens are always read and enter
blocks only with a further turn. The released code's cache of recent blocks is left out: with placement=host every
block that is read is moved and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods.angles import Angles
from methods.base import AttnInput, KVLayer, LayerSpec, Method, Request
from methods.hitcache import token_rows
from methods.layers import Plan, SelectLayer


@dataclass(frozen=True, kw_only=True)
class InfLLM(Method):
    """The yaml explains the fields."""

    offloads: ClassVar[bool] = True
    dense_prefill: ClassVar[bool] = False
    exact_keys: ClassVar[bool] = False

    n_init: int
    block: int
    local_ratio: float
    repr_topk: int
    exc_block: int

    def __post_init__(self) -> None:
        if self.n_init < 0:
            raise ValueError(f"n_init={self.n_init} is negative: give the number of first tokens that are always read.")
        if self.block < 1 or self.exc_block < 1:
            raise ValueError(f"block={self.block} and exc_block={self.exc_block} must be at least 1: they are tokens.")
        if not 0 < self.local_ratio < 1:
            raise ValueError(f"local_ratio={self.local_ratio} must leave room for window and blocks: between 0 and 1.")
        if not 1 <= self.repr_topk <= self.block:
            raise ValueError(f"repr_topk={self.repr_topk} must lie in 1..{self.block}, the tokens of a block.")

    @property
    def smallest_budget(self) -> int:
        """First tokens, one local, an almost full block, and one to select."""
        return self.n_init + 2 * self.block

    def n_local(self, budget: int) -> int:
        """The window that leaves a whole number of blocks, with room for an unfinished one."""
        spare = budget - self.n_init - (self.block - 1)
        blocks = max(1, int(spare * (1 - self.local_ratio) / self.block))
        return spare - blocks * self.block

    def start(self, specs: Sequence[LayerSpec], request: Request) -> list[KVLayer]:
        angles = Angles(request.capacity)
        return [InfLLMLayer(spec, request, self, angles) for spec in specs]


class _Piece(NamedTuple):
    """Stored tokens at ascending positions."""

    k: Tensor  # [B G S D], rotated at their own positions
    v: Tensor
    positions: Tensor  # [S]


class InfLLMLayer(SelectLayer):
    """Its middle, the tokens to select from, are the blocks."""

    method: InfLLM
    blocks = 0
    window = 0  # n_local

    def __init__(self, spec: LayerSpec, request: Request, method: InfLLM, angles: Angles) -> None:
        super().__init__(spec, request, method)
        self.angles = angles
        budget, shape = request.budget, (request.batch, spec.num_heads)
        self.sparse = budget is not None and not budget.covers(request.capacity, spec.index)
        self.mass = torch.zeros(*shape, request.capacity if self.sparse else 0, device=request.device)
        self.representatives = torch.empty(*shape, 0, spec.head_dim, device=request.device)  # [B H N D]

    def absorb(self, x: AttnInput) -> None:
        raise ValueError("InfLLM cannot take over a shared prefill, for its own is sparse: run its prefill instead.")

    def prefill(self, x: AttnInput) -> Tensor:
        self.angles.note(x)
        super().absorb(x)
        if not self.sparse:
            out: Tensor = ops.prefill_attention(x.q, self.store.k, self.store.v, self.spec.scale)
            return out
        self.window = self._window()
        size = min(self.method.exc_block, self.window)
        return torch.cat([self._execute(q, x.start + i * size) for i, q in enumerate(x.q.split(size, dim=2))], 2)

    def _window(self) -> int:
        """n_local for what has come so far; all of it while that is little."""
        budget, seen = self.request.budget, self.seen
        assert budget is not None
        tokens = budget.tokens(seen, self.spec.index)
        whole = tokens >= seen or tokens < self.method.smallest_budget
        return seen if whole else self.method.n_local(tokens)
