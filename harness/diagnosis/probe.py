"""A cache that follows a needle through every layer and step of an answer, and can change what the layers read.

What a layer read is what the contract says of it (`KVLayer.selected_positions`). Attention over these tokens is then
computed once more from the keys and values of the whole prompt, kept beside the method's own: exactly, and with other
tokens added where `reads` says so. The method goes on choosing from what it sees; only the layer's output is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from harness.engine.cache import KVCache
from kernels.sink_logits import softmax
from methods.base import AttnInput, CacheState, KVLayer
from methods.pools import KVStore

Reads = Literal["own", "exact", "needle", "all"]
"""own: the layer's output stays. In its place, exact attention over: the tokens it read (exact), these and the needle
(needle), the whole prompt (all)."""


class Probe(KVCache):
    """For one sequence. Call `follow` before its first step."""

    def __init__(self, layers: Sequence[KVLayer], state: CacheState) -> None:
        super().__init__(layers, state)
        self.reads: Reads = "own"
        self.needle = torch.empty(0, dtype=torch.int64)
        self.stored = [
            KVStore(layer.spec, CacheState(state.request), state.request.capacity) for layer in self.method_layers
        ]
        self.prompt = 0  # tokens sealed
        self.held: list[Tensor] = []  # one number per layer and step, in the order of the calls
        self.mass: list[Tensor] = []

    def follow(self, needle: Sequence[int], reads: Reads) -> None:
        """`needle`: positions in the sealed prompt."""
        self.needle = torch.tensor(needle, dtype=torch.int64, device=self.state.request.device)
        self.reads = reads

    def seal(self) -> None:
        super().seal()
        self.prompt = self.stored[0].length

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        out = super().attend(layer, x)
        own = self.layers[layer]
        if own.spec.window is not None:  # a layer that slides chooses nothing
            return out
        self.stored[own.spec.index].append(x.k, x.v)
        return self._probed(own, x, out) if self.sealed else out

    def shares(self, name: Literal["held", "mass"], last: int) -> list[list[float]]:
        """The method's layers x the `last` steps. held: share of the needle's tokens that a selecting head read, mean
        over heads; mass: attention weight on them among all that was read, mean over query heads."""
        calls: list[Tensor] = getattr(self, name)
        steps = (
            torch.stack(calls).view(-1, len(self.stored)).T[:, -last:] if calls else torch.empty(len(self.stored), 0)
        )
        return [[round(share, 3) for share in row] for row in steps.tolist()]

    def _probed(self, layer: KVLayer, x: AttnInput, out: Tensor) -> Tensor:
        store = self.stored[layer.spec.index]
        q = x.q.view(*store.k.shape[:2], layer.spec.group, -1)  # [1 G g D]
        logits = (q @ store.k.transpose(-1, -2)).float() * layer.spec.scale  # [1 G g N]
        read = self._read(layer, store.length)
        weights = softmax(logits.masked_fill(~read, float("-inf")), layer.spec.sink_logits)
        self.held.append(read[..., self.needle].float().mean().cpu())
        self.mass.append(weights[..., self.needle].sum(-1).mean().cpu())
        if self.reads == "own":
            return out
        if self.reads == "needle":
            read = read.index_fill(-1, self.needle, True)
        elif self.reads == "all":
            read = torch.ones_like(read)
        weights = softmax(logits.masked_fill(~read, float("-inf")), layer.spec.sink_logits)
        return (weights @ store.v.float()).to(out.dtype).view_as(out)

    def _read(self, layer: KVLayer, stored: int) -> Tensor:
        """Which tokens each head read in this step. -> bool [1 G 1|g N]"""
        prompt = self._among(layer, stored, slice(0, self.prompt), layer.selected_positions())
        return prompt & self._among(layer, stored, slice(self.prompt, stored), layer.generated_positions())

    def _among(self, layer: KVLayer, stored: int, part: slice, positions: Tensor | None) -> Tensor:
        """Of this part of the tokens those at `positions`, None for all; and all others. -> bool [1 G 1|g N]"""
        groups = layer.spec.num_kv_heads
        heads = groups if positions is None else positions.shape[1]
        found = torch.ones(1, heads, stored + 1, dtype=torch.bool, device=self.needle.device)
        if positions is not None:  # -1, where a head read fewer, is the place behind the last token
            found[..., part] = False
            found.scatter_(2, positions % (stored + 1), True)
        return found[..., :stored].view(1, groups, heads // groups, stored)
