"""Contains all that depends on transformers' attention and masks: one context manager (the cache is
in cache.py).

`routed(model)` sends every layer's attention to the KV layers of the cache that a call brings, and
restores the model afterwards, also after an exception. What would be computed wrongly is refused by
name: padding, soft caps, windows and sink logits that a layer's spec does not contain, unknown
keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from harness.engine.cache import KVCache, UnsupportedError
from harness.engine.pairing import Pairing, pairing_of
from harness.engine.rotation import (
    NoRotary,
    TextRotary,
    grid,
    in_place,
    rotary_of,
    text_rotary,
    unturned,
)
from harness.engine.trial import LayerTrial, by_token, goes_by_token, trial, unsupported
from harness.models import probe
from harness.models.base import ORIGINAL, is_listed
from harness.models.devices import current
from harness.models.indexers import IndexOf, choosing_nothing, is_indexed
from harness.models.latents import Latent, is_latent, unexpanded
from harness.models.layer_kinds import layer_kinds
from harness.models.probe import Heads
from harness.models.state_modules import Run, StateModule, called_by, state_modules
from methods.base import AttnInput, LayerSpec

NAME = "kv_harness"
# a call -> its keywords
PrepareCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], dict[str, Any]]
# stands for the mask where a model with indexers takes parts of one
_NO_MASK = torch.empty(1, 1, 1, 1)
# attention modules of classes not listed
_TRIED: WeakKeyDictionary[nn.Module, LayerTrial] = WeakKeyDictionary()
# modules whose state goes on by one token at a time
_BY_TOKEN: WeakSet[nn.Module] = WeakSet()


class _Call(NamedTuple):
    """Hold what the hook before an attention module knows and transformers does not pass to the
    attention function: the cache, the hidden states, cos and sin in the form of kernels/rope.py, and
    which channels the model rotates together. `layer`: the place, among layers that hold keys and
    values, of the one whose keys and values the module reads; `borrows`: it is another layer's;
    `latent`: the module's weights, if it attends to latents."""

    cache: KVCache
    layer: int
    borrows: bool
    hidden: Tensor
    rotation: tuple[Tensor, Tensor]
    pairing: Pairing
    latent: Latent | None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # passed by position when kvpress has wrapped this function
    *,
    kv_call: _Call | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    indices: IndexOf | None = None,
    **passed: Any,
) -> tuple[Tensor, None]:
    """Attend through the KV cache that the call brings, in the place of transformers' own attention
    function: [B H T D] in, [B T H D] out."""
    unknown = passed.keys() - probe.PASSED
    named = sorted(name for name in unknown if passed[name] is not None)
    named += ["output_attentions"] * bool(passed.get("output_attentions"))
    if named:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(named)}, which this engine would ignore."
        )
    if attention_mask is not None and attention_mask is not _NO_MASK:
        raise UnsupportedError(
            "A custom attention mask was given: only plain causal attention is supported."
        )
    if dropout:
        raise UnsupportedError("Attention dropout is on: call model.eval() first.")
    assert kv_call is not None
    cache = kv_call.cache
    spec = cache.layers[kv_call.layer].spec
    if (
        sliding_window is not None
        and sliding_window < cache.capacity
        and sliding_window != spec.window
    ):
        raise UnsupportedError(
            f"{type(module).__name__} slides over {sliding_window} tokens, which its config does not say of this "
            "layer: this engine would attend to all."
        )
    if scaling is not None and scaling != spec.scale:
        raise UnsupportedError(
            f"{type(module).__name__} scales its logits by {scaling}, and its attribute `scaling` says {spec.scale}, "
            "by which this engine would scale them."
        )
    if (s_aux is None) != (spec.sink_logits is None):
        raise UnsupportedError(
            f"{type(module).__name__} passes s_aux, which this engine would ignore."
        )
    if (latent := kv_call.latent) is not None:
        query, (key, value) = latent.query(query), latent.rows(key, value)
    query, key = map(kv_call.pairing.in_halves, (query, key))
    told = (*kv_call.rotation, kv_call.hidden, cache.num_tokens)
    x = AttnInput(query, key, value, *told, index=indices)
    attend = cache.lend if kv_call.borrows else cache.attend
    with current(query.device):
        out = attend(kv_call.layer, x)
        if latent is not None:
            out = latent.output(out)
        # some models view it in another shape
        return out.transpose(1, 2).contiguous(), None


def _mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """Return no mask, as transformers' mask function, since the layers are causal by themselves.
    Raise `UnsupportedError` for padding."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedError(
            "This cache takes no padding: inside `with attached(...)`, leave past_key_values and cache_implementation "
            "out, and rows that are padded on the left get one each."
        )


def _ours(cache: object) -> KVCache:
    """Return the cache of a call. Raise `UnsupportedError` if it is none of ours."""
    if not isinstance(cache, KVCache):
        raise UnsupportedError(
            f"An attached model needs past_key_values from its attachment's cache(...), got {type(cache).__name__}: "
            "call the model and not a part of it, and it gets one by itself."
        )
    return cache


def _advance_state(found: StateModule, run: Run, hidden: Tensor, cache: object) -> Tensor:
    """Run a module with a state in the place of its forward, on the state in the cache of the call."""
    if found.module in _BY_TOKEN:
        run = partial(by_token, found, run)
    return _ours(cache).advance_state(found.layer, run, hidden)


def _before_attention(
    layer: int,
    borrows: bool,
    pairing: Pairing,
    latent: Latent | None,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    cache = _ours(kwargs.get("past_key_values"))
    asked = module.config._attn_implementation  # type: ignore[union-attr]
    if asked != NAME:
        raise UnsupportedError(
            f"{type(module).__name__} is set to {asked!r} attention, which would pass the attached method over: call "
            "set_attn_implementation outside the block of `attached`, and let all layers share the model's config."
        )
    cache._hooked = module.layer_idx  # type: ignore[assignment]
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    given = probe.as_pair(kwargs.get("position_embeddings"))
    if given is None:
        given = unturned(hidden, pairing.width)
    rotation = _rotation(module, pairing, given)
    call = _Call(cache, layer, borrows, hidden, rotation, pairing, latent)
    mask = {"attention_mask": _NO_MASK} if is_indexed(module) else {}
    return args, {**kwargs, "kv_call": call, **mask}


class _Forwards:
    """Hold the hooks that run before and after each forward of an attached model. They replace the
    call's arguments where necessary, let the KV cache begin and end its step, and turn gradients
    off: our attention computes none, so those of the other parts would be silently wrong."""

    def __init__(self, prepare: PrepareCall | None, rotary: TextRotary | None) -> None:
        self.prepare, self.rotary = prepare, rotary
        self._gradients = torch.is_grad_enabled()

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self._gradients = torch.is_grad_enabled()
        if self.prepare is not None:
            args, kwargs = (), self.prepare(module, args, kwargs)
        if isinstance(cache := kwargs.get("past_key_values"), KVCache):
            given = args[0] if args else kwargs.get("input_ids")
            cache.begin(given)
            if self.rotary is not None:
                given = kwargs["inputs_embeds"] if given is None else given
                self.rotary.lengths = cache.text_lengths(given.shape[1])
        torch.set_grad_enabled(False)
        return args, kwargs

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if isinstance(cache := kwargs.get("past_key_values"), KVCache):
            cache.end()

    def always(self, *called: Any) -> None:
        """Undo after each forward what `before` has set, also after an error: gradients are
        switched back to what they were, and the rotation no longer depends on this call's text."""
        torch.set_grad_enabled(self._gradients)
        if self.rotary is not None:
            self.rotary.lengths = None


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the self-attention of every decoder layer that has one, in order. Raise
    `UnsupportedError` if a model whose class is not listed is not built of such layers."""
    if is_listed(model):
        return [layer.self_attn for layer in model.get_decoder().layers]
    try:
        if reason := probe.said(model.config):
            raise probe.ProbeError(reason)
        return probe.attention_modules(model)
    except probe.ProbeError as reason:
        raise unsupported(model, reason) from reason


def is_routed(model: PreTrainedModel) -> bool:
    return bool(model.config._attn_implementation == NAME)


@contextmanager
def routed(model: PreTrainedModel, prepare: PrepareCall | None = None) -> Iterator[None]:
    """Send the attention of every layer to the KV cache that each call of the model brings, until
    the block is left. A model cannot be routed twice at a time.

    `prepare`: maps each call of the model to the keywords to use, for example to add a cache."""
    if is_routed(model):
        raise UnsupportedError(
            "This model is attached already: leave the other `with attached(...)` block first."
        )
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config._attn_implementation
    with ExitStack() as undo:
        undo.callback(model.set_attn_implementation, before)
        model.set_attn_implementation(NAME)
        rotary = text_rotary(model)
        undo.enter_context(in_place(model, rotary))
        pairings, modules = channel_pairings(model), attention_modules(model)
        undo.enter_context(called_by(state_modules(model), _advance_state))
        undo.enter_context(unexpanded(modules))
        undo.enter_context(choosing_nothing(modules))
        latents = [Latent(module) if is_latent(module) else None for module in modules]
        forwards = _Forwards(prepare, rotary)
        kinds = layer_kinds(model.config)
        sources = kinds.sources.items()
        for hook in (
            *(
                module.register_forward_pre_hook(
                    partial(
                        _before_attention, source, layer not in kinds.attending, pairing, latent
                    ),
                    with_kwargs=True,
                )
                for module, latent, pairing, (layer, source) in zip(
                    modules, latents, pairings, sources, strict=True
                )
            ),
            model.register_forward_pre_hook(forwards.before, with_kwargs=True),
            model.register_forward_hook(forwards.after, with_kwargs=True),
            model.register_forward_hook(forwards.always, always_call=True),
        ):
            undo.callback(hook.remove)
        yield


def channel_pairings(model: PreTrainedModel) -> list[Pairing]:
    """Return, for each of the model's `attention_modules`, which channels of a head it rotates
    together. Raises `UnsupportedError` if methods could not undo its rotation; a model whose class is
    not listed is tried first, and has `Pairing(0)` where they could not."""
    modules: list[Any] = attention_modules(model)
    listed, known = is_listed(model), dict[Any, Pairing | None]()
    kinds = [(_turning(module), getattr(module, "layer_type", None)) for module in modules]
    for kind, module in zip(kinds, modules, strict=True):
        if kind not in known:
            known[kind] = _pairing(model, module, listed)
    pairings = [known[kind] for kind in kinds]
    if not listed and modules[0] not in _TRIED:
        _TRIED.update(zip(modules, trial(model, pairings, projection), strict=True))
        stateful = state_modules(model)
        _BY_TOKEN.update({x.module for x in stateful if goes_by_token(model, x)})
    return [pairing or Pairing(0) for pairing in pairings]


def _pairing(model: PreTrainedModel, module: Any, listed: bool) -> Pairing | None:
    """Return which channels of a head an attention module rotates together. None: methods could not
    undo that; `UnsupportedError` is raised then if the model's class is `listed`."""
    rotary = rotary_of(model, turning := _turning(module))
    if isinstance(rotary, NoRotary):
        return Pairing(rotary.width)
    asked = Rotary(rotary, module, next(model.parameters()).device, Pairing(0))
    try:
        return pairing_of(module, asked.as_given, turning)
    except UnsupportedError:
        if listed:
            raise
        return None


def forget_trial(model: PreTrainedModel) -> None:
    """Forget what a trial has found of a model whose class is not listed, because its weights may
    have changed; it will be tried again."""
    for module in attention_modules(model):
        _TRIED.pop(module, None)


def layer_specs(model: PreTrainedModel) -> list[LayerSpec]:
    """Return the spec of each layer of the model with keys and values, in order: what a method may
    know of it, such as head counts, scale, rotation and window. A method serves some of the layers
    (methods/layers/window.py)."""
    kinds, pairings = layer_kinds(model.config), channel_pairings(model)
    # those that borrow come after all others
    modules: list[Any] = attention_modules(model)[: len(kinds.attending)]
    rotary = rotary_of(model, _turning(modules[0]))
    turns = [(rotates(module), getattr(module, "layer_type", None)) for module in modules]
    return [
        LayerSpec(
            index=index,
            num_layers=len(modules),
            **(heads := heads_of(module))._asdict(),
            scale=module.scaling,
            rope=Rotary(rotary, module, next(model.parameters()).device, pairing),
            rotary_dim=pairing.width or None,
            unknown=_TRIED[module].unknown if module in _TRIED else (),
            device=next(module.parameters()).device,
            project_query=(project := projection(module, heads.num_heads, pairing, model)),
            finish_query=project.finish,
            window=window,
            sink_logits=None
            if (sinks := getattr(module, "sinks", None)) is None
            else sinks.detach().float(),
            rope_like=turns.index(turns[index]),  # the first that rotates as it does
            borrowers=borrowers,
        )
        for index, (module, pairing, window, borrowers) in enumerate(
            zip(modules, pairings[: len(modules)], kinds.windows, kinds.borrowers, strict=True)
        )
    ]


def _turning(module: Any) -> int:
    """Return the channels of an attention module's heads among which those are that it rotates."""
    return module.qk_rope_head_dim if is_latent(module) else module.head_dim


def heads_of(module: Any) -> Heads:
    """Return how an attention module is divided. Those of listed classes have values as wide as keys."""
    if module in _TRIED:
        return _TRIED[module].heads
    count = int(module.config.num_attention_heads)
    return Heads(count, count // module.num_key_value_groups, module.head_dim, module.head_dim)


def rotates(module: Any) -> bool:
    """Return whether an attention module rotates queries and keys; some of SmolLM3's do not."""
    return _TRIED[module].rotates if module in _TRIED else bool(getattr(module, "use_rope", True))


class Rotary:
    """Compute cos and sin [1 P R] in fp32 of one attention module, for positions [P], in the form of
    kernels/rope.py.

    `rotary` is a copy, so nothing of the model changes. Where angles depend on the length of the
    text, the text is taken to end with the last of `positions`."""

    def __init__(
        self, rotary: nn.Module, module: Any, device: torch.device, pairing: Pairing
    ) -> None:
        self.rotary, self.device, self.module, self.pairing = rotary, device, module, pairing
        own = rotary.own if isinstance(rotary, TextRotary) else rotary
        kinds = getattr(own, "layer_types", None)  # Gemma 3 has a rotation per kind of layer
        self.kind = () if kinds is None else (module.config.layer_types[module.layer_idx],)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if not self.pairing.width:
            raise UnsupportedError(
                f"{type(self.module).__name__} rotates keys in a way that is not known here, so that they cannot be "
                "moved to other positions: choose another model."
            )
        place = next(self.module.parameters()).device  # of the layer, where a model lies on several
        cos, sin = _rotation(self.module, self.pairing, self.as_given(positions))
        return cos.to(place), sin.to(place)

    def of_text(self, tokens: int) -> Rotary:
        """Return the rotation of a text of `tokens` tokens, the same for all its positions. 0: of a
        text that ends with the last position asked for."""
        if not tokens or not isinstance(self.rotary, TextRotary):
            return self
        rotary = copy(self.rotary)
        rotary.lengths = [tokens]
        return Rotary(rotary, self.module, self.device, self.pairing)

    @property
    def inv_freq(self) -> Tensor:
        """Return the angles [R / 2] by which each pair of channels turns per position."""
        if isinstance(self.rotary, TextRotary):
            stages = map(self.rotary.stage, self.rotary.lengths or [0])
            return self.rotary.frequencies(self.device, max(stages), *self.kind)
        frequencies = getattr(self.rotary, "_".join((*self.kind, "inv_freq")))
        return frequencies if rotates(self.module) else torch.zeros_like(frequencies)

    def as_given(self, positions: Tensor) -> Any:
        """Return cos and sin of positions [P] in the form in which the model computes them."""
        like = torch.empty(0, dtype=torch.float32, device=self.device)
        asked = grid(self.rotary, positions.to(self.device).unsqueeze(0))
        return probe.as_pair(self.rotary(like, asked, *self.kind))


def _rotation(module: Any, pairing: Pairing, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cos and sin that transformers has `given` a layer, in the form of kernels/rope.py;
    a layer without rotation turns by 0."""
    cos, sin = map(pairing.angles.as_halves, given)
    return (cos, sin) if rotates(module) else (torch.ones_like(cos), torch.zeros_like(sin))


class QueryProjection:
    """Compute queries before their rotation, [B T E] -> [B H T D]: projection, bias and query norm
    of an attention module. Their channels are in the order of kernels/rope.py."""

    def __init__(
        self, module: Any, num_heads: int, pairing: Pairing, model: PreTrainedModel | None = None
    ) -> None:
        self.module, self.num_heads, self.pairing = module, num_heads, pairing
        self.model = model  # presses of kvpress ask for it
        # LFM2 calls it q_layernorm
        self.norm = getattr(module, "q_norm", None) or getattr(module, "q_layernorm", None)
        weight = getattr(self.norm, "weight", None)
        self.finish = _after_rotation(module)
        # OLMo 2: all heads as one
        self.norms_whole = weight is not None and weight.shape[-1] != module.head_dim

    def __call__(self, hidden: Tensor) -> Tensor:
        width = self.num_heads * self.module.head_dim
        if hasattr(self.module, "q_proj"):
            q = self.module.q_proj(hidden)
        elif type(joint := self.module.qkv_proj) is nn.Linear:
            # Phi-3: queries are the first rows of the joint projection
            q = nn.functional.linear(hidden, joint.weight[:width])
        else:  # quantised rows cannot be taken out of the whole
            q = joint(hidden)[..., :width]
        if self.norm is not None and self.norms_whole:
            q = self.norm(q)
        # Qwen3.5's heads have as many channels of a gate behind
        q = q.view(*hidden.shape[:2], self.num_heads, -1)[..., : self.module.head_dim]
        if self.norm is not None and not self.norms_whole:
            q = self.norm(q)
        return self.pairing.in_halves(q.transpose(1, 2))


class LatentProjection:
    """Compute queries of rotated channels and latents before their rotation, [B T E] -> [B H T R+C],
    of a module of latent attention (harness/models/latents.py)."""

    def __init__(self, module: nn.Module, pairing: Pairing) -> None:
        self.module: Any = module
        self.latent, self.finish = Latent(module), _after_rotation(module)
        # DeepSeek-V3's rotation takes neighbours and leaves halves, and V3.2's config does not say so
        interleaved = getattr(module.config, "rope_interleave", is_indexed(module))
        neighbours = pairing.neighbours or interleaved
        self.pairing = pairing._replace(neighbours=neighbours)

    def __call__(self, hidden: Tensor) -> Tensor:
        module = self.module
        if module.q_lora_rank is None:
            q = module.q_proj(hidden)
        else:
            q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
        by_head = q.view(*hidden.shape[:2], module.num_heads, -1).transpose(1, 2)
        return self.pairing.in_halves(self.latent.query(by_head))


def projection(
    module: Any, num_heads: int, pairing: Pairing, model: PreTrainedModel | None = None
) -> QueryProjection | LatentProjection:
    """Return what computes the queries of an attention module before their rotation."""
    if is_latent(module):
        return LatentProjection(module, pairing)
    return QueryProjection(module, num_heads, pairing, model)


def _after_rotation(module: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return what an attention module does to rotated queries [B H T D] at positions [T]: Hunyuan
    norms them, and Ministral 3 scales them by their position (as Llama 4). None: nothing."""
    if (norm := getattr(module, "query_layernorm", None)) is not None:
        return lambda q, places: norm(q)
    rope = getattr(module.config, "rope_parameters", None) or {}
    if not (beta := rope.get("llama_4_scaling_beta")):
        return None

    def scaled(q: Tensor, places: Tensor) -> Tensor:
        factors = 1 + beta * torch.log1p(places // rope[ORIGINAL])
        return q * factors[:, None].to(q.dtype)

    return scaled
