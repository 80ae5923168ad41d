"""Prefill, seal, decode, with a clock: one generation gives the text and all its times.

The clock starts with the prefill; a token's time is when it is on the host. `seal` runs between the first and the
second token (protocol=prompt), so whatever a method does to digest a prompt is inside TT2T; under protocol=context it
runs before the question, which then goes through `decode` token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.engine.fidelity import Fidelity
from harness.engine.footprint import Footprint, footprint
from harness.engine.forward import BlockForward, by_blocks
from harness.engine.graph import CapturedStep, StepCapture, capture_refusal
from harness.engine.sampling import Greedy, Sampler
from harness.engine.trace import Tracer
from harness.engine.wait import wait_for
from harness.prompts.teacher import Forced
from kernels.threads import step_threads
from methods.base import KVLayer
from methods.layers import DenseLayer

Stop = Callable[[list[int]], str | None]  # tokens so far -> why to stop, or None
LENGTH, FORCED = "length", "forced"


def union(layers: Sequence[KVLayer]) -> float:
    """Distinct prompt tokens that one KV head read in the last step, over all its query heads: mean over layers, heads
    and sequences. Counted from the positions themselves; waits for the device."""
    reads = [(layer.read_positions(), layer.attended.prompt) for layer in layers]
    counts = [whole if read is None else (read >= 0).sum(-1).double().mean().item() for read, whole in reads]
    return sum(counts) / len(counts)


def never(tokens: list[int]) -> str | None:
    """Run to the length limit."""
    return None


def after(count: int) -> Stop:
    """Stop behind the last of `count` tokens that were given."""
    return lambda tokens: FORCED if len(tokens) == count else None


@dataclass(slots=True)
class Generation:
    """What one batch of B equal-length sequences gave. Seconds count from the start of the prefill."""

    tokens: list[list[int]]  # per sequence, up to and with the token that stopped it
    stops: list[str]  # per sequence
    token_s: list[float] = field(default_factory=list)  # when step i's tokens were on the host
    seal_s: float | None = None
    question_s: float | None = None
    sealed: bool = False
    fallback: str | None = None
    attended_prompt: float | None = None  # mean over layers and steps
    attended_total: float | None = None
    union_prompt: float | None = None  # of the last step, mean over layers, see `union`
    moved_bytes_per_step: float | None = None
    hit_rate: float | None = None  # of a method's cache on the device; null where it has none
    kv: Footprint = field(default_factory=Footprint)
    fidelity: list[dict[str, Any] | None] | None = None  # per sequence
    nll: list[float] | None = None  # per sequence, where the tokens were given (harness/prompts/teacher.py)
    trace: dict[str, Any] | None = None  # of the whole batch
    capture_s: float | None = None  # capturing the decode step, inside the second token's time


class Engine:
    """Runs an attached model. `prefill_chunk`: tokens per prefill forward, None for all at once. `fidelity`: compare
    every n-th step with exact attention (engine/fidelity.py), 0 for never. `graphs`: decode steps are captured once
    and replayed where that can be (engine/graph.py); `plain_steps` says why some were not. `tracer`: clocks them."""

    tracer: Tracer | None = None
    plain_steps: str | None = None

    def __init__(
        self,
        attachment: Attachment,
        *,
        prefill_chunk: int | None = None,
        fidelity: int = 0,
        graphs: StepCapture | None = None,
    ) -> None:
        self.attachment = attachment
        self.model = attachment.model
        self.prefill_chunk = prefill_chunk
        self.fidelity = fidelity
        self.graphs = graphs
        self.forward, self.plain_reason = by_blocks(self.model)

    @torch.inference_mode()
    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        stops: Sequence[Stop] | None = None,
        context_tokens: int | None = None,
        sampler: Sampler | None = None,
    ) -> Generation:
        """prompt [B S]. `context_tokens`: seal after that many and decode the rest (protocol=context)."""
        prompt = prompt.to(self.model.device)
        context, question = prompt.tensor_split([prompt.shape[1] if context_tokens is None else context_tokens], dim=1)
        cache = self.cache(prompt, max_new_tokens)
        wait_for(self.model.device)
        began = perf_counter()
        logits = self.prefill(cache, context)
        return self.complete(
            cache, logits, question, began=began, max_new_tokens=max_new_tokens, stops=stops, sampler=sampler
        )

    def cache(self, prompt: Tensor, max_new_tokens: int, shared: list[DenseLayer] | None = None) -> KVCache:
        """A fresh cache for `prompt` [B S] and what follows; `shared`: layers that hold the prompt for fidelity."""
        batch, capacity = prompt.shape[0], prompt.shape[1] + max_new_tokens
        cache = self.attachment.start(KVCache, capacity=capacity, batch=batch)
        if self.fidelity:
            cache.watch = Fidelity(self.attachment.specs, cache.state.request, self.fidelity, shared)
        return cache

    @torch.inference_mode()
    def prefill(self, cache: KVCache, prompt: Tensor) -> Tensor:
        """-> logits of the last token [B V]"""
        for chunk in prompt.split(self.prefill_chunk or prompt.shape[1], dim=1):
            logits = self._step(chunk, cache)
        return logits

    @torch.inference_mode()
    def complete(
        self,
        cache: KVCache,
        logits: Tensor,
        question: Tensor,
        *,
        began: float,
        max_new_tokens: int,
        stops: Sequence[Stop] | None = None,
        sampler: Sampler | None = None,
    ) -> Generation:
        """Everything behind the prefill: question [B Q] (protocol=context, else Q = 0), seal, decode."""
        run = _GenerationState(cache, list(stops or [never] * len(logits)), sampler or Greedy(), max_new_tokens, began)
        if question.shape[1]:
            run.seal(self.model.device)
            logits = self._question(question, cache, run)
        while run.take(logits):
            if not cache.sealed:
                run.seal(self.model.device)
            logits = self._decode(run.last.to(self.model.device), cache, run)
        out = run.finish()
        self._note_plain_steps(run)
        if cache.watch is not None:
            exact = self.attachment.method.dense_prefill  # else Full's prompt is not the method's
            out.fidelity = [cache.watch.report(self.model, i, tokens, exact) for i, tokens in enumerate(out.tokens)]
        if self.tracer is not None:
            out.trace = self.tracer.take()
        return out

    def _question(self, question: Tensor, cache: KVCache, run: _GenerationState) -> Tensor:
        before = perf_counter()
        for token in question.split(1, dim=1):
            logits = self._decode(token, cache, run)
        wait_for(self.model.device)
        run.out.question_s = perf_counter() - before
        return logits

    def _decode(self, token: Tensor, cache: KVCache, run: _GenerationState) -> Tensor:
        if self.graphs is not None and run.step is None:
            run.capture(self.forward, self.graphs, self.tracer is not None)
        traced = self.tracer.step(cache) if self.tracer is not None else nullcontext()
        with traced, step_threads(self.model.device):
            logits = run.step(token) if run.step is not None else self._step(token, cache)
        run.note_step()
        if cache.watch is not None:
            cache.watch.note(token, logits)
        return logits

    def _step(self, ids: Tensor, cache: KVCache) -> Tensor:
        """ids [B T] -> logits of the last token [B V]"""
        if self.forward is not None:
            return self.forward(ids, cache)
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _note_plain_steps(self, run: _GenerationState) -> None:
        self.plain_steps = run.plain_steps or self.plain_steps
        if run.step is not None and run.step.failure is not None:
            self.plain_steps, self.graphs = run.step.failure, None  # one failure is enough


class _GenerationState:
    """The state of one generation: its tokens, its clock, its counters."""

    def __init__(self, cache: KVCache, stops: list[Stop], sampler: Sampler, max_new_tokens: int, began: float) -> None:
        self.cache, self.stops, self.sampler, self.max_new_tokens = cache, stops, sampler, max_new_tokens
        self.began = began
        self.out = Generation(tokens=[[] for _ in stops], stops=[""] * len(stops))
        self.last = torch.empty(0)
        self.prompt_reads: list[float] = []  # of each step, summed over the layers that know
        self.device_reads: list[Tensor] = []  # [layers B] of each step, of those whose count is on the device
        self.other_reads: list[float] = []
        self.moved_before = 0
        self.step: CapturedStep | None = None
        self.plain_steps: str | None = None  # why there is none

    def capture(self, forward: BlockForward | None, graphs: StepCapture, traced: bool) -> None:
        """Decode steps are captured, if they can be."""
        if self.plain_steps is None:
            self.plain_steps = "trace=on clocks each step's parts" if traced else capture_refusal(forward, self.cache)
        if self.plain_steps is None:
            assert forward is not None
            self.step = CapturedStep(forward, self.cache, graphs)

    def seal(self, device: torch.device) -> None:
        wait_for(device)  # under protocol=context the prefill may be under way
        before = perf_counter()
        self.cache.seal()
        wait_for(device)
        self.out.seal_s = perf_counter() - before
        self.moved_before = self._moved()

    def take(self, logits: Tensor) -> bool:
        """Pick the next token of every sequence, note its time; False once all have stopped."""
        ids = self.sampler.pick(logits).tolist()  # waits for the device: now the tokens are on the host
        self.out.token_s.append(perf_counter() - self.began)
        for i, token in enumerate(ids):
            if not self.out.stops[i]:
                self.out.tokens[i].append(token)
                full = len(self.out.tokens[i]) >= self.max_new_tokens
                self.out.stops[i] = self.stops[i](self.out.tokens[i]) or (LENGTH if full else "")
        self.last = torch.tensor(ids).unsqueeze(1)
        return not all(self.out.stops)

    def note_step(self) -> None:
        """Between two steps nothing waits for the device."""
        prompt, generated = zip(*(layer.reading for layer in self.cache.layers), strict=True)
        self.prompt_reads.append(sum(count for count in prompt if not isinstance(count, Tensor)))
        if unread := [count for count in prompt if isinstance(count, Tensor)]:
            self.device_reads.append(torch.stack(unread))  # a copy
        self.other_reads.append(sum(generated) / len(generated))

    def mean_prompt_reads(self) -> float:
        """Over layers and steps."""
        unread = torch.cat(self.device_reads).double().mean(1).sum().item() if self.device_reads else 0.0
        return (sum(self.prompt_reads) + unread) / (len(self.prompt_reads) * len(self.cache.layers))

    def finish(self) -> Generation:
        """The last token has its time: what is measured here is in no clock."""
        out, steps = self.out, len(self.prompt_reads)
        if steps:
            out.union_prompt = union(self.cache.layers)
        if self.step is not None:
            out.capture_s = self.step.capture_s
            self.step.close()
        out.sealed = self.cache.sealed
        out.fallback = next((layer.fallback for layer in self.cache.layers if layer.fallback), None)
        out.kv = footprint(self.cache.layers)
        out.nll = self.sampler.mean_nll() if isinstance(self.sampler, Forced) else None
        if steps:
            out.attended_prompt = self.mean_prompt_reads()
            out.attended_total = out.attended_prompt + sum(self.other_reads) / steps
            out.moved_bytes_per_step = (self._moved() - self.moved_before) / steps
        traffic = self.cache.traffic
        out.hit_rate = traffic.found / traffic.looked_up if traffic.looked_up else None
        return out

    def _moved(self) -> int:
        return self.cache.traffic.total_bytes
