"""Attaches a KV method to a model: within `with attached(model, method, budget=0.2) as kv:` its
attention uses the method.

with attached(model, PQCache(...), budget=0.2):
    model.generate(prompt, max_new_tokens=64)

For a further turn, give `generate` the whole conversation and the same cache, as transformers asks
for: the one that it has returned (`return_dict_in_generate=True`), or one made beforehand by
`kv.cache(capacity=...)`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from inspect import signature
from time import perf_counter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harness.engine.attach_options import OF_REQUEST, AttachOptions, refuse_number
from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.fidelity import reference_layers
from harness.engine.hf import forget_trial, is_routed, layer_specs, routed
from harness.engine.loop import STEP, LoopCache, LoopCalls, LoopUsage
from harness.engine.rotation import text_rotary
from harness.engine.second_reading import Repeating, Run, SecondReading
from harness.engine.states import fresh_states
from harness.engine.weights import checksum, parts
from harness.models.devices import note_devices, wait_for
from methods.abilities import ability, asked, refuse
from methods.abilities.repeat import Repeat, RepeatPrompts
from methods.base import (
    AttnInput,
    Budget,
    CacheState,
    Checks,
    CostError,
    LayerSpec,
    LayerWorkload,
    Method,
    Request,
    refuse_other_than_method,
)
from methods.layers import Layer
from methods.layers.window import check_growth, check_length, start_layers, whole_layers
from methods.tiers.pinned_memory import PinnedReservation
from methods.tiers.tier import DEVICE, HOST
from methods.tiers.transfer import shared_engine

AnyCache = TypeVar("AnyCache", bound=KVCache)
# by method, weights and the calibration text that it needs
_Prepared = dict[tuple[object, ...], tuple[object, float]]
_prepared: WeakKeyDictionary[PreTrainedModel, _Prepared] = WeakKeyDictionary()


class Attachment:
    """Hold a model with the KV method that its attention uses, and make the caches for both.
    `attached` yields one.

    In the block of `attached`, `cache` makes a cache for `model.generate` or a loop of your own;
    `Engine` (harness/engine/engine.py), the project's own loop, takes the attachment itself."""

    def __init__(
        self, model: PreTrainedModel, method: Method, options: AttachOptions | None = None
    ) -> None:
        refuse_other_than_method(method)
        if not isinstance(model, PreTrainedModel):
            raise ValueError(
                f"model={model!r} is not a model: pass a loaded one, as from_pretrained returns it."
            )
        self.model = model
        self.method = method
        self.options = options or AttachOptions()
        budget, placement = self.options.budget, self.options.placement
        if placement != DEVICE and not method.offloads:
            name = type(method).__name__
            raise ValueError(
                f"{name} keeps nothing on the {placement}: use placement=device with it."
            )
        # without placement, only a store of conversations moves rows
        self.ahead = self.options.overlap and placement != DEVICE
        self.engine = shared_engine(model.device)
        note_devices({weight.device for weight in model.parameters()})
        if not is_routed(model):
            forget_trial(model)
        self._parts = parts(model)
        self.model_specs = layer_specs(model)
        self.rotary = text_rotary(model)
        self.specs = whole_layers(self.model_specs)  # the layers that the method serves
        method.refuse_model(self.specs)
        given = method.trained_budget(self.specs[0]) if budget is None else budget
        given = given if isinstance(given, Budget) or given is None else Budget(given)
        if given is None:
            method.check(None)
        self.budget = given if method.uses_budget else None
        of_options = (*asked(self.budget, self.options.codec), *self.options.abilities)
        self.abilities = tuple(dict.fromkeys(of_options))  # some may be among both
        refuse(method, self.abilities)
        for one in self.abilities:
            one.check_model(self.specs[0])
        method.require_known(self.specs)
        self.prepared, self.prepare_s = self._prepare(self.options.calibration)
        self._unchecked = {"first", "further", "drop"}  # see `Checks`
        self._handed_out: list[LoopUsage] = []

    def stage(self, tokens: int) -> int:
        """Return a number that stands for the rotation angles (RoPE) of a text of `tokens` tokens:
        the model rotates texts with equal numbers alike (`TextRotary.stage`). It is 0 where the
        angles do not depend on the length."""
        return 0 if self.rotary is None else self.rotary.stage(tokens)

    @cached_property
    def weights(self) -> str:
        """Return a hash of the model's weights, which are all read for it, and of how its layers
        rotate and scale; either may be replaced in place (`checksum`)."""
        ropes: list[Any] = [spec.rope for spec in self.model_specs]
        near_and_far = torch.tensor([1, 1000])
        return checksum(
            self.model, [torch.cat(x.as_given(near_and_far)) * x.module.scaling for x in ropes]
        )

    def check_model(self) -> None:
        """Raise `UnsupportedError` if weights of the model were replaced, converted or moved after
        it was attached, or adapters attached or switched. Numbers that are written into weights are
        not noticed."""
        if parts(self.model) != self._parts:
            raise UnsupportedError(
                "The model's weights were replaced, converted or moved, or an adapter was attached or switched, after "
                "the method was attached: leave the block of `attached` first, and attach the method again."
            )

    def request(self, *, capacity: int, batch: int = 1, grows: bool = False) -> Request:
        return Request(
            batch=batch,
            capacity=capacity,
            dtype=self.model.dtype,
            device=self.model.device,
            budget=self.budget,
            abilities=self.abilities,
            **{name: getattr(self.options, name) for name in OF_REQUEST},
            prepared=self.prepared,
            grows=grows,
        )

    def start(
        self, kind: type[AnyCache], *, capacity: int, batch: int = 1, grows: bool = False
    ) -> AnyCache:
        """Return a fresh cache of class `kind` for `batch` sequences of at most `capacity` tokens
        each (prompts and answers of all turns). `grows`: the capacity may be raised later."""
        for key, number in {"capacity": capacity, "batch": batch}.items():
            refuse_number(key, number, least=1)
        self.check_model()
        check_length(self.method, self.model_specs, capacity)
        request = self.request(capacity=capacity, batch=batch, grows=grows)
        request = replace(request, reservation=self._reservation(request))
        state = CacheState(
            request, checks=Checks(self._unchecked), engine=self.engine, ahead=self.ahead
        )
        cache = kind(start_layers(self.model_specs, state, self.method.start), state)
        cache.rotary, cache.states = self.rotary, fresh_states(self.model.config)
        cache.closes_early = request.placement != DEVICE or self.method.closes_early
        if ability(self.method, Repeat) is not None:
            cache.before_seal = SecondReading(self.read_again, self.run)
        return cache

    def read_again(self, run: Run, cache: KVCache, prompt: Tensor) -> None:
        """Have the model read the complete prompt [B S] of `cache` again, as the method asks for
        (`Repeat`); nothing of it is stored. `run`: a forward of the model. A prompt that
        is read whole is not repeated. Raise `ValueError` where every layer slides over fewer tokens
        than prompt and repetition have together."""
        tokens, budget, repeat = prompt.shape[1], self.budget, ability(self.method, Repeat)
        if (
            budget is None
            or repeat is None
            or all(
                self.method.reads_all(tokens, budget.tokens(tokens, x.index)) for x in self.specs
            )
        ):
            return
        for ids, piece in repeat.pieces(prompt, self.options.repeat_prompts or RepeatPrompts()):
            check_length(self.method, self.model_specs, tokens + ids.shape[1])
            run(ids, Repeating(cache, piece))

    def run(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Run the model's own forward on ids [B T]. Return the logits of the last token [B V]."""
        places = cache.positions(ids.shape[1], ids.device)
        output = self.model(
            ids, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]

    def _reservation(self, request: Request) -> PinnedReservation | None:
        """Reserve pinned host memory for all keys and values that a cache may send there, so that
        none is pinned later. Return None for a cache that grows, and for a method without a cost
        formula: they take memory when rows arrive."""
        if self.engine.pinned_memory is None or request.placement != HOST or request.grows:
            return None
        away = []
        budget = self.budget or Budget(1.0)
        # with a prompt that fills the cache, since no other sends more rows away
        for spec in self.specs:
            case = LayerWorkload(
                spec,
                request.capacity,
                budget.tokens(request.capacity, spec.index),
                request.placement,
                request.dtype.itemsize,
                codec=request.codec,
                estimated=budget.prunes(spec.index),
            )
            try:
                away.append(request.batch * self.method.cost(case).away.get(HOST, 0))
            except CostError:
                return None
        return self.engine.pinned_memory.reserve(away)

    def cache(self, *, capacity: int, batch: int = 1) -> LoopCache:
        """Return a fresh cache for `model.generate` or a loop of your own, to be passed as
        `past_key_values`: `batch` sequences of at most `capacity` tokens each (prompts and answers
        of all turns)."""
        cache = self.start(LoopCache, capacity=capacity, batch=batch)
        self._handed_out.append(cache.usage)
        return cache

    def close(self) -> None:
        """Wait until the device's transfer engine has moved all keys and values that are on their
        way, and end its threads."""
        self.engine.close()

    def cache_of_call(self, *, batch: int, tokens: int) -> LoopCache:
        """Return a fresh cache for a call of the model that comes without one. The call has `batch`
        rows of `tokens` tokens. The cache grows with the text unless the attachment has a
        `capacity`."""
        if self.options.capacity is not None:
            return self.cache(capacity=self.options.capacity, batch=batch)
        cache = self.start(LoopCache, capacity=tokens + STEP, batch=batch, grows=True)

        def check(before: int, after: int) -> None:
            check_length(self.method, self.model_specs, after)
            check_growth(self.model_specs, before, after)

        cache.may_grow = check
        self._handed_out.append(cache.usage)
        return cache

    def warn(self) -> None:
        """Warn if a cache that was handed out saw only prompt tokens. The method leaves tokens out
        only once the prompt has ended (`seal`), so such a cache computed full attention, and a
        score from it is not the method's. Warn as well if the method did not follow its rule in
        some caches, for example because a prompt is too short for it."""
        name = type(self.method).__name__
        tokens = max((usage.tokens for usage in self._handed_out if not usage.sealed), default=0)
        budget = self.budget
        if budget is not None and not all(budget.covers(tokens, spec.index) for spec in self.specs):
            warnings.warn(
                f"A cache of {name} took in {tokens} tokens and was never sealed, so nothing was "
                "read under its budget: feed the answer one token at a time, or call cache.seal() after the prompt.",
                stacklevel=4,
            )
        fell_back = [usage.fallback for usage in self._handed_out if usage.fallback]
        if fell_back:
            warnings.warn(
                f"{name} fell back on {len(fell_back)} of {len(self._handed_out)} caches: "
                f"{fell_back[0]}.",
                stacklevel=4,
            )

    def _prepare(self, calibration: Tensor | None) -> tuple[object, float]:
        """Return what the method has computed once for this model (`Method.prepare`), and the
        seconds that it took. Both are remembered for later attachments of the same model with the
        same weights, method and calibration text."""
        if type(self.method).prepare is Method.prepare:
            return None, 0.0
        text = calibration.numpy(force=True).tobytes() if calibration is not None else None
        key = (
            self.method,
            text if self.method.calibration_tokens else None,
            self.weights,
            self.model.device,
        )
        known = _prepared.setdefault(self.model, {})
        if key not in known:
            before = perf_counter()
            prepared = self.method.prepare(
                self.specs, observer(self.model, self.model_specs, calibration)
            )
            wait_for(self.model.device)
            known[key] = prepared, perf_counter() - before
        return known[key]


@contextmanager
def attached(model: PreTrainedModel, method: Method, **options: Any) -> Iterator[Attachment]:
    """Attach `method` to `model` for the length of the block. Every call of this model, also by
    `model.generate`, then computes attention by the method, on a KV cache of this project and
    without gradients. The model's weights do not change, and its own attention returns at the end
    of the block, whatever happens. The block gets the `Attachment`, which makes such caches and is
    what `Engine` runs. `options`: keywords such as budget=0.2; `AttachOptions` explains them."""
    attachment = Attachment(model, method, AttachOptions(**options))
    with (
        routed(model, LoopCalls(attachment.cache_of_call, attachment.check_model)),
        closing(attachment),
    ):
        yield attachment
    attachment.warn()


# with the options in place of `**options`, so that `help` and notebooks show them with their defaults
_SIGNATURE = signature(attached)
attached.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[
        *list(_SIGNATURE.parameters.values())[:-1],
        *signature(AttachOptions).parameters.values(),
    ]
)


class _Inputs(list[AttnInput]):
    """Keep what each layer that a method serves is given for its prompt, in order (`KVCache.watch`)."""

    def __init__(self, cache: KVCache) -> None:
        self.served = {i for i, layer in enumerate(cache.layers) if isinstance(layer, Layer)}

    def prefill(self, layer: int, x: AttnInput) -> None:
        if layer in self.served:
            self.append(x)


def observer(
    model: PreTrainedModel, specs: Sequence[LayerSpec], text: Tensor | None
) -> Callable[[int], Iterator[AttnInput]]:
    """Return a function `observe(tokens)`, with which a method that prepares itself
    (`Method.prepare`) looks at the model. It runs the model with full attention once on the first
    `tokens` tokens of `text` [1 S], and yields the attention input (queries, keys, values, hidden
    states) of each layer that a method serves, in order: those without a sliding window, where
    there are any.

    `specs`: those of all layers of the model, which may be attached already."""

    @torch.inference_mode()
    def observe(tokens: int) -> Iterator[AttnInput]:
        if text is None or text.shape[1] < tokens:
            raise ValueError(
                f"This method calibrates itself on {tokens} tokens of text: pass attached(..., calibration=ids) with "
                f"token ids [1 S], S >= {tokens}."
            )
        request = Request(batch=1, capacity=tokens, dtype=model.dtype, device=model.device)
        state = CacheState(request)
        cache = KVCache(reference_layers(specs, state), state)
        cache.states = fresh_states(model.config)
        cache.watch = inputs = _Inputs(cache)
        ids = text[:, :tokens].to(model.device)
        with nullcontext() if is_routed(model) else routed(model):
            model(ids, past_key_values=cache, logits_to_keep=1, use_cache=True)
        yield from inputs

    return observe
