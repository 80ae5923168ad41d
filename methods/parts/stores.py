"""Where keys and values lie. A store declares its tier; its bytes are measured from outside, on its tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods.base import CacheState, LayerSpec, Request

Tier = Literal["device", "host"]


class KVStore:
    """Rows of K and V in token order, preallocated. The tensors never move while the store lives, so a decode step
    that reads them can be captured."""

    tier: Tier = "device"

    def __init__(self, spec: LayerSpec, cache: CacheState, capacity: int) -> None:
        request = cache.request
        shape = (request.batch, spec.num_kv_heads, capacity, spec.head_dim)
        self.k_rows = self._allocate(shape, request)  # [B G C D]
        self.v_rows = self._allocate(shape, request)
        self.cache = cache
        self.length = 0

    def _allocate(self, shape: tuple[int, ...], request: Request) -> Tensor:
        return torch.empty(shape, dtype=request.dtype, device=request.device)

    @property
    def k(self) -> Tensor:
        """[B G S D], a view of what is stored."""
        return self.k_rows[:, :, : self.length]

    @property
    def v(self) -> Tensor:
        return self.v_rows[:, :, : self.length]

    def append(self, k: Tensor, v: Tensor) -> None:
        """k, v [B G T D]"""
        end = self.length + k.shape[2]
        if k.shape[0] != self.cache.request.batch:
            raise ValueError(f"The KV cache is for {self.cache.request.batch} sequences but was given {k.shape[0]}.")
        if end > self.k_rows.shape[2]:
            raise ValueError(
                f"The KV cache holds {self.k_rows.shape[2]} tokens but was given {end}: start it with a capacity for "
                "the prompt and all new tokens together."
            )
        self.cache.counters.write(k, self.k_rows, 2, self.length)
        self.cache.counters.write(v, self.v_rows, 2, self.length)
        self.length = end

    def since(self, start: int) -> Segment:
        """The tokens from the `start`-th on; while steps are captured, in all the room there is for them."""
        if not self.cache.counters.running:
            stored = slice(start, self.length)
            return Segment(self.k_rows[:, :, stored], self.v_rows[:, :, stored])
        live = self.cache.counters.tensor(self.length - start, self.cache.request.device)
        return Segment(self.k_rows[:, :, start:], self.v_rows[:, :, start:], live=live)


class HostStore(KVStore):
    """The same in host memory (pinned beside a CUDA device). Rows come to the device by `fetch`, and are counted."""

    tier: Tier = "host"

    def _allocate(self, shape: tuple[int, ...], request: Request) -> Tensor:
        return torch.empty(shape, dtype=request.dtype, pin_memory=request.device.type == "cuda")

    def append(self, k: Tensor, v: Tensor) -> None:
        super().append(k, v)
        self.cache.traffic.to_host_bytes += k.nbytes + v.nbytes

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [B G K] -> k, v [B G K D] on the device."""
        rows = rows.to(self.k_rows.device)
        return self._send(ops.gather_rows(self.k, rows)), self._send(ops.gather_rows(self.v, rows))

    def fetch_some(self, rows: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows [B G K] those numbered `which` [N], counted through all of them -> k, v [N D] on the device."""
        heads, capacity = self.k_rows.shape[0] * self.k_rows.shape[1], self.k_rows.shape[2]
        first = torch.arange(heads, device=rows.device).unsqueeze(1) * capacity
        wanted = (rows.flatten(0, 1) + first).flatten()[which].to(self.k_rows.device)
        return self._send(_flat_rows(self.k_rows, wanted)), self._send(_flat_rows(self.v_rows, wanted))

    def fetch_all(self) -> tuple[Tensor, Tensor]:
        return self._send(self.k), self._send(self.v)

    def _send(self, x: Tensor) -> Tensor:
        self.cache.traffic.to_device_bytes += x.nbytes
        return x.to(self.cache.request.device, non_blocking=True)


class RowStore:
    """Rows of one tensor for each KV head, copied to where `request.placement` says; chosen ones come to the device."""

    def __init__(self, x: Tensor, cache: CacheState) -> None:
        """x [B G S W]"""
        self.tier: Tier = cache.request.placement
        self.cache = cache
        if self.tier == "host":
            pinned = cache.request.device.type == "cuda"
            self.stored = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned).copy_(x)
            cache.traffic.to_host_bytes += x.nbytes
        else:
            self.stored = x.clone(memory_format=torch.contiguous_format)

    def fetch(self, rows: Tensor) -> Tensor:
        """rows [B G K] -> [B G K W] on the device"""
        found: Tensor = ops.gather_rows(self.stored, rows.to(self.stored.device))
        if self.tier == "host":
            self.cache.traffic.to_device_bytes += found.nbytes
        return found.to(self.cache.request.device, non_blocking=True)


def _flat_rows(x: Tensor, wanted: Tensor) -> Tensor:
    """x [B G C D], wanted [N], counted through the rows of all heads -> [N D]"""
    rows: Tensor = ops.gather_rows(x.flatten(0, 2)[None, None], wanted[None, None])
    return rows[0, 0]
