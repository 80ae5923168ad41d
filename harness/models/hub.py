"""Loads models in the Hugging Face layout, from a local folder or the hub: resolved to one folder,
loaded from there.

Any class with which transformers continues texts runs if its attention is causal and does what the
engine computes; what does something else is refused by what it does. A class that the tests do not
cover is compared with `model.generate` before its first run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from evals.data import value_of
from harness.models import adapter as adapters
from harness.models import text_part
from harness.models.base import (
    WINDOW,
    Identity,
    ModelError,
    ModelSource,
    Quantised,
    no_window,
    refused,
)
from harness.models.layer_kinds import WHOLE
from harness.models.probe import said
from harness.models.quantised import (
    check_scales,
    check_scheme,
    complete,
    prepare,
    quantisation,
    quantised,
)
from harness.models.rope import checked, identified, stretched
from harness.models.snapshots import fingerprint, has_weights, headers, snapshot

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_ROPE = {
    "rope_theta?": "a number above 0",
    "factor?": "a number above 0",
    "partial_rotary_factor?": "a number above 0",
}
CONFIG = {  # the parts of config.json that are read here; transformers checks what it reads
    "architectures?": ["text"],
    "quantization_config?": "an object",
    "model_type?": "text",
    "is_encoder_decoder?": "true or false",
    **{
        f"{key}?": "a number"
        for key in ("attn_logit_softcapping", "kv_lora_rank", "attention_chunk_size")
    },
    **{f"{key}?": "true or false" for key in ("is_causal", "add_cross_attention", "alibi")},
    "num_kv_shared_layers?": "a number",
    "rope_parameters?": _ROPE,
    "rope_scaling?": _ROPE,
    "rope_theta?": "a number above 0",
    "partial_rotary_factor?": "a number above 0",
}
CONFIG["text_config?"] = dict(CONFIG)
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of types that need no decoding
# transformers, of Llama; every other architecture here has had it from its first release
ROPE_THETA_SINCE = (4, 33)
NAMED = 3  # names of tensors in an error


@dataclass(frozen=True)
class HuggingFace(ModelSource):
    """Provide a model in the Hugging Face layout. `name`: hub id or folder. `revision`: branch, tag
    or commit. `window`: the most tokens, None for the config's own. `rope`: another rotation, for
    longer texts (harness/models/rope.py). `device_map`: auto spreads the layers over all GPUs by
    accelerate, None keeps them on one device. `adapter`: a folder with a LoRA adapter
    (harness/models/adapter.py)."""

    name: str
    revision: str | None = None
    window: int | None = None
    rope: dict[str, Any] | None = None
    trust_remote_code: bool = False
    device_map: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.trust_remote_code:
            raise ModelError(
                "model.trust_remote_code=true is refused: code from a model repository is never run here, and what "
                "runs here needs none; leave it false."
            )
        if not self.name:
            raise ModelError(
                "model.name is empty: give a hub id (owner/name) or the path of a local folder."
            )
        if self.window is not None and self.window < 1:
            raise ModelError(
                f"model.window={self.window} must be at least 1, or null for the model's own."
            )
        object.__setattr__(self, "rope", checked(self.rope))
        if self.device_map not in (None, "auto"):
            raise ModelError(
                f"model.device_map={self.device_map} is unknown: set auto for all GPUs, or null for one."
            )
        if self.device_map and find_spec("accelerate") is None:
            raise ModelError(
                "model.device_map=auto needs accelerate: `pip install accelerate`, or set it to null."
            )

    def identity(self) -> Identity:
        folder = self.folder()
        if self._is_local():
            own = Identity(self.name, f"files-sha256:{fingerprint(folder)}", "local")
        else:
            own = Identity(self.name, folder.name, "hub")
        return adapters.identified(identified(own, self.rope), self._adapter())

    def config(self) -> PreTrainedConfig:
        from transformers import AutoConfig

        folder = self.folder()
        whole = read_config(folder)
        stated = text_part.stated(whole)
        check_config(stated, self.name)
        if quantisation(stated) and self._adapter():
            raise ModelError(
                f"{self.name} has quantised weights, into which no adapter can be merged: use the version that is not "
                "quantised."
            )
        with naming(folder / "config.json"):
            config = AutoConfig.from_pretrained(folder, **OFFLINE)
            text = text_part.running(config, whole)
        if reason := said(text):
            raise refused(self.name, reason)
        text_part.check_whole(whole, self.name)
        text_part.make_known(text)
        # the tokens that end an answer, and how weights are stored, are said of the whole model
        if text is not config:
            text.architectures, text.dtype = stated["architectures"], config.dtype or text.dtype
            text.eos_token_id = getattr(config, "eos_token_id", None) or text.eos_token_id
            if scheme := getattr(config, "quantization_config", None):
                text.quantization_config = scheme
        return stretched(text, self.rope, self.name)

    def context_window(self) -> int:
        if self.window:
            return self.window
        stated = text_part.stated(read_config(self.folder())).get(
            self.config().attribute_map.get(WINDOW, WINDOW)
        )
        # the model's class has a number, but the same for all
        if stated is None and self.rope is None:
            raise no_window(self.name)
        return super().context_window()

    def quantised(self, config: PreTrainedConfig, model: PreTrainedModel) -> Quantised | None:
        return quantised(config, model)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        folder, adapter = self.folder(), self._adapter()
        if adapter and (adapter / "tokenizer.json").is_file():
            folder = adapter  # with whose chat template it was trained
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(
                f"{self.name} has no tokenizer.json, which prompts need: save it with a fast tokenizer."
            )
        with naming(folder / "tokenizer.json"):
            # transformers corrects the regex of old Mistral tokenizers if asked to, and else warns that it is wrong
            return AutoTokenizer.from_pretrained(folder, **OFFLINE, fix_mistral_regex=True)

    def build(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        return adapters.merged(self._built, self._adapter(), dtype, device)

    def _adapter(self) -> Path | None:
        """Return the folder of the adapter that is asked for, or the model's own if one lies beside the
        weights."""
        beside = self.folder()
        if not adapters.holds_adapter(beside):
            return adapters.checked(self.adapter) if self.adapter else None
        if self.adapter:
            raise ModelError(
                f"{self.name} has an adapter beside its weights, and model.adapter={self.adapter} is another: leave "
                "that out, or take the files of the first away."
            )
        return adapters.checked(beside)

    def _built(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        import transformers
        from transformers import AutoModelForCausalLM
        from transformers.utils.import_utils import is_accelerate_available

        folder, config = self.folder(weights=True), self.config()
        auto: Any = AutoModelForCausalLM
        options = {"config": config, "dtype": dtype, "use_safetensors": True}
        # transformers would wrap an adapter that lies beside the weights around them
        options["adapter_kwargs"] = {"subfolder": "elsewhere"}
        # by some packages, which else take a GPU if there is one
        packed = bool(quantisation(config))
        # each weight goes from its file to the device
        if (device != "cpu" or packed) and is_accelerate_available():
            options["device_map"] = self.device_map or {"": device}
        check_scales(folder, config)
        logging: Any = transformers.utils.logging
        verbosity = logging.get_verbosity()
        if text_part.whole_of(read_config(folder)):
            options["key_mapping"] = text_part.NAMES
            logging.set_verbosity_error()  # it would list the weights of the other parts
        with naming(folder), ExitStack() as undo:
            undo.callback(logging.set_verbosity, verbosity)
            if packed:
                prepare(config)
            model, report = auto.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options, **OFFLINE
            )
        check_tensors(folder, model, report, packed=packed)
        complete(model, config, dtype)
        if self.device_map:
            check_places(model, self.name)
        return model if "device_map" in options else model.to(device)

    def folder(self, *, weights: bool = False) -> Path:
        """Return the folder with the model's files of one commit; what is missing is downloaded.
        `weights`: including the large files."""
        local = Path(self.name).expanduser()
        if local.suffix == ".gguf" and local.is_file():
            raise _gguf(local)
        if not self._is_local():
            small = snapshot(self.name, self.revision, weights=False)
            if not (small / "config.json").is_file():
                adapters.refuse_as_model(small, self.name)
                raise ModelError(
                    f"{self.name} has no config.json: of a repository of GGUF files, name one "
                    f"(model=gguf model.name={self.name} model.file=FILE.gguf), or choose another model."
                )
            # the weights of that commit
            return snapshot(self.name, small.name, weights=True) if weights else small
        if self.revision is not None:
            raise ModelError(
                f"model.revision={self.revision} does not apply to the local folder {local}: set it to null."
            )
        if not has_weights(local):
            adapters.refuse_as_model(local, self.name)
        if not (local / "config.json").is_file():
            if file := min(local.glob("*.gguf"), default=None):
                raise _gguf(file)
            raise ModelError(
                f"{local} holds no config.json: point model.name at a folder made by save_pretrained."
            )
        if weights and not has_weights(local):
            pickled = any(local.glob("pytorch_model*.bin"))
            why = " (pytorch_model.bin, which may hold code, is never read)" if pickled else ""
            raise ModelError(
                f"{local} lacks weights: it needs model.safetensors, or all parts named in its index{why}."
            )
        return local

    def _is_local(self) -> bool:
        return Path(self.name).expanduser().is_dir()


def _gguf(file: Path) -> ModelError:
    """Return the error for a GGUF file in the place of a folder."""
    return ModelError(f"{file} is a GGUF file: use model=gguf model.file={file}.")


@contextmanager
def naming(
    place: Path,
    remedy: str = "correct it, or fetch the model again",
    *passed: type[Exception],
) -> Iterator[None]:
    """Turn an error that transformers, or a library below it, raises inside the block into a
    `ModelError` that names `place`, the file or folder being read, and the `remedy`: each library has
    kinds of errors of its own. Those that are `passed` stay as they are."""
    as_they_are: tuple[type[BaseException], ...] = (ModelError, OSError, MemoryError, *passed)
    try:
        yield
    except as_they_are:
        raise
    except Exception as error:
        reason = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise ModelError(f"{place} cannot be read ({reason}): {remedy}.") from error


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        return value_of(file.read_bytes(), CONFIG, str(file))
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read ({error.strerror}): fetch the model again."
        ) from error


def check_config(config: dict[str, Any], name: str) -> None:
    """Raise `ModelError`, which names the cause, if the engine would compute the model wrongly."""
    from transformers import CONFIG_MAPPING

    _check_class(config, name)
    check_scheme(config, name)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    settings = signature(CONFIG_MAPPING[config["model_type"]].__init__).parameters
    if "rope_parameters" in settings and not _has_rope_theta(config, rope):
        raise ModelError(
            f"The config.json of {name} lacks rope_theta, by which the model turns keys and queries, and transformers "
            "would take a number of its own: add the one that the model was trained with (in a local copy, if need be)."
        )
    _check_one_base(config, rope, name)
    _check_rope_types(rope, name)


def _check_class(config: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` unless the model's class is one with which transformers continues texts:
    it needs no code of the repository, and is neither an encoder nor one that has an encoder."""
    import transformers
    from transformers import CONFIG_MAPPING

    architecture = (config.get("architectures") or ["no architecture"])[0]
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING and config.get("auto_map"):
        raise ModelError(
            f"{name} is {architecture}, which needs code of its repository, and that is never run here: use a "
            "checkpoint in transformers' own form (often one whose name ends in -hf)."
        )
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{name} is {architecture}, an encoder-decoder, which is not supported: choose another model."
        )
    if kind not in CONFIG_MAPPING:
        raise ModelError(
            f"{name} is {architecture}, and transformers {version('transformers')} does not know its model_type={kind}"
            ": a newer version may, or choose another model."
        )
    mapped = text_part.causal_classes().get(kind)
    # InternLM3, for which transformers takes the class of another family
    lent = bool(mapped) and getattr(transformers, str(mapped)).config_class.model_type != kind
    if architecture != mapped and not (lent and architecture.endswith("ForCausalLM")):
        raise ModelError(
            f"{name} is {architecture} (model_type={kind}), with which transformers continues no text: choose a model "
            "whose config.json names a ...ForCausalLM."
        )


def _check_one_base(config: Mapping[str, Any], rope: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` if a config names two different bases of the rotation (`rope_theta`),
    because transformers would take one of them without a word."""
    outer, whole = config.get("rope_theta"), rope.get(WHOLE)
    inner = (whole if isinstance(whole, Mapping) else rope).get("rope_theta")
    if None not in (outer, inner) and outer != inner:
        raise ModelError(
            f"The config.json of {name} names two bases of the rotation, rope_theta={outer} and rope_theta={inner} in "
            "its part about the rotation: remove the one that the model was not trained with."
        )


def _check_rope_types(rope: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` if a model's config asks for a kind of rotation (RoPE) that transformers
    does not know. `rope`: its part about the rotation; `name`: the model."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = ["default", *ROPE_INIT_FUNCTIONS]
    for kind in [rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))]:
        rope_type = kind.get("rope_type", kind.get("type", "default"))
        if rope_type not in (*known, "su"):  # Phi-3's first name for LongRoPE
            raise ModelError(
                f"The config.json of {name} asks for rope_type={rope_type}, which is unknown: correct it to what the "
                f"model was trained with, one of {', '.join(known)}."
            )


def _has_rope_theta(config: Mapping[str, Any], rope: Mapping[str, Any]) -> bool:
    """Return True if the base of the rotation (`rope_theta`) is known: the model's `config` names
    it, or `rope`, its part about the rotation, does, for all layers or for each kind of them. A
    Llama config from before there was a choice need not name it: its base is 10,000. Nor need Gemma
    3's, whose bases are the same in all sizes."""
    by_kind = [kind for kind in rope.values() if isinstance(kind, Mapping)]
    if any(place.get("rope_theta") is not None for place in (config, rope)):
        return True
    if by_kind:
        return all(kind.get("rope_theta") is not None for kind in by_kind)
    written = re.match(r"(\d+)\.(\d+)", str(config.get("transformers_version", "")))
    is_old = written is not None and tuple(map(int, written.groups())) < ROPE_THETA_SINCE
    return config.get("model_type") == "gemma3_text" or (
        config.get("model_type") == "llama" and is_old
    )


def check_places(model: PreTrainedModel, name: str) -> None:
    """Raise `ModelError` if accelerate has put parts of a model elsewhere than on GPUs."""
    places = getattr(model, "hf_device_map", {}).values()
    if outside := {"cpu", "disk"}.intersection(map(str, places)):
        raise ModelError(
            f"{name} does not fit into the GPUs: model.device_map=auto would put layers on the "
            f"{' and '.join(sorted(outside))}. Use more or larger GPUs, dtype=bf16, or quantised weights."
        )


def check_tensors(
    folder: Path, model: PreTrainedModel, report: Mapping[str, Collection[Any]], *, packed: bool
) -> None:
    """Raise `ModelError` unless every weight of `model` comes from the files in `folder`, and every
    tensor there is one of its weights. `report`: what transformers says of that; it leaves tied
    weights and computed buffers out. `packed`: config.json says how weights are quantised."""
    shapes = [
        f"{name} ({list(stored)} for {list(expected)})"
        for name, stored, expected in report["mismatched_keys"]
    ]
    faults = {
        "lacks": report["missing_keys"],
        "has other shapes in": shapes,
        "has, without a place in the model,": [
            key for key in report["unexpected_keys"] if not text_part.OTHER_PARTS.match(key)
        ],
    }
    for fault, names in faults.items():
        if names:
            raise ModelError(
                f"{folder} {fault} {_named(names)}, by its config.json: fetch both again from one place, or correct "
                "config.json; the model would compute something else."
            )
    if packed:
        return
    weights = dict(model.named_parameters(remove_duplicate=False))
    prefix = f"{model.base_model_prefix}."  # a checkpoint may leave it out
    if coded := [
        name
        for name, (dtype, _) in headers(folder).items()
        if dtype not in FLOATS and {name, prefix + name, text_part.renamed(name)} & weights.keys()
    ]:
        raise ModelError(
            f"{folder} stores {_named(coded)} as integers or in 8 bits, and its config.json has no quantization_config "
            "that says what they stand for: use the model it was made from."
        )


def _named(names: Collection[str]) -> str:
    """Return the first few of `names` and the number of the others, as text for an error."""
    first, more = sorted(names)[:NAMED], len(names) - NAMED
    return ", ".join(first) + (f" and {more} more tensors" if more > 0 else "")
