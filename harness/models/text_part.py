"""Finds the text part of a model of texts and images, which runs here as a model of its own.

Texts alone take no other way through the whole than through that part: the axes along which Qwen's
models count positions (multimodal RoPE) are all the same for them. The tests hold the tokens of each
part that is named here against those of the whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.models.base import WINDOW, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# the whole -> what its text_config leaves out, and the class that computes a kind of text part that has none of its own
TEXT_PARTS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"model_type": "gemma3_text", WINDOW: 131_072},
    "Gemma4ForConditionalGeneration": {"model_type": "gemma4_text"},
    "Mistral3ForConditionalGeneration": {"model_type": "mistral"},
    "Qwen2_5_VLForConditionalGeneration": {"model_type": "qwen2"},
    "Qwen3VLForConditionalGeneration": {"model_type": "qwen3"},
    "Qwen3VLMoeForConditionalGeneration": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "Qwen3_5ForConditionalGeneration": {"model_type": "qwen3_5_text"},
    "Qwen3_5MoeForConditionalGeneration": {"model_type": "qwen3_5_moe_text"},
}
# of its weights in checkpoints of the whole, several layouts -> as they are called in the part
NAMES = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio)\."
)
# which transformers lists with models of images alone
UNLISTED = {"mistral4": "Mistral4ForCausalLM"}
AXES = ("mrope_section", "mrope_interleaved")  # which channels turn by which axis


def causal_classes() -> Mapping[str, str]:
    """Return the classes that continue a text, by their model_type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LISTED

    return {kind: name for kind, name in UNLISTED.items() if kind in CONFIG_MAPPING} | LISTED


def make_known(config: PreTrainedConfig) -> None:
    """Let transformers find the class that continues texts by `config`."""
    import transformers

    if name := UNLISTED.get(config.model_type):
        known = getattr(transformers, name)
        transformers.AutoModelForCausalLM.register(type(config), known, exist_ok=True)


def whole_of(config: Mapping[str, Any]) -> str | None:
    """Return the class of the whole if `config`, the contents of a config.json, is of a model with a
    text part; None if it is of a model of texts alone."""
    architecture = (config.get("architectures") or ["?"])[0]
    inner = (config.get("text_config") or {}).get("model_type")
    return architecture if architecture in TEXT_PARTS or inner in causal_classes() else None


def stated(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of the text part, with its class; `config` itself if it is of a
    model of texts alone."""
    if (whole := whole_of(config)) is None:
        return config
    own, text = TEXT_PARTS.get(whole, {}), config.get("text_config") or {}
    classes = causal_classes()
    kind = text["model_type"] if text.get("model_type") in classes else own["model_type"]
    merged = {**config, **own, **text, "model_type": kind}
    ropes = {key: _on_one_axis(merged.get(key)) for key in ("rope_parameters", "rope_scaling")}
    return merged | ropes | {"architectures": [classes.get(kind, kind)]}


def running(whole: PreTrainedConfig, config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of what runs: of the text part of `whole`, transformers' reading of the
    config.json with the contents `config`, or `whole` itself."""
    from transformers import AutoConfig

    text = whole.get_text_config(decoder=True)
    if text is whole:
        return whole
    tied = config.get("tie_word_embeddings")
    kind = stated(dict(config))["model_type"]
    if kind != text.model_type and whole_of(config) in TEXT_PARTS:
        settings = text.to_dict() | TEXT_PARTS[config["architectures"][0]]
        settings["rope_parameters"] = _on_one_axis(settings["rope_parameters"])
        text = AutoConfig.for_model(**settings)
        # by which transformers knows how experts are stored
        text.model_type = whole.model_type  # type: ignore[misc]
        tied = whole.tie_word_embeddings if tied is None else tied
    if tied is not None:
        text.tie_word_embeddings = tied
    return text


def check_whole(config: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` if `config`, the contents of a config.json, is of a model of texts and
    images whose text part was never held against the whole."""
    if (whole := whole_of(config)) and whole not in TEXT_PARTS:
        (part,) = stated(dict(config))["architectures"]
        raise ModelError(
            f"{name} is {whole}, whose text part is {part}: it is not read out of this whole, with whose tokens nobody "
            f"has compared it. Choose a model that is {part} alone."
        )


def renamed(name: str) -> str:
    """Return what a weight of a checkpoint of the whole is called in the text part."""
    for theirs, ours in NAMES.items():
        name = re.sub(theirs, ours, name)
    return name


def _on_one_axis(rope: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a config about the rotation for positions on one axis."""
    kept = {k: v for k, v in (rope or {}).items() if k not in AXES and v != "mrope"}
    return kept or None
