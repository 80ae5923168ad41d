"""Generates under a clock: prefill, seal and decode. One generation gives the answer and all its
times.

The clock starts with the prefill; a token's time is when it is on the host. The seal runs between
the first and the second token (protocol=prompt), so the time to the second token includes all that
a method does to digest a prompt. Under protocol=context it runs before the question, which is then
decoded token by token. Where rows leave the device (placement=host or disk), each layer seals
during the prefill, as soon as the prompt is through it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from harness.engine.attach import Attachment
from harness.engine.batch.generation import Generation, Stop
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import RunningSequence
from harness.engine.batch.stepper import Stepper
from harness.engine.cache import KVCache
from harness.engine.fidelity import Fidelity
from harness.engine.finite import NotFiniteError, not_finite
from harness.engine.forward import nothing
from harness.engine.graph import StepCapture
from harness.engine.sampling import Sampler
from harness.engine.wait import wait_for
from harness.models.devices import usual_chunk
from harness.prompts.teacher import Forced
from methods.base import KVLayer


class Engine(Stepper):
    """Run an attached model. `prefill_chunk`: tokens of a prompt that pass through a layer at once;
    None for the usual number on the model's device (harness/models/devices.py). `fidelity`: compare
    every n-th step with exact attention (engine/fidelity.py); 0 for never."""

    def __init__(
        self,
        attachment: Attachment,
        *,
        prefill_chunk: int | None = None,
        fidelity: int = 0,
        graphs: StepCapture | None = None,
    ) -> None:
        super().__init__(attachment, graphs)
        self.prefill_chunk = prefill_chunk or usual_chunk(self.model.device.type, attachment.method.dense_prefill)
        self.fidelity = fidelity

    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        stops: Sequence[Stop] | None = None,
        context_tokens: int | None = None,
        sampler: Sampler | None = None,
    ) -> Generation:
        """Answer `prompt` [B S]. `context_tokens`: seal after that many tokens and decode the rest
        (protocol=context). Raises `ValueError` if `prompt` is no prompt, and `NotFiniteError` if
        logits are NaN or infinite."""
        batch = RunningBatch(self)
        slot = self.join(
            batch,
            prompt,
            max_new_tokens=max_new_tokens,
            stops=stops,
            context_tokens=context_tokens,
            sampler=sampler,
        )
        generation = _to_the_end(batch, slot)
        if generation.not_finite is not None:
            raise self.not_finite(prompt, generation.tokens, generation.not_finite, context_tokens)
        return generation

    def not_finite(
        self, prompt: Tensor, answers: Sequence[Sequence[int]], token: int, context_tokens: int | None
    ) -> NotFiniteError:
        """Return the error for prompts [B S] in whose `answers` the logits of `token`, counted from
        0, are the first that are not finite. The attached model reads everything up to there again,
        by its own modules."""
        by_modules = copy(self)
        by_modules.forward = by_modules.graphs = by_modules.tracer = None
        by_modules.fidelity, tokens = 0, token + 1
        # an answer that ended before goes on with its last token
        fed = torch.tensor([[*answer, *[answer[-1]] * tokens][:tokens] for answer in answers])

        def read() -> None:
            batch = RunningBatch(by_modules)
            slot = by_modules.join(
                batch, prompt, max_new_tokens=tokens, context_tokens=context_tokens, sampler=Forced(fed)
            )
            _to_the_end(batch, slot)

        return not_finite(self.model, type(self.attachment.method).__name__, token, read)

    def join(
        self,
        batch: RunningBatch,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        stops: Sequence[Stop] | None = None,
        context_tokens: int | None = None,
        sampler: Sampler | None = None,
    ) -> RunningSequence:
        """Prefill `prompt` [1 S] and add it to `batch`, which this engine steps. Arguments as in
        `generate`."""
        _check(prompt, max_new_tokens, context_tokens)
        prompt = prompt.to(self.model.device)
        context, question = prompt.tensor_split([prompt.shape[1] if context_tokens is None else context_tokens], dim=1)
        cache = self.cache(prompt, max_new_tokens)
        wait_for(self.model.device)
        began = perf_counter()
        logits = self.prefill(cache, context, whole=True)
        return batch.join(
            cache, logits, question, began=began, max_new_tokens=max_new_tokens, stops=stops, sampler=sampler
        )

    def cache(self, prompt: Tensor, max_new_tokens: int, shared: Sequence[KVLayer] | None = None) -> KVCache:
        """Return a fresh cache for `prompt` [B S] and its answer. `shared`: layers that already
        hold the prompt for fidelity."""
        batch, capacity = prompt.shape[0], prompt.shape[1] + max_new_tokens
        cache = self.attachment.start(KVCache, capacity=capacity, batch=batch)
        cache.expect_text(prompt)
        if self.fidelity:
            cache.watch = Fidelity(self.attachment.model_specs, cache.state.request, self.fidelity, shared)
        return cache

    @torch.inference_mode()
    def prefill(self, cache: KVCache, prompt: Tensor, *, whole: bool = False) -> Tensor:
        """Compute the prompt [B S]. Return the logits of its last token [B V].

        `whole`: the turn's prompt ends here. Where rows leave the device or the method wants it,
        each layer then closes as soon as it is complete, and `seal` does the rest."""
        if cache.rotary is not None:
            cache.note_text(prompt, prompt=True)
        chunks = prompt.split(self.prefill_chunk or prompt.shape[1], dim=1)
        if self.forward is not None:
            complete = partial(self._close, cache) if whole and cache.closes_early else nothing
            return self.forward.prefill(chunks, cache, complete)
        for chunk in chunks:
            logits = self.run(chunk, cache)
        return logits

    @torch.inference_mode()
    def recompute(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Compute the text of `cache` again, as `model.generate` does when a text outgrows
        LongRoPE's original length.

        What was sealed before a question was read is sealed without it again, and the rest of the
        text is fed token by token. `cache` stays the same object, with fresh layers; bytes that
        move meanwhile count in no step."""
        text, sealed = cache.text(ids), cache.sealed_tokens
        asked = sealed < cache.prompt_tokens
        recomputed = cache.recomputed + 1
        capacity, traffic, watched = cache.capacity, cache.traffic.copy(), cache.watch is not None
        vars(cache).clear()  # frees what it holds before as much is made again
        fresh = self.attachment.start(KVCache, capacity=capacity, batch=len(text))
        if watched:
            fresh.watch = Fidelity(self.attachment.model_specs, fresh.state.request, self.fidelity)
        vars(cache).update(vars(fresh) | {"recomputed": recomputed})
        cache.expect_text(text)
        logits = self.prefill(cache, text[:, :sealed] if asked else text, whole=True)
        cache.seal()
        for token in text[:, sealed:].split(1, dim=1) if asked else ():
            logits = self.run(token, cache)
            cache.note_step(token, logits)
        vars(cache.traffic).update(vars(traffic))
        return logits

    def _close(self, cache: KVCache, layer: int) -> None:
        wait_for(self.model.device)
        began = perf_counter()
        cache.close(layer)
        wait_for(self.model.device)
        cache.closed_s += perf_counter() - began

    def complete(
        self,
        cache: KVCache,
        logits: Tensor | None,
        question: Tensor,
        *,
        began: float,
        max_new_tokens: int,
        stops: Sequence[Stop] | None = None,
        sampler: Sampler | None = None,
    ) -> Generation:
        """Finish a prefilled cache: decode the question [B Q] (protocol=context, else Q = 0), seal
        unless that is done, and decode the answer. The prefill's `logits` [B V] are not needed if
        there is a question."""
        batch = RunningBatch(self)
        slot = batch.join(
            cache, logits, question, began=began, max_new_tokens=max_new_tokens, stops=stops, sampler=sampler
        )
        return _to_the_end(batch, slot)


def _to_the_end(batch: RunningBatch, slot: RunningSequence) -> Generation:
    while batch.sequences:
        batch.step()
    return slot.out


def _check(prompt: object, max_new_tokens: int, context_tokens: int | None) -> None:
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or not prompt.numel() or prompt.is_floating_point():
        raise ValueError(
            "prompt should be token ids [B S] with at least one token, as in "
            "`tokenizer(text, return_tensors='pt').input_ids`."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} should be at least 1: a prompt ends in a token.")
    if context_tokens is not None and not 0 < context_tokens <= prompt.shape[1]:
        raise ValueError(
            f"context_tokens={context_tokens} should be from 1 to the prompt's {prompt.shape[1]}: as many are sealed."
        )
