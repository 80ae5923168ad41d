"""Prefill, seal, decode, with a clock: one generation gives the text and all its times.

The clock starts with the prefill; a token's time is when it is on the host. `seal` runs between the first and the
second token (protocol=prompt), so whatever a method does to digest a prompt is inside TT2T; under protocol=context it
runs before the question, which then goes through `decode` token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from harness.attach import Attachment
from harness.footprint import Footprint, footprint
from harness.hf import KVCache
from harness.sampling import Greedy, Sampler

Stop = Callable[[list[int]], str | None]  # tokens so far -> why to stop, or None
LENGTH = "length"


def never(tokens: list[int]) -> str | None:
    """Run to the length limit."""
    return None


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
    moved_bytes_per_step: float | None = None
    kv: Footprint = field(default_factory=Footprint)


class Engine:
    """Runs an attached model. `prefill_chunk`: tokens per prefill forward, None for all at once."""

    def __init__(self, attachment: Attachment, *, prefill_chunk: int | None = None) -> None:
        self.attachment = attachment
        self.model = attachment.model
        self.prefill_chunk = prefill_chunk

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
        batch, length = prompt.shape
        prompt = prompt.to(self.model.device)
        cache = self.attachment.cache(capacity=length + max_new_tokens, batch=batch)
        run = _Run(cache, list(stops or [never] * batch), sampler or Greedy(), max_new_tokens)
        split = length if context_tokens is None else context_tokens
        self._synchronize()
        run.start_clock()
        logits = self._prefill(prompt[:, :split], cache)
        if split < length:
            run.seal()
            logits = self._question(prompt[:, split:], cache, run)
        while run.take(logits):
            if not cache.sealed:
                run.seal()
            logits = self._step(run.last.to(self.model.device), cache)
            run.note_step()
        return run.finish()

    def _prefill(self, prompt: Tensor, cache: KVCache) -> Tensor:
        for chunk in prompt.split(self.prefill_chunk or prompt.shape[1], dim=1):
            logits = self._step(chunk, cache)
        return logits

    def _question(self, question: Tensor, cache: KVCache, run: _Run) -> Tensor:
        before = perf_counter()
        for token in question.split(1, dim=1):
            logits = self._step(token, cache)
            run.note_step()
        self._synchronize()
        run.out.question_s = perf_counter() - before
        return logits

    def _step(self, ids: Tensor, cache: KVCache) -> Tensor:
        """One forward. ids [B T] -> logits of the last token [B V]"""
        return self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


class _Run:
    """The state of one generation: its tokens, its clock, its counters."""

    def __init__(self, cache: KVCache, stops: list[Stop], sampler: Sampler, max_new_tokens: int) -> None:
        self.cache, self.stops, self.sampler, self.max_new_tokens = cache, stops, sampler, max_new_tokens
        self.out = Generation(tokens=[[] for _ in stops], stops=[""] * len(stops))
        self.last = torch.empty(0)
        self.prompt_reads: list[float] = []
        self.other_reads: list[float] = []
        self.moved_before = 0

    def start_clock(self) -> None:
        self.began = perf_counter()

    def seal(self) -> None:
        before = perf_counter()
        self.cache.seal()
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
        reads = [layer.attended for layer in self.cache.layers]
        self.prompt_reads.append(sum(r.prompt for r in reads) / len(reads))
        self.other_reads.append(sum(r.generated for r in reads) / len(reads))

    def finish(self) -> Generation:
        out, steps = self.out, len(self.prompt_reads)
        out.sealed = self.cache.sealed
        out.fallback = next((layer.fallback for layer in self.cache.layers if layer.fallback), None)
        out.kv = footprint(self.cache.layers)
        if steps:
            out.attended_prompt = sum(self.prompt_reads) / steps
            out.attended_total = out.attended_prompt + sum(self.other_reads) / steps
            out.moved_bytes_per_step = (self._moved() - self.moved_before) / steps
        return out

    def _moved(self) -> int:
        return self.cache.layers[0].request.traffic.total_bytes
