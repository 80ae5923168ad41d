"""Finds out whether the engine runs a model class that is not in ARCHITECTURES.

The model reads a few tokens as the engine would let it. Without weights, it is built on torch's
meta device for that, where tensors have a shape and no contents. An attention function, a mask
function and a cache that only take notes stand where the engine has its own. What they note
decides: a model is refused by what its attention does, whatever its name is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.models.indexers import choosing_nothing, indexer_of, is_indexed
from harness.models.latents import Latent, is_latent, unexpanded
from harness.models.layer_kinds import layer_kinds
from harness.models.state_modules import Run, StateModule, called_by, is_attention, state_modules

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from methods.base import Indexer

NAME = "kv_harness_probe"
LONGEST = 20  # masks are compared at positions up to 2 to the power of this
PASSED = {  # keywords that attention modules pass on and that the engine's attention function knows
    "dropout", "scaling", "position_ids", "use_cache", "output_router_logits", "output_attentions",
    "sliding_window", "s_aux",
}  # fmt: skip
MEANINGS = {
    "softcap": "caps its attention logits",
    "is_causal": "says itself what its attention may see",
}
REFUSED = {  # what a value in a model's config says that it does and that the engine cannot do
    "attn_logit_softcapping": "caps its attention logits",
    "index_topk_blocks": "reads only what an indexer of its own chooses (trained sparse attention)",
    "use_bidirectional_attention": "attends to later tokens too (it embeds texts, or sees images whole)",
    "attention_chunk_size": "attends within chunks of the text",
    "add_cross_attention": "attends to the output of an encoder (cross attention)",
    "alibi": "places tokens by a bias of its logits (ALiBi)",
}
OF_IMAGES = {"use_bidirectional_attention": "vision"}  # values that say nothing of texts alone


class ProbeError(ValueError):
    """Say what an attention module does that the engine would compute wrongly, as the end of a
    sentence whose subject is the model."""


class Heads(NamedTuple):
    """Say how the attention of a layer is divided, in fields that a `LayerSpec` has too."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int  # channels of a value
    values_in_keys: bool = False  # values are the last channels of keys (latent attention)
    indexer: Indexer | None = None  # how the model itself chooses what it reads

    @property
    def row_channels(self) -> int:
        """Return how many numbers a KV head stores of a token."""
        return self.head_dim + (0 if self.values_in_keys else self.value_dim)


class Call(NamedTuple):
    """Hold what one attention module was given, and what it passed to the attention function."""

    module: nn.Module
    hidden: Tensor  # [1 T E]
    # cos and sin, as the model gives them; None if it gives none
    rotation: tuple[Tensor, Tensor] | None
    query: Tensor  # [1 H T D]
    key: Tensor  # [1 G T D]
    value: Tensor  # [1 G T Dv]
    mask: Tensor | None
    keywords: Mapping[str, Any]

    @property
    def heads(self) -> Heads:
        """Return how the attention of this module is divided."""
        return Heads(
            self.query.shape[1],
            self.key.shape[1],
            self.query.shape[3],
            self.value.shape[3],
            is_latent(self.module),
            indexer_of(self.module),
        )

    def own_values(self) -> Tensor:
        """Return what the module gets if each token attends to itself alone, [1 T H Dv]."""
        own = self.value.repeat_interleave(self.query.shape[1] // self.value.shape[1], 1)
        if is_latent(self.module):
            own = Latent(self.module).output(own)
        return own.transpose(1, 2).contiguous()


class _Cache:
    """Stand in for the engine's cache: it returns what it is given and notes the layers."""

    is_compileable = False

    def __init__(self, layers: int) -> None:
        self.is_sliding = [False] * layers
        self.updated: list[int] = []

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.updated.append(layer_idx)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return 2**LONGEST


def on_meta(config: PreTrainedConfig, make: Callable[..., Any]) -> PreTrainedModel:
    """Return the model that `make(config, dtype=...)` makes of a copy of `config`, on the meta
    device, and in bf16, because grouped products of experts have no meta form in fp32."""
    import torch

    with torch.device("meta"):
        return make(deepcopy(config), dtype=torch.bfloat16).eval()


def probe(
    model: PreTrainedModel,
    windows: Sequence[int | None],
    token: int = 0,
    places: Sequence[int] = (0, 1, 2),
) -> list[Call]:
    """Return what the attention of each layer does when `model` reads `token` at each of some
    positions, `places`. Raise `ProbeError` if the engine would compute the model wrongly: layers that
    slide may be divided otherwise than those that see the whole text, which methods serve.

    `windows`: how many tokens each layer with keys and values sees by the model's config; None for
    all. Attention is left out, and what layers with a state remember: each token gets its own value,
    so that all have the same hidden states in every layer."""
    modules = attention_modules(model)
    calls, masks, cache = _noted(model, modules, token, places)
    if [call.module for call in calls] != modules:
        counted = f"{len(calls)} calls from {len(modules)} layers"
        raise ProbeError(
            f"does not attend once per layer through transformers' attention interface ({counted})"
        )
    kinds = layer_kinds(model.config)
    if cache.updated != list(kinds.attending):
        raise ProbeError("has layers that share keys and values, or store none")
    for index, (call, source) in enumerate(zip(calls, kinds.sources.values(), strict=True)):
        if call.key is not calls[source].key:
            raise ProbeError("has layers that share keys and values otherwise than its config says")
        if reason := _unlike(call, windows[source], masks):
            raise ProbeError(f"{reason} (layer {index}, {type(call.module).__name__})")
    for slides in (False, True):
        pairs = zip(calls, kinds.sources.values(), strict=True)
        divided = {
            call.heads._replace(indexer=None)  # which some of GLM-5's layers share
            for call, source in pairs
            if (windows[source] is not None) is slides
        }
        if len(divided) > 1:
            sizes = ", ".join(
                f"{x.num_heads}/{x.num_kv_heads} heads of {x.head_dim}" for x in sorted(divided)
            )
            raise ProbeError(f"divides the attention of its layers in several ways ({sizes})")
    return calls


def said(config: PreTrainedConfig) -> str | None:
    """Return what a model's config says that it does and that the engine cannot, as the end of a
    sentence whose subject is the model; None if it says nothing of that kind."""
    for key, does in REFUSED.items():
        value = getattr(config, key, None)
        if value and value != OF_IMAGES.get(key):
            return f"{does} ({key}={value})"
    return None


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention modules of the decoder layers that have one, in order. Raise `ProbeError`
    if the model is not built of such layers."""
    if model.config.is_encoder_decoder:
        raise ProbeError("is an encoder-decoder")
    if not getattr(model.config, "is_causal", True):
        raise ProbeError("attends to later tokens too (is_causal=false in its config)")
    decoder: Any = model.get_decoder()
    layers, kinds = getattr(decoder, "layers", ()), layer_kinds(model.config)
    if model._is_stateful and not kinds.attending:
        raise ProbeError(
            "keeps a state alone, without keys and values (linear attention or a state space)"
        )
    modules = [_attention_of(layers[i]) for i in kinds.sources if i < len(layers)]
    latent = [is_latent(module) for module in modules if module is not None]
    if getattr(model.config, "kv_lora_rank", None) and not all(latent):
        raise ProbeError(
            "compresses keys and values together (multi-head latent attention, MLA) in a way of its own"
        )
    if getattr(model.config, "index_topk", None) and not all(
        map(is_indexed, filter(None, modules))
    ):
        raise ProbeError(REFUSED["index_topk_blocks"])
    if not modules or None in modules:
        names = vars(sys.modules[type(model).__module__])
        if any("alibi" in name for name in names) and getattr(model.config, "alibi", True):
            raise ProbeError(REFUSED["alibi"])
        raise ProbeError("is not built of decoder layers that have a `self_attn` each, as Llama is")
    if tuple(found.layer for found in state_modules(model)) != kinds.stateful:
        raise ProbeError("keeps states in another way than in the cache of one module per layer")
    # where layers keep states, these place tokens, and attention need not
    if not (hasattr(decoder, "rotary_emb") or kinds.stateful):
        raise ProbeError(
            "places tokens in another way than by rotating keys (learned positions or ALiBi)"
        )
    if getattr(model.config, "add_cross_attention", False):
        raise ProbeError("attends to the output of an encoder (cross attention)")
    return [module for module in modules if module is not None]


def _as_computed(call: Call) -> Call:
    """Return a call with queries, keys and values as the engine computes with them: a module of latent
    attention was left `unexpanded`."""
    if not is_latent(call.module):
        return call
    latent = Latent(call.module)
    key, value = latent.rows(call.key, call.value)
    return call._replace(query=latent.query(call.query), key=key, value=value)


def _attention_of(layer: nn.Module) -> nn.Module | None:
    """Return the attention module of a decoder layer: by its usual name, else by how it is divided."""
    if (usual := getattr(layer, "self_attn", None)) is not None:
        return usual
    return next((module for module in layer.children() if is_attention(module)), None)


def _noted(
    model: PreTrainedModel, modules: list[nn.Module], token: int, places: Sequence[int]
) -> tuple[list[Call], dict[int, tuple[Tensor, Any]], _Cache]:
    """Let the model read `token` at some positions. Return the calls of attention, the masks that
    the model asked for (by the id of the tensor that stands for one), and the cache."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[Call] = []
    masks: dict[int, tuple[Tensor, Any]] = {}
    cache: Any = _Cache(model.config.num_hidden_layers)
    given: list[tuple[Tensor, tuple[Tensor, Tensor] | None]] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        call = Call(module, *given[-1], query, key, value, attention_mask, keywords)
        calls.append(_as_computed(call))
        return calls[-1].own_values(), None

    def mask(*_: Any, mask_function: Any = None, **__: Any) -> Tensor:
        standing = torch.empty(1, 1, len(places), len(places), device="meta", dtype=torch.bool)
        masks[id(standing)] = standing, mask_function
        return standing

    def before(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        rotation = as_pair(keywords.get("position_embeddings"))
        if not (_is_pair(rotation) or (rotation is None and layer_kinds(model.config).stateful)):
            raise ProbeError(
                f"does not give its {type(module).__name__} cos and sin of the positions"
            )
        if keywords.get("past_key_values") is not cache or not (
            args or "hidden_states" in keywords
        ):
            raise ProbeError(
                f"does not give its {type(module).__name__} the cache and the states as Llama does"
            )
        given.append(
            (keywords["hidden_states"] if "hidden_states" in keywords else args[0], rotation)
        )

    AttentionInterface.register(NAME, attend)
    ALL_ATTENTION_FUNCTIONS[NAME] = (
        attend  # kvpress, when imported, puts a wrapper of an earlier one there
    )
    AttentionMaskInterface.register(NAME, mask)
    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    usual = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        with (
            next(model.parameters()).device, torch.no_grad(), _without_states(model, cache), unexpanded(modules),
            choosing_nothing(modules),
        ):  # fmt: skip
            ids, at = torch.full((1, len(places)), token), torch.tensor([places])
            # a tensor, not 1: all tokens then pass through layers that borrow, and not the last alone
            model(
                ids,
                position_ids=at,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=torch.tensor([0]),
            )
    except ProbeError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ProbeError(
            f"does not run as a decoder with a cache of keys and values does ({reason})"
        ) from error
    finally:
        model.set_attn_implementation(usual)
        for hook in hooks:
            hook.remove()
    return calls, masks, cache


def as_pair(rotation: Any) -> Any:
    """Return the rotation that a model gives its attention as cos and sin: DeepSeek-V2's are complex
    numbers. What is something else is returned as it is."""
    import torch

    if torch.is_tensor(rotation) and rotation.is_complex():
        return rotation.real, rotation.imag
    return rotation


def _is_pair(rotation: Any) -> bool:
    """Return whether a rotation is cos and sin."""
    import torch

    return isinstance(rotation, tuple) and [*map(torch.is_tensor, rotation)] == [True, True]


def _without_states(model: PreTrainedModel, cache: _Cache) -> AbstractContextManager[None]:
    """Let the model's modules with a state run on each token alone. They must be given `cache`."""
    alone = partial(_each_token_alone, model.config, cache)
    return called_by(state_modules(model), alone)


def _each_token_alone(
    config: PreTrainedConfig,
    cache: _Cache,
    found: StateModule,
    run: Run,
    hidden: Tensor,
    passed: Any,
) -> Tensor:
    """Run a module with a state on each of some tokens, hidden [1 T E], as if it were a text's first.
    Raise `ProbeError` if the module was `passed` another cache than `cache`, or keeps nothing there."""
    import torch
    from transformers import DynamicCache

    name, outputs = type(found.module).__name__, []
    if passed is not cache:
        raise ProbeError(f"does not give its {name} the cache as Llama's attention gets it")
    for token in hidden.split(1, 1):
        own: Any = DynamicCache(config=config)
        outputs.append(run(token, own))
    if not any(own.layers[found.layer].is_conv_states_initialized.values()):
        raise ProbeError(f"does not keep the state of its {name} in its cache")
    return torch.cat(outputs, 1)


def _unlike(call: Call, window: int | None, masks: Mapping[int, tuple[Tensor, Any]]) -> str | None:
    """Return how one attention call differs from causal attention as the engine computes it; None
    if it does not. `window`: how many tokens the layer sees by the model's config, None for all."""
    heads, groups, width, *_ = call.heads
    shapes = [list(x.shape) for x in (call.query, call.key, call.value)]
    if heads % groups or shapes[1][2:] != shapes[0][2:] or shapes[2][:3] != shapes[1][:3]:
        return "has queries {}, keys {} and values {}".format(*shapes)
    passed = {name: given for name, given in call.keywords.items() if given is not None}
    known = PASSED | {"indices"} if is_indexed(call.module) else PASSED
    for name in sorted(passed.keys() - known):
        return MEANINGS.get(name, f"passes {name} to its attention")
    module: Any = call.module
    if passed.get("dropout"):
        return "has dropout in its attention"
    if passed.get("output_attentions"):
        return "asks for attention weights"
    if "s_aux" in passed and not hasattr(module, "sinks"):
        return "has sink logits elsewhere than in `sinks`"
    if not getattr(module, "is_causal", True):
        return "attends to later tokens too"
    expected = {"scaling": passed.get("scaling")}
    if is_latent(module):  # whose module speaks of heads that are expanded
        expected |= {"num_heads": heads, "num_key_value_groups": 1}
    else:
        expected |= {"head_dim": width, "num_key_value_groups": heads // groups}
    for name, given in expected.items():
        if given is None or getattr(module, name, None) != given:
            return f"attends with {name}={given}, which its module does not say"
    if call.mask is None or id(call.mask) not in masks:
        return "does not take its mask from transformers' mask functions"
    return None if _is_causal(masks[id(call.mask)][1], window) else _seen(window)


def _seen(window: int | None) -> str:
    wanted = (
        "all tokens up to its own"
        if window is None
        else f"the {window} tokens that its config names"
    )
    return f"lets a token see others than {wanted} (in both directions, in chunks or within another window)"


def _is_causal(mask_function: Any, window: int | None) -> bool:
    """Return True if a mask function of transformers lets each token see all that precede it, or
    `window` of them. It is asked for pairs of positions that are far apart and for neighbours."""
    import torch

    near = {0, *(2**power + step for power in range(LONGEST) for step in (-1, 0, 1))}
    near |= {place + step for place in near if window is not None for step in (window - 1, window)}
    places = torch.tensor(sorted(near), device="cpu")
    query, key = places[:, None], places[None]
    expected = key <= query if window is None else (key <= query) & (key > query - window)
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    return bool(torch.equal(mask_function(zero, zero, query, key).expand_as(expected), expected))
