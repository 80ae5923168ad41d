"""Defines a model source: the description of a model without its weights, and the model itself.

Importing this module imports neither torch nor transformers; `describe` and `load` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from harness.models.devices import check_device
from harness.models.layer_kinds import WHOLE, layer_kinds
from harness.models.probe import Heads, ProbeError, on_meta, probe
from harness.models.state_sizes import NO_STATES, StateSizes, state_sizes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Weights = Literal["embedded", "gguf", "hub", "local", "random"]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# transformers' name for the longest text that a model was trained with
WINDOW = "max_position_embeddings"
# transformers' name for the window before its rotation was stretched
ORIGINAL = "original_max_position_embeddings"
# our name in a config for the longest text for which `model.rope` changes the rotation
STRETCHED = "stretched_window"
# what Qwen2.5-1M's config names for texts beyond its ORIGINAL, and transformers leaves out
DUAL_CHUNKS = "dual_chunk_attention_config"
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


# The model classes of transformers that the tests cover, and how their decoder layers differ from those of
# kernels/block.py, which engine/forward.py runs by blocks; empty where they do not. Other classes run, too, if their
# attention does what the engine computes (harness/models/probe.py), by their own forward and after a comparison with
# `generate`.
ARCHITECTURES = {
    "LlamaForCausalLM": "",
    "MistralForCausalLM": "",
    "Qwen2ForCausalLM": "",
    "Qwen3ForCausalLM": "",
    "Phi3ForCausalLM": "",
    "SmolLM3ForCausalLM": "",
    "Qwen3MoeForCausalLM": "its MLP is a mixture of experts",
    "MixtralForCausalLM": "its MLP is a mixture of experts",
    "Gemma3ForCausalLM": "it has norms after its sublayers as well, and a GELU MLP",
    "GlmForCausalLM": "",
    "Glm4ForCausalLM": "it has norms after its sublayers as well",
    "GptOssForCausalLM": "its MLP is a mixture of experts",
}
# names in configs of the experts per token
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


class ModelError(ValueError):
    """Report that a model cannot be used as the user asked; the message says why, and what to do
    instead."""


class Identity(NamedTuple):
    name: str
    # of what was loaded, not of what was asked for: commit hash, or hash of files or config
    revision: str
    weights: Weights


@dataclass(frozen=True, slots=True)
class Quantised:
    """Describe the quantised weights of a model."""

    name: str  # of the scheme, with its variant
    dequantised: bool  # whether a run holds them as plain numbers of its dtype
    plain: bool  # whether the modules are then those of a model that is not quantised
    packed: int = 0  # parameters that stay packed while the model runs
    packed_bytes: int = 0  # that these take

    def held(self, dtype: str) -> str:
        """Return in words how a run with this dtype holds the weights."""
        return f"{self.name}, dequantised to {dtype}" if self.dequantised else self.name


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Describe a model without loading its weights."""

    name: str
    revision: str
    weights: Weights
    architecture: str
    window: int  # prompt + new tokens
    # the window in its config, or to which model.rope stretches it, whatever was asked for
    trained_window: int
    num_layers: int  # those with keys and values
    # how the attention of each layer with keys and values is divided
    layer_heads: tuple[Heads, ...]
    rotary_dim: int  # channels of a head that are rotated, in layers that a method serves
    hidden_size: int
    inner_size: int  # channels of an MLP, or of one expert
    chosen_experts: int  # experts that a token passes through; 0 without experts
    num_parameters: int
    dtype: str  # the checkpoint's own, one of DTYPES
    # how many tokens each layer with keys and values sees, None for all
    layer_windows: tuple[int | None, ...]
    # whether the softmax of all layers has one more term per head (kernels/sink_logits.py)
    sink_logits: bool
    quantised: Quantised | None = None  # how its weights are quantised
    still_layers: tuple[int, ...] = ()  # layers that do not rotate keys and queries by position
    # the factor by which model.rope lengthens the texts for which it rotates
    stretch: float | None = None
    spread: bool = False  # whether its layers are spread over all GPUs
    # whether beyond `trained_window` it needs dual chunk attention, which transformers leaves out
    dual_chunks: bool = False
    # of its layers of linear attention, state spaces and short convolutions
    states: StateSizes = NO_STATES
    # how many further layers attend to the keys and values of each; empty where none does
    borrowers: tuple[int, ...] = ()

    @property
    def served(self) -> Heads:
        """Return how the attention of the layers is divided that a method serves; it is the same in
        all of them."""
        whole = None if None in self.layer_windows else self.layer_windows[0]
        return self.layer_heads[self.layer_windows.index(whole)]

    @property
    def head_dim(self) -> int:
        """Return the channels of a key."""
        return self.served.head_dim

    @property
    def limit(self) -> int:
        """Return the most tokens, prompt and answer, that this harness runs."""
        return limit(self.window, self.layer_windows)

    @property
    def limit_because(self) -> str:
        """Return words that follow the limit in a sentence and say where it comes from; empty if it is
        that of the config, or was asked for."""
        if self.limit < self.window:
            return " (the smallest window of its layers, which all slide)"
        if self.stretch and self.window == self.trained_window:
            own = round(self.window / self.stretch)
            return f" (model.rope makes it {self.stretch:g} x {own}; a larger factor or model.rope=null changes it)"
        if self.dual_chunks and self.window == self.trained_window:
            return " (beyond it, transformers leaves the model's dual chunk attention out; model.window sets more)"
        return ""

    @property
    def caution(self) -> str | None:
        """Return the warning for results of a model that reads further than it was trained to, or
        None."""
        if self.window <= self.trained_window:
            return None
        reach = "that its config says it was trained for"
        if self.stretch:
            reach = "to which model.rope stretches it"
        elif self.dual_chunks:
            reach = "up to which it needs no dual chunk attention, which transformers leaves out"
        return f"model.window={self.window} goes beyond the {self.trained_window} tokens {reach}"

    @property
    def num_whole_layers(self) -> int:
        """Return how many layers a method serves: those that see the whole text
        (methods/layers/window.py)."""
        return self.layer_windows.count(None) or self.num_layers

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of the weights in a run with this dtype, where quantised weights may stay
        packed."""
        packed, nbytes = (
            (self.quantised.packed, self.quantised.packed_bytes) if self.quantised else (0, 0)
        )
        return nbytes + (self.num_parameters - packed) * DTYPE_BYTES[dtype]

    def kv_bytes(self, dtype: str, tokens: int, *, slide: bool = False) -> int:
        """Return the bytes of keys and values of `tokens` tokens in all layers. `slide`: only in
        layers with a sliding window, which keep no more than their window."""
        numbers = sum(
            min(tokens, window or tokens) * heads.num_kv_heads * heads.row_channels
            for window, heads in zip(self.layer_windows, self.layer_heads, strict=True)
            if window or not slide
        )
        return numbers * DTYPE_BYTES[dtype]

    def state_bytes(self, dtype: str) -> int:
        """Return the bytes of the states of one sequence, which no method serves and which are as
        many for every text; 0 for a model of attention alone."""
        return self.states.nbytes(DTYPE_BYTES[dtype])


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str
    window: int  # prompt + new tokens that this harness can run (`ModelInfo.limit`)
    eos_ids: tuple[int, ...]
    weights: Weights


class ModelSource(ABC):
    """Describe and load one model. Subclasses are frozen dataclasses; their defaults are the values
    of their yaml, which lists every field. `device_map`: auto spreads its layers over all GPUs;
    `rope`: changes its rotation (harness/models/rope.py)."""

    device_map: str | None = None
    rope: dict[str, Any] | None = None

    @abstractmethod
    def identity(self) -> Identity:
        """Return the model's name and revision, without reading weights."""

    @abstractmethod
    def config(self) -> PreTrainedConfig:
        """Return transformers' config, without reading weights."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @abstractmethod
    def build(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        """Return the model with its weights, on `device`."""

    def context_window(self) -> int:
        """Return the most tokens, prompt and answer together, that the model is run with."""
        if window := trained_window(self.config()):
            return window
        raise no_window(self.identity().name)

    def quantised(self, config: PreTrainedConfig, model: PreTrainedModel) -> Quantised | None:
        """Describe the quantised weights of `model`, made without weights from its `config`; None if
        they are not quantised."""
        return None

    def describe(self) -> ModelInfo:
        """Return the description of the model. It is computed once, because that takes seconds, and
        again if the files of a local folder have changed."""
        return _described(self, self.identity())

    def load(self, dtype: str, device: str) -> LoadedModel:
        import torch
        import transformers

        target, place = torch_dtype(dtype), check_device(device)
        name, revision, weights = self.identity()
        tokenizer = self.tokenizer()
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()  # the harness draws its own
        # kernels are launched and graphs captured on the current device, by default the first
        if ":" in place:
            torch.cuda.set_device(place)
        model = self.build(target, place)
        model.train(False).requires_grad_(False)
        if not is_listed(model):
            self.describe()  # which raises if the engine would compute it wrongly
        # at the start of a cache line, where they are read faster
        for weight in model.parameters():
            if (
                type(weight) is torch.nn.Parameter
                and weight.device.type == "cpu"
                and weight.data_ptr() % 64
            ):
                weight.data = weight.data.clone()
        longest = limit(self.context_window(), layer_kinds(model.config).windows)
        return LoadedModel(
            model, tokenizer, name, revision, longest, eos_ids(model, tokenizer), weights
        )


@cache
def _described(source: ModelSource, identity: Identity) -> ModelInfo:
    from transformers import AutoModelForCausalLM

    config = source.config()
    try:
        model = on_meta(config, AutoModelForCausalLM.from_config)
        kinds = layer_kinds(config)
    except Exception as error:
        raise ModelError(
            f"{identity.name} cannot be built from its config ({shorten(str(error), 120)}): correct it, or choose "
            "another model."
        ) from error
    heads = probed(model, identity.name) or len(kinds.windows) * [_stated_heads(config)]
    packed = source.quantised(config, model)
    # the configs of hybrids number experts that none of their layers has
    routed = any("Experts" in type(module).__name__ for module in model.modules())
    sinks = [module.sinks for module in model.modules() if hasattr(module, "sinks")]
    saved = str(config.dtype).removeprefix("torch.")
    # transformers' default, and what quantised weights stand for
    usual = "fp32" if packed is None else "bf16"
    window = source.context_window()
    info = ModelInfo(
        *identity,
        architecture=type(model).__name__,
        window=window,
        trained_window=trained_window(config) or window,
        num_layers=len(kinds.windows),
        layer_heads=tuple(heads),
        rotary_dim=0,
        hidden_size=config.hidden_size,
        inner_size=_number(config, *["moe_intermediate_size"] * routed, "intermediate_size"),
        chosen_experts=_number(config, *CHOSEN_EXPERTS) if routed else 0,
        num_parameters=int(model.num_parameters()),  # tied ones count once
        dtype=next((name for name, full in DTYPES.items() if full == saved), usual),
        layer_windows=kinds.windows,
        # of MiMo's layers, only those that slide have some
        sink_logits=bool(sinks) and None not in sinks,
        quantised=packed,
        still_layers=tuple(
            i for i, turns in enumerate(getattr(config, "no_rope_layers", None) or ()) if not turns
        ),
        stretch=source.rope["factor"] if source.rope else None,
        spread=source.device_map is not None,
        dual_chunks=bool(getattr(config, DUAL_CHUNKS, None)),
        states=state_sizes(model),
        borrowers=kinds.borrowers if kinds.borrowing else (),
    )
    latent = info.served.values_in_keys
    rotates = config.qk_rope_head_dim if latent else int(info.head_dim * rotated_share(config))
    return replace(info, rotary_dim=rotates)


def _stated_heads(config: PreTrainedConfig) -> Heads:
    """Return how the config of a listed class divides the attention of its layers, which are alike."""
    count = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // count
    return Heads(count, config.num_key_value_heads, width, width)


def is_listed(model: PreTrainedModel) -> bool:
    """Return True if a model's own class, not only a base class of it, is one of transformers' that
    ARCHITECTURES names, and its config does not let tokens see later ones."""
    kind, config = type(model), model.config
    causal = getattr(config, "is_causal", True) and not getattr(
        config, "use_bidirectional_attention", False
    )
    return kind.__name__ in ARCHITECTURES and kind.__module__.startswith("transformers.") and causal


def probed(model: PreTrainedModel, name: str) -> list[Heads] | None:
    """Return how the attention of each layer with keys and values is divided, of a model on the meta
    device; None if its class is listed, which needs no probe. Raise `ModelError` if the engine would
    compute it wrongly."""
    if is_listed(model):
        return None
    try:
        windows = layer_kinds(model.config).windows
        # layers that borrow come after all others
        return [call.heads for call in probe(model, windows)[: len(windows)]]
    except ProbeError as reason:
        raise refused(name, str(reason)) from reason


def refused(name: str, reason: str) -> ModelError:
    """Return the error for a model that the engine would compute wrongly, for a `reason`."""
    return ModelError(f"{name} {reason}, which is not supported: choose another model.")


def no_window(name: str) -> ModelError:
    """Return the error for a model whose config does not say for how many tokens it is made."""
    return ModelError(
        f"The config of {name} has no {WINDOW}, so that nobody knows how long a text it reads: set model.window to "
        "what it was trained with."
    )


def _number(config: PreTrainedConfig, *names: str) -> int:
    """Return the value of the first of `names` that a config has; 0 if it has none. If the value is
    a list with a number for each layer, return the largest."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return int(max(value) if isinstance(value, (list, tuple)) else value)
    return 0


def torch_dtype(name: str) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise ModelError(f"dtype={name} is unknown: choose one of {', '.join(DTYPES)}.")
    return getattr(torch, DTYPES[name])


def limit(window: int, layer_windows: Sequence[int | None]) -> int:
    """Return the most tokens, prompt and answer together, that a model is run with: its `window`.
    If every layer slides, it is the smallest of `layer_windows`: beyond it a method would have no
    layer that sees the whole text."""
    sliding = [seen for seen in layer_windows if seen is not None]
    return min(window, *sliding) if len(sliding) == len(layer_windows) else window


def trained_window(config: PreTrainedConfig) -> int | None:
    """Return the longest text for which the model's rotation is made: that to which the rotation is
    stretched, or else that of the published config, or the one up to which its attention is plain.
    Return None if the config names none."""
    if window := getattr(config, STRETCHED, None):
        return int(window)
    plain = (getattr(config, DUAL_CHUNKS, None) or {}).get(ORIGINAL)
    window = plain or getattr(config, WINDOW, None)
    return window and int(window)


def full_rotation(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the part of a config that says how those layers rotate which see the whole text: its
    `rope_parameters`, or the entry for that kind of layer if each kind has its own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get(WHOLE, rope)


def rotated_share(config: PreTrainedConfig) -> float:
    """Return the share of the channels of a head that turn, in layers that see the whole text. The
    rotation called proportional turns all, some of them by nothing."""
    rope = full_rotation(config)
    all_turn = rope.get("rope_type") == "proportional"
    return 1.0 if all_turn else rope.get("partial_rotary_factor", 1.0)


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every token id that ends an answer, from all places that name one: in many
    repositories they disagree, and a missing id lowers all scores."""
    stated = [
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ]
    ids = {
        i
        for entry in stated
        for i in (entry if isinstance(entry, list) else [entry])
        if i is not None
    }
    return tuple(sorted(ids | _end_of_turn(tokenizer)))


def _end_of_turn(
    tokenizer: PreTrainedTokenizerBase, keywords: Mapping[str, Any] | None = None
) -> set[int]:
    """Return the special token with which the chat template closes the assistant's turn, if there
    is one. `keywords`: for the template (the setting template_kwargs)."""
    if not tokenizer.chat_template:
        return set()
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, **(keywords or {})))
    except Exception:
        # a template is a program and may raise anything; prompts that need it report the error
        return set()
    first = tokenizer.encode(text.rpartition("Because.")[2].lstrip(), add_special_tokens=False)[:1]
    return {i for i in first if getattr(tokenizer.added_tokens_decoder.get(i), "special", False)}


_Key = tuple[ModelSource, str, str, str]
# the model of the last run, which stays for the next one of a sweep
_loaded: dict[_Key, LoadedModel] = {}


def is_loaded(model: ModelSource, dtype: str, device: str) -> bool:
    """Return whether this model is still loaded from the last run. Any other loaded model is
    dropped, so that its memory counts as free."""
    if _key(model, dtype, device) not in _loaded:
        _loaded.clear()
    return bool(_loaded)


def load(
    model: ModelSource, dtype: str, device: str, template_kwargs: Mapping[str, Any] | None = None
) -> LoadedModel:
    """Load a model, which stays loaded for the next run of a sweep; there are never two at once.
    With `template_kwargs` its chat template may close the assistant's turn with another token, which
    then ends an answer too."""
    key = _key(model, dtype, device)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = model.load(dtype, device)
    loaded = _loaded[key]
    if not template_kwargs:
        return loaded
    return replace(
        loaded,
        eos_ids=tuple(sorted({*loaded.eos_ids, *_end_of_turn(loaded.tokenizer, template_kwargs)})),
    )


def _key(model: ModelSource, dtype: str, device: str) -> _Key:
    """Return the key by which a loaded model is known. It contains the revision, because a local
    folder whose files were changed is another model."""
    return model, model.identity().revision, dtype, device
