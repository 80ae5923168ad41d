"""Generates under a clock: prefill, seal and decode. One generation gives the answer and all its
times.

The clock starts with the prefill; a token's time is when it is on the host. The seal runs between
the first and the second token (protocol=prompt), so the time to the second token includes all that
a method does to digest a prompt. Under protocol=context it runs before the question, which is then
decoded token by token. Where rows leave the device (placement=host or disk), each layer seals
during the prefill, as soon as the prompt is through it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from copy import copy
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from harness.engine.attach import Attachment
from harness.engine.batch.cache import SlotsCache
from harness.engine.batch.running import RunningBatch
from harness.engine.batch.running_sequence import Generation, RunningSequence, Stop
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.fidelity import Fidelity
from harness.engine.forward import by_blocks, nothing
from harness.engine.graph import CapturedStep, KeptSteps, StepCapture, capture_refusal
from harness.engine.sampling import Sampler
from harness.engine.second_reading import SecondReading
from harness.engine.trace import Tracer
from harness.models.base import DTYPES
from harness.models.devices import usual_chunk, wait_for
from harness.prompts.teacher import Forced
from kernels.threads import step_threads
from methods.base import KVLayer


class NotFiniteError(ValueError):
    """Report logits that hold NaN or infinity; the message says what to try."""


class Engine:
    """Run the forwards of an attached model: prompts, and decode steps of the sequences that run
    together. On a GPU a decode step is captured: recorded once as a CUDA graph, and replayed.

    `forward`: the model by blocks (engine/forward.py); None if the model runs its own forward, for
    the reason in `plain_reason`. `plain_steps`: why decode steps were not captured. `tracer`:
    clocks the parts of each step."""

    tracer: Tracer | None = None
    plain_steps: str | None = None
    unclocked: str | None = None  # why the time that steps waited for moving rows is unknown
    one_by_one: str | None = None  # why members of the last batch attended one after the other

    def __init__(
        self,
        attachment: Attachment,
        *,
        prefill_chunk: int | None = None,
        fidelity: int = 0,
        graphs: StepCapture | None = None,
    ) -> None:
        """`prefill_chunk`: tokens of a prompt that pass through a layer at once; None for the usual
        number on the model's device (harness/models/devices.py). `fidelity`: compare every n-th step
        with exact attention (engine/fidelity.py); 0 for never. `graphs`: captures decode steps
        (engine/graph.py)."""
        self.attachment = attachment
        self.model = attachment.model
        self.graphs, self.kept = graphs, KeptSteps()
        self.forward, self.plain_reason = by_blocks(self.model)
        self.prefill_chunk = prefill_chunk or usual_chunk(
            self.model.device.type, attachment.method.dense_prefill
        )
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
        self,
        prompt: Tensor,
        answers: Sequence[Sequence[int]],
        token: int,
        context_tokens: int | None = None,
    ) -> NotFiniteError:
        """Return the error for prompts [B S] in whose `answers` the logits of `token`, counted from
        0, are the first that are not finite. It names the first part of the model that gives such
        numbers when the model's own modules read everything up to there again."""
        by_modules, tokens = copy(self), token + 1
        by_modules.forward = by_modules.graphs = by_modules.tracer = None
        by_modules.fidelity = 0
        # an answer that ended before goes on with its last token
        fed = torch.tensor([[*answer, *[answer[-1]] * tokens][:tokens] for answer in answers])
        first: list[tuple[str, nn.Module]] = []
        with ExitStack() as hooks:
            for place, module in _places(self.model).items():
                note = partial(_note_not_finite, first, place)
                hooks.callback(module.register_forward_hook(note).remove)
            batch = RunningBatch(by_modules)
            asked = by_modules.join(
                batch,
                prompt,
                max_new_tokens=tokens,
                context_tokens=context_tokens,
                sampler=Forced(fed),
            )
            _to_the_end(batch, asked)
        fault = f"The logits of the answer's first {tokens} tokens are not all finite"
        if not first:
            return NotFiniteError(
                f"{fault}, but those of the model's own modules are: set backends=torch."
            )
        dtype = next(
            short for short, name in DTYPES.items() if self.model.dtype == getattr(torch, name)
        )
        place, module = first[0]
        fault += f": {place} is the first part of the model whose output is not finite, in {dtype}"
        for name, weight in module.named_parameters():
            if not bool(weight.isfinite().all()):
                return NotFiniteError(
                    f"{fault}, and neither is its {name}: fetch or convert the model again."
                )
        wider = {
            "fp16": "Try dtype=bf16 or dtype=fp32, and run",
            "bf16": "Try dtype=fp32, and run",
        }.get(dtype, "Run")
        method = type(self.attachment.method).__name__
        return NotFiniteError(f"{fault}. {wider} method=full to see whether {method} is at fault.")

    def join(
        self,
        batch: RunningBatch,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        context_tokens: int | None = None,
        **ending: Any,
    ) -> RunningSequence:
        """Prefill `prompt` [1 S] and add it to `batch`, a running batch of this engine. Return its
        sequence, which `batch.step` decodes together with the others. Other arguments as in
        `generate`."""
        _check(prompt, max_new_tokens, context_tokens)
        prompt = prompt.to(self.model.device)
        context, question = prompt.tensor_split(
            [prompt.shape[1] if context_tokens is None else context_tokens], dim=1
        )
        cache = self.cache(prompt, max_new_tokens)
        wait_for(self.model.device)
        began = perf_counter()
        logits = self.prefill(cache, context, whole=True)
        return batch.join(
            cache, logits, question, began=began, max_new_tokens=max_new_tokens, **ending
        )

    def cache(
        self, prompt: Tensor, max_new_tokens: int, shared: Sequence[KVLayer] | None = None
    ) -> KVCache:
        """Return a fresh cache for `prompt` [B S] and an answer of `max_new_tokens`. `shared`:
        layers with full attention that hold the prompt already; the comparison with exact attention
        (`Fidelity`), if the engine makes one, uses them and does not store the prompt itself."""
        batch, capacity = prompt.shape[0], prompt.shape[1] + max_new_tokens
        cache = self.attachment.start(KVCache, capacity=capacity, batch=batch)
        cache.fed.set(prompt)
        if isinstance(cache.before_seal, SecondReading):
            cache.before_seal.run = self.run
        if self.fidelity:
            cache.watch = Fidelity(
                self.attachment.model_specs, cache.state.request, self.fidelity, shared
            )
        return cache

    @torch.inference_mode()
    def prefill(self, cache: KVCache, prompt: Tensor, *, whole: bool = False) -> Tensor:
        """Compute the prompt [B S]. Return the logits of its last token [B V].

        `whole`: the turn's prompt ends here. Where rows leave the device or the method wants it,
        each layer then closes, which means that it is sealed as soon as the prompt is through it,
        and `seal` does the rest."""
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
        if cache.fed.known < cache.num_tokens:
            raise UnsupportedError(
                f"The text outgrows {cache.num_tokens} tokens, at which this model computes all of it anew, and the "
                "cache was not told the text: call cache.fed.set(ids) with the ids of all tokens so far."
            )
        text, sealed = cache.fed.followed_by(cache.num_tokens, ids), cache.sealed_tokens
        asked = sealed < cache.fed.prompt_tokens
        recomputed = cache.recomputed + 1
        capacity, traffic, watched = cache.capacity, cache.traffic.copy(), cache.watch is not None
        vars(cache).clear()  # frees what it holds before as much is made again
        fresh = self.attachment.start(KVCache, capacity=capacity, batch=len(text))
        if watched:
            fresh.watch = Fidelity(self.attachment.model_specs, fresh.state.request, self.fidelity)
        vars(cache).update(vars(fresh) | {"recomputed": recomputed})
        cache.fed.set(text)
        logits = self.prefill(cache, text[:, :sealed] if asked else text, whole=True)
        cache.seal()
        for token in text[:, sealed:].split(1, dim=1) if asked else ():
            logits = self.run(token, cache)
            cache.note_step(token, logits)
        vars(cache.traffic).update(vars(traffic))
        return logits

    def run(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run the model on ids [B T]. Return the logits of the last token [B V]."""
        return (self.forward or self.attachment.run)(ids, cache)

    def decode(self, ids: Tensor, cache: KVCache, captured: CapturedStep | None) -> Tensor:
        """Run one decode step for ids [B 1], by replaying the `captured` step of the cache if there
        is one. Return logits [B V]."""
        if self.attachment.rotary is not None:
            if cache.outgrows:
                return self.recompute(ids, cache)
            cache.note_text(ids)
        traced = self.tracer.step(cache) if self.tracer is not None else nullcontext()
        with traced, step_threads(self.model.device):
            return captured(ids) if captured is not None else self.run(ids, cache)

    def joined(self, caches: Sequence[KVCache]) -> KVCache:
        """Return the cache with which `caches` take a step together. If steps are captured, it is
        one of a fixed size, so that other sequences can use the captured step."""
        refused = self.traced or next(
            (why for cache in caches if (why := capture_refusal(self.forward, cache))), None
        )
        sized = self.graphs is not None and refused is None
        if len(caches) == 1 and not sized:
            return caches[0]
        several = len({spec.device for spec in self.attachment.model_specs}) > 1
        spread = "the model lies on several devices" if several else None
        slots = SlotsCache(caches, self.traced or spread, sized=sized)
        if len(caches) == 1:
            return caches[0] if slots.step_inputs is None else slots
        self.one_by_one = slots.alone
        return slots

    def captured(self, cache: KVCache) -> CapturedStep | None:
        """Return a decode step of a sealed cache that is captured when it first runs and replayed
        afterwards, or None if its steps cannot be captured."""
        if self.graphs is None:
            return None
        reason = self.traced or capture_refusal(self.forward, cache)
        if reason is None:
            assert self.forward is not None
            return CapturedStep(self.forward, cache, self.graphs, self.kept)
        self.plain_steps = reason
        return None

    @property
    def traced(self) -> str | None:
        """Return the reason why steps are neither captured nor taken together while a tracer clocks
        their parts; None without a tracer."""
        return "trace=on clocks each step's parts" if self.tracer is not None else None

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
        **ending: Any,
    ) -> Generation:
        """Answer on a prefilled cache: decode the question [B Q] (protocol=context, else Q = 0),
        seal unless that is done, and decode the answer. `logits` [B V]: those of the prompt's last
        token, not needed if there is a question. `began`: when the prefill began, by
        `perf_counter`. `ending`: keywords of `RunningSequence`."""
        batch = RunningBatch(self)
        slot = batch.join(cache, logits, question, began=began, **ending)
        return _to_the_end(batch, slot)


def _to_the_end(batch: RunningBatch, slot: RunningSequence) -> Generation:
    while batch.sequences:
        batch.run()
    return slot.out


def _places(model: Any) -> dict[str, nn.Module]:
    """Return the parts of a model by their names, in the order in which they run."""
    decoder = model.get_decoder()
    places = {"the embedding": model.get_input_embeddings()}
    places |= {f"layer {number}": layer for number, layer in enumerate(decoder.layers)}
    # some classes call it otherwise; the output layer then stands for it
    if hasattr(decoder, "norm"):
        places["the last norm"] = decoder.norm
    return places | {"the output layer": model.get_output_embeddings()}


def _note_not_finite(
    first: list[tuple[str, nn.Module]],
    place: str,
    module: nn.Module,
    arguments: tuple[Any, ...],
    output: Any,
) -> None:
    """Put a module in `first`, which is empty until then, if its output holds NaN or infinity."""
    states = output[0] if isinstance(output, tuple) else output
    if not first and not bool(states.isfinite().all()):
        first.append((place, module))


def _check(prompt: object, max_new_tokens: int, context_tokens: int | None) -> None:
    if (
        not isinstance(prompt, Tensor)
        or prompt.dim() != 2
        or not prompt.numel()
        or prompt.is_floating_point()
    ):
        raise ValueError(
            "prompt should be token ids [B S] with at least one token, as in "
            "`tokenizer(text, return_tensors='pt').input_ids`."
        )
    if max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} should be at least 1: a prompt ends in a token."
        )
    if context_tokens is not None and not 0 < context_tokens <= prompt.shape[1]:
        raise ValueError(
            f"context_tokens={context_tokens} should be from 1 to the prompt's {prompt.shape[1]}: as many are sealed."
        )
