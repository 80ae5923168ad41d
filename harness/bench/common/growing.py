"""A batch that grows, and the memory that it takes."""

from __future__ import annotations

import argparse
import gc
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.bench.common.measure import estimate, marks, seconds
from harness.bench.common.synthetic import LayerShape
from harness.engine.attach import Attachment
from harness.engine.batch.running import RunningBatch
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from harness.engine.graph import graphs_on
from harness.machines.allocations import Allocations
from harness.machines.plan import CHUNK
from methods.tiers.tier import DEVICE, HOST

SIZES = 12  # batches that are timed, at most: up to 2048 sequences


class Memory:
    """Counts what is taken at most: on a GPU by torch's allocator, else by a hook on what makes tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counted = device, Allocations()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.before = self._taken()

    def counting(self) -> Any:
        return nullcontext() if self.device.type == "cuda" else self.counted

    def most(self) -> int:
        """Bytes on the device at most, without what was there before."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return self.counted.peaks[DEVICE]

    def now(self) -> int:
        """Bytes on the device now, without what was there before."""
        return self._taken() - self.before if self.device.type == "cuda" else self.counted.alive[DEVICE]

    def left(self) -> int:
        """Bytes that are still taken."""
        gc.collect()
        return self._taken() - self.before

    def _taken(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self.counted.alive.total()


class GrowingBatch:
    """Sequences of the same prompt `ids` [1 S] that decode together, one more at a time. `prompt`: bytes that are kept
    free for computing a prompt that nobody computes."""

    def __init__(self, kv: Attachment, ids: Tensor, options: argparse.Namespace, prompt: int) -> None:
        self.kv, self.ids, self.options, self.prompt = kv, ids, options, prompt
        self.weights = weights = sum(x.nbytes for x in kv.model.parameters())
        graphs = graphs_on(kv.model.device) if options.graphs else None
        self.engine = Engine(kv, prefill_chunk=CHUNK if kv.method.dense_prefill else None, graphs=graphs)
        self.batch, self.memory = RunningBatch(self.engine), Memory(kv.model.device)
        self.taken, self.host = weights, 0  # of the device at most, and of the host, by those that fit
        self.refused: dict[str, int] = {}  # what the batch took that memory does not hold, where that is known
        self.steps = max(3, (options.new - 2) // SIZES)  # at each size, the first untimed

    @torch.inference_mode()
    def join(self) -> None:
        """Let one more run, which takes a step by itself first, for some methods make room then. Raises
        `torch.OutOfMemoryError`."""
        cache = self.kv.start(KVCache, capacity=self.ids.shape[1] + self.options.new)
        logits = self._filled(cache) if self.options.synthetic else self.engine.prefill(cache, self.ids, whole=True)
        ending: Any = {"began": perf_counter(), "max_new_tokens": self.options.new}
        first = RunningBatch(self.engine)
        slot = first.join(cache, logits, self.ids[:, :0], **ending)
        first.step()
        first.leave(slot)
        self.batch.join(cache, logits, self.ids[:, :0], **ending)

    def _filled(self, cache: KVCache) -> Tensor:
        """Random keys and values, layer by layer, as a prompt comes."""
        model, spec = self.kv.model, self.kv.specs[0]
        shape = LayerShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, model.dtype, model.device)
        for index, layer in enumerate(cache.layers):
            shape.fill([layer], self.ids.shape[1], attending=not self.kv.method.dense_prefill)
            if cache.closes_early:
                cache.close(index)
        cache.num_tokens = self.ids.shape[1]
        return torch.zeros(1, model.config.vocab_size, device=model.device)

    def ended_by(self) -> str | None:
        """Which memory the sequence that joined last exceeds; where none is, what is taken so far fits."""
        taken, limit = self.weights + self.memory.most(), self.options.host_memory
        wanted = max(taken, self.weights + self.memory.now() + self.prompt)
        host = self.host + footprint(self.batch.slots[-1].cache.layers)[HOST]
        exceeded = (
            DEVICE if wanted > self.options.device_memory else HOST if limit is not None and host > limit else None
        )
        if exceeded:
            self.refused = {"device_bytes": wanted, "host_bytes": host}
        else:
            self.taken, self.host = taken, host
        return exceeded

    def timed(self) -> dict[str, Any]:
        """Steps of those that run."""
        self.batch.step()
        times = [seconds(self.batch.step, self.kv.model.device) for _ in range(self.steps - 1)]
        step = estimate(times)
        return {
            "batch": len(self.batch.slots),
            "tpot_s": step,
            "rate": len(self.batch.slots) / step.median,
            "device_bytes": self.taken,
            "host_bytes": self.host,
            "plain_steps": self.engine.plain_steps,
            "one_by_one": self.engine.one_by_one,
            **marks(times),
        }
