"""KIVI: keeps and reads every token, all but the last in few bits (arXiv 2402.02750, ICML'24).

The rule: keys have channels that are large throughout, so each channel has a range of its own for
every `group` tokens. Values have no such channels, so each token has a range for every `group`
channels. Keys are quantised `residual` tokens at a time, prompt and generated ones alike, and those
that do not fill such a block wait in full precision. A value is read as codes once `residual` newer
ones are there: the last `residual` are always exact, as in the released code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kernels import ops
from kernels.coded import Coded
from kernels.reference import Segment
from kernels.step_inputs import record_input
from methods.base import (
    SELDOM,
    AttnInput,
    Cost,
    LayerSpec,
    LayerWorkload,
)
from methods.layers import Layer, PolicyMethod
from methods.parts import costs
from methods.pools import KVStore, Pool
from methods.tiers.codec import IntCodec
from methods.tiers.tier import DEVICE


class KiviLayer(Layer, capturable=True):
    """Hold a layer's tokens as quantised codes, except the latest ones, which wait in the store in
    full precision until they fill a block, and the exact values of the last block of codes."""

    method: Kivi
    # codes of several sequences, which do not change
    parts: tuple[list[Coded], Coded] | None = None
    recent: Tensor | None = None  # [B G residual D], the values of the last block of codes, exact

    def seal(self) -> None:
        super().seal()
        self._quantise()

    def prepare(self) -> None:
        super().prepare()
        self._quantise()

    def steps_alike(self) -> float:
        return min(super().steps_alike(), self.method.residual - self.store.length)

    def decode(self, x: AttnInput) -> Tensor:
        self._quantise()
        return super().decode(x)

    def _quantise(self) -> None:
        waiting, each = self.store, self.method.residual
        if self.cache.counters.running:  # `prepare` has done it
            return
        if not (count := self.method.whole_blocks(waiting.length)):
            return
        if self.far is None:
            self.far = self.new_pool(self.request.capacity)
        self.far.append(waiting.k[:, :, :count], waiting.v[:, :, :count])
        self.recent = waiting.v[:, :, count - each : count].clone()
        rest = waiting.between(count, waiting.length)[:2]
        self.store = KVStore.holding(self.spec, self.cache, each - rest[0].shape[2], rest)

    def attend_all(self, q: Tensor) -> Tensor:
        if self.far is None:
            return super().attend_all(q)
        older, last = self.parts or self._parts(self.far)
        assert self.recent is not None
        recent = record_input("recent", self.recent), self.store.count(-1)
        k, v = ops.decode_rows(last, None, None, self.request.dtype, recent)
        return self.attend(q, *older, Segment(k, v), self.store.since(0))

    def _parts(self, far: Pool) -> tuple[list[Coded], Coded]:
        """Return the codes of all blocks of tokens but the last, as a list that is empty if there
        are none, and the codes of the last block."""
        (codes,) = far.segments().wait()
        assert isinstance(codes, Coded)
        count = far.length - self.method.residual
        return ([codes.tokens(0, count)] if count else []), codes.tokens(count, far.length)

    def new_pool(self, room: int) -> Pool:
        return Pool(self.spec, self.cache, self.method.whole_blocks(room), self.method.codec)

    def joined(self, layers: Sequence[Layer], dead: int | None) -> None:
        exact = [
            layer.recent for layer in cast(Sequence[KiviLayer], layers) if layer.recent is not None
        ]
        if self.far is not None:
            self.recent = torch.cat([*exact, *[torch.zeros_like(exact[0][:1])] * (dead or 0)])
            self.parts = self._parts(self.far)

    def together_refusal(self) -> str | None:
        if self.far is not None and self.far.tier != DEVICE:
            return f"codes of placement={self.far.tier} come for one sequence after the other"
        return super().together_refusal()

    def bring_back(self) -> None:
        waiting, quantised = self.store.length, self.away
        super().bring_back()
        if quantised:  # the values that fewer than `residual` tokens follow are exact
            assert self.recent is not None
            self.store.v[:, :, quantised - self.method.residual + waiting : quantised] = (
                self.recent[:, :, waiting:]
            )
        self.recent = None

    @property
    def bytes_read(self) -> float:
        recent = (
            0
            if self.recent is None
            else self.recent[:, :, : 1 + self.method.residual - self.store.length].nbytes
        )
        return super().bytes_read + recent

    def state(self) -> dict[str, Tensor]:
        return super().state() | ({} if self.recent is None else {"recent": self.recent})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        recent = state.get("recent")
        self.recent = None if recent is None else recent.to(self.request.device, copy=True)

    def grow(self, more: int) -> None:
        super().grow(more)
        if (quantised := self.far) is not None:
            self.store.resize(self.method.residual - self.store.length)  # no more tokens wait
            self.far = self.new_pool(self.request.capacity)
            self.far.take(quantised.held())

    def capture_refusal(self) -> str | None:
        if (each := self.method.residual) < SELDOM:
            return f"residual={each} tokens are quantised every {each} steps"
        return super().capture_refusal()


@dataclass(frozen=True, kw_only=True)
class Kivi(PolicyMethod):
    """Define KIVI, which keeps and reads all tokens, most of them quantised, by its parameters.
    `bits` of a code: 2, 4 or 8. `group`: how many numbers share a range. `residual`: how many
    tokens' keys are quantised together, and how many of the last values are exact."""

    layer = KiviLayer
    uses_budget = False
    offloads = True
    no_latents = "it writes keys by channels and values by tokens, and a latent is both"
    tunable = {
        "bits": (2, 4, 8),
        "group": (16, 32, 64),
        "residual": (64, 128, 256),
    }

    bits: int = 4
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.residual < 1 or self.residual % self.codec.block:
            raise ValueError(
                f"residual={self.residual} must be a multiple of group={self.group}: so many tokens are quantised at "
                "a time, a group of each channel together."
            )

    @property
    def codec(self) -> IntCodec:
        return IntCodec(bits=self.bits, group=self.group)

    def whole_blocks(self, tokens: int) -> int:
        return tokens // self.residual * self.residual

    def cost(self, case: LayerWorkload) -> Cost:
        if not (quantised := self.whole_blocks(case.sealed)):
            return costs.dense(case)
        room = self.whole_blocks(case.capacity)
        # what waits, and values that have codes
        exact = self.residual * (case.row_bytes + case.row_bytes // 2)
        waiting = case.sealed - quantised
        # these have values alone
        exactly = waiting * case.row_bytes + (self.residual - waiting) * case.row_bytes // 2
        return Cost(exact).reading(exactly) + costs.pool(case, self.codec, room, quantised)

    def check_model(self, spec: LayerSpec) -> None:
        if spec.value_channels != spec.head_dim:
            raise ValueError(
                f"{type(self).__name__} writes values as wide as keys, and this model's are not: choose another "
                "method, such as SnapKV."
            )
        self.codec.for_layer(spec)
