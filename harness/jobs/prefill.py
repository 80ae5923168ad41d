"""A prefilled prompt with the memory and backends that it used, and one prefill for several methods
(`shared_prefill=true`).

Methods whose prefill is dense compute the same prompt outputs as Full and differ only in what they
keep and read. So Full attends once per prompt, and every method absorbs the same keys and values.
Scores and fidelity are those of separate runs. Times are not, so these runs are marked `simulated`
and their speed cells stay empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.fidelity import reference_layers
from harness.engine.states import fresh_states
from harness.models.devices import parts_of
from harness.results.fact import Value, largest
from kernels import ops
from methods.base import AttnInput, CacheState, KVLayer
from methods.tiers.tier import DEVICE

Absorb = Callable[[KVLayer, AttnInput], None]
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Usage:
    """Measures what runs inside `with Usage(...)`: the backends that operations used, and the peak
    of memory; None where the system does not report a peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backends: dict[str, list[str]] = {}
        self.host_bytes: Value = None  # the most resident memory of the process
        # the most that torch had allocated on CUDA devices; null on the CPU
        self.device_bytes: Value = None

    def __enter__(self) -> Self:
        ops.forget_used()
        self._knows_host = False
        with suppress(OSError):  # then the record of this process's peak would include earlier work
            _RESET.write_text("5")
            self._knows_host = True
        if self.device.type == "cuda":
            for part in parts_of(self.device):
                torch.cuda.reset_peak_memory_stats(part)
        return self

    def __exit__(self, *_: object) -> None:
        self.backends = ops.used_backends()
        if self._knows_host:
            lines = _STATUS.read_text().splitlines()
            peak = next(line for line in lines if line.startswith("VmHWM:"))
            self.host_bytes = int(peak.split()[1]) * 1024
        if self.device.type == "cuda":
            self.device_bytes = sum(map(torch.cuda.max_memory_allocated, parts_of(self.device)))

    def add(self, other: Usage) -> None:
        """Merge the measurement of another stretch of work into this one."""
        for name, used in other.backends.items():
            self.backends[name] = sorted({*self.backends.get(name, ()), *used})
        self.host_bytes = largest([self.host_bytes, other.host_bytes])
        self.device_bytes = largest([self.device_bytes, other.device_bytes])


class Prefilled(NamedTuple):
    """A prompt that has been prefilled but not sealed: the method has not reduced its cache yet.
    `began`: the clock's time when the prefill began; `usage`: memory and backends that it used."""

    cache: KVCache
    logits: Tensor  # [B V], of its last token
    began: float
    usage: Usage


class _Front(KVCache):
    """The cache that Full attends with in a shared prefill: it passes each layer's input on to the
    caches of the other methods (`followers`)."""

    def __init__(
        self,
        layers: Sequence[KVLayer],
        state: CacheState,
        followers: Sequence[tuple[KVCache, Absorb]],
    ) -> None:
        super().__init__(layers, state)
        self.followers = followers

    def note_length(self, tokens: int) -> int:
        for cache, _ in self.followers:
            cache.note_length(tokens)
        return super().note_length(tokens)

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        out = super().attend(layer, x)
        for cache, absorb in self.followers:
            absorb(cache.layers[layer], x)
        return out


class SharedPrefill:
    """Prefills `prompts` [B S] once and fills a cache for each of several methods. Call `cache`
    once per method, then `run`."""

    def __init__(self, engine: Engine, prompts: Tensor, new_tokens: int) -> None:
        self.engine, self.prompts, self.new_tokens = engine, prompts, new_tokens
        request = engine.attachment.request(
            capacity=prompts.shape[1] + new_tokens, batch=len(prompts)
        )
        self.state = CacheState(replace(request, budget=None, placement=DEVICE, codec=None))
        self.layers = reference_layers(engine.attachment.model_specs, self.state)
        self.followers: list[tuple[KVCache, Absorb]] = []

    def cache(self, engine: Engine, absorb: Absorb) -> KVCache:
        """Return an empty cache of `engine`'s method, which `run` will fill. `absorb` is called
        with each layer of that cache and the layer's attention input."""
        cache = engine.cache(self.prompts, self.new_tokens, self.layers)
        self.followers.append((cache, absorb))
        return cache

    def run(self, tokens: int) -> Tensor:
        """Prefill the first `tokens` of each prompt into all caches, and return the last token's
        logits [B V]."""
        front = _Front(self.layers, self.state, self.followers)
        front.rotary = self.engine.attachment.rotary
        front.states = fresh_states(self.engine.model.config)
        front.fed.set(self.prompts)
        logits = self.engine.prefill(front, self.prompts[:, :tokens])
        for cache, _ in self.followers:
            cache.num_tokens = front.num_tokens
            if front.states is not None:
                cache.states = front.states.copy()
            if cache.before_seal is not None:
                cache.before_seal.note(self.prompts[:, :tokens])
        return logits
