"""Merges a LoRA adapter into the weights of a model by peft, so that the engine meets plain modules.

`model.adapter` names the folder that peft's `save_pretrained` has written, or its files lie beside the
weights in the model's own folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evals.data import value_of
from harness.models.base import Identity, ModelError
from harness.models.snapshots import ADAPTER_FILES, fingerprint

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CONFIG, WEIGHTS = ADAPTER_FILES
EMBEDDINGS = ("lm_head", "embed_tokens")
# what is read here of adapter_config.json; peft checks what it reads
STATED = {"peft_type": "text", "base_model_name_or_path?": "text"}


def holds_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def checked(place: str | Path) -> Path:
    """Return the folder of an adapter. Raise `ModelError` if it holds none, one that cannot be merged,
    or if peft is not installed."""
    folder = Path(place).expanduser()
    if lacking := [name for name in ADAPTER_FILES if not (folder / name).is_file()]:
        raise ModelError(
            f"{folder} lacks {' and '.join(lacking)} of an adapter: set model.adapter to a folder that peft's "
            "save_pretrained has written, or to null."
        )
    stated = _read(folder)
    if stated["peft_type"] != "LORA" or stated.get("megatron_config"):
        kind = "of Megatron" if stated.get("megatron_config") else stated["peft_type"]
        raise ModelError(
            f"{folder} is an adapter of the kind {kind}, which is not supported: use one of the kind LORA."
        )
    if find_spec("peft") is None:
        raise ModelError(
            f"{folder} holds an adapter, which needs peft: `pip install 'kv-harness[adapters]'`."
        )
    return folder


def refuse_as_model(folder: Path, name: str) -> None:
    """Raise `ModelError` if the model `name`, in `folder`, is an adapter without the model for which it
    was trained."""
    if holds_adapter(folder):
        base = _read(folder).get("base_model_name_or_path") or "BASE"
        raise ModelError(
            f"{name} is an adapter and holds no model: use model.name={base} model.adapter={name}."
        )


def identified(own: Identity, adapter: Path | None) -> Identity:
    """Return the identity of a model with an adapter; its revision contains a hash of the adapter's
    files. `own`: the identity without."""
    if adapter is None:
        return own
    return own._replace(revision=f"{own.revision}+adapter-sha256:{fingerprint(adapter)[:16]}")


def merged(
    build: Callable[[torch.dtype, str], PreTrainedModel],
    adapter: Path | None,
    dtype: torch.dtype,
    device: str,
) -> PreTrainedModel:
    """Return the model that `build` makes for a dtype and a device, with the weights of `adapter`
    merged in fp32 and rounded once; while it loads, a CPU holds the model in fp32 as well."""
    import torch

    if adapter is None:
        return build(dtype, device)
    base = build(torch.float32, "cpu")
    own = _form(base)
    plain = _merged_in_fp32(base, adapter)
    if _form(plain) != own:
        raise ModelError(
            f"{adapter} gives the model weights of its own, as for another number of layers or for tied embeddings: "
            "train it without, or save the merged model by peft and name that as model.name."
        )
    if (dtype, device) == (torch.float32, "cpu"):
        return plain
    model, theirs = build(dtype, device), dict(plain.named_parameters(remove_duplicate=False))
    for name, weight in model.named_parameters(remove_duplicate=False):
        weight.data.copy_(theirs[name].data)
    return model


def _form(model: PreTrainedModel) -> tuple[set[str], int]:
    """Return the names of a model's weights, and the number of tensors that they name: a weight
    under two names is one tensor."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    return set(weights), len(set(map(id, weights.values())))


def _merged_in_fp32(model: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """Return the model with an adapter merged into its weights. Raise `ModelError` if the adapter was
    made for another model."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    try:
        with warnings.catch_warnings(action="ignore"):  # what would be wrong is looked for here
            adapted = PeftModel.from_pretrained(model, str(adapter))
            read = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
            with safe_open(adapter / WEIGHTS, framework="pt") as file:
                # peft stores the weights that an embedding had before, too
                stored = {key for key in file.keys() if ".base_layer." not in key}  # noqa: SIM118
            changed = [key for key in stored for name in EMBEDDINGS if f".{name}.lora_" in key]
            if changed and model.config.tie_word_embeddings:
                raise ValueError(f"{changed[0]} changes an embedding that is the output layer, too")
            if odd := sorted(read ^ stored):
                raise ValueError(f"{odd[0]} is in one of them alone")
            plain: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # peft, torch and safetensors have kinds of their own
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelError(
            f"The adapter {adapter} does not fit {type(model).__name__} ({reason[:300]}): use the model that it was "
            "trained on."
        ) from error
    return plain


def _read(folder: Path) -> dict[str, Any]:
    stated: dict[str, Any] = value_of((folder / CONFIG).read_bytes(), STATED, str(folder / CONFIG))
    return stated
