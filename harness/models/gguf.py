"""Reads models from GGUF files, llama.cpp's format.

transformers reads such a file; here its config, its tokenizer and its weights, expanded to fp32, are
written once to a folder of the cache in the Hugging Face layout, from which `HuggingFace` loads them.
transformers passes over what it does not know. That would change what the model computes, so a file
that says more than is read is refused."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from harness.models import adapter as adapters
from harness.models.base import Identity, ModelError, ModelSource, Quantised
from harness.models.hub import HuggingFace, naming
from harness.models.probe import on_meta
from harness.models.rope import identified
from harness.models.snapshots import cache_root, file_sha256, has_weights, hub_file

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

HASH = "gguf-sha256:"
FORMAT = 1  # increases when the conversion changes; older folders are then ignored, as those of another transformers
SCHEME = "gguf_quantisation"  # our name in a config for how the file's weights are quantised
ELSE = "take the model's own repository (model=hf)"
CONTROL = 3  # GGUF's token type of special tokens
# by which GGUF files name tokens that may end an answer
ENDS = ("eos", "eot", "eom")
# what ends an answer where a file names it as another token, such as that of padding
ALSO_ENDS = ("<|endoftext|>", "<|end_of_text|>")
# settings of an architecture that transformers passes over, and that change nothing if they are what follows
IMPLIED: Mapping[str, Callable[[Any, int], bool]] = {
    "attention.key_length": lambda value, head_dim: value == head_dim,
    "attention.value_length": lambda value, head_dim: value == head_dim,
    "rope.dimension_count": lambda value, head_dim: value == head_dim,
    "rope.scaling.type": lambda value, head_dim: value == "none",
    "expert_feed_forward_length": lambda value, head_dim: True,  # the weights have that shape
    "tensor_data_layout": lambda value, head_dim: True,  # the order in which they lay before
}


class GGUFSource(ModelSource):
    """Provide a model from one GGUF file. `window`: the most tokens, None for the file's own.
    `adapter`: a folder with a LoRA adapter (harness/models/adapter.py)."""

    window: int | None = None
    adapter: str | None = None

    @abstractmethod
    def gguf(self) -> Path:
        """Return the path of the file, downloaded if need be."""

    def named(self) -> str:
        """Return the name of the folder in the cache, before the file's hash."""
        return self.gguf().stem

    def folder(self, *, weights: bool = False) -> Path:
        """Return the folder of the cache that holds the model in the Hugging Face layout. What is
        missing is made from the file: in seconds, and with `weights` 4 bytes for each parameter."""
        file = self.gguf()
        made_by = f"v{FORMAT}-transformers-{version('transformers')}"
        folder = cache_root() / f"{self.named()}-{file_sha256(file)[:16]}-{made_by}"
        if not folder.is_dir():
            _complete(folder, file, convert)
        if weights and not has_weights(folder):
            _complete(folder / "model.safetensors", file, partial(convert_weights, folder))
        return folder

    def config(self) -> PreTrainedConfig:
        return self._unpacked().config()

    def context_window(self) -> int:
        return self._unpacked().context_window()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._unpacked().tokenizer()

    def build(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        return self._unpacked(weights=True).build(dtype, device)

    def _unpacked(self, *, weights: bool = False) -> HuggingFace:
        return HuggingFace(
            name=str(self.folder(weights=weights)),
            window=self.window,
            rope=self.rope,
            device_map=self.device_map,
            adapter=self.adapter,
        )

    def identified(self, own: Identity) -> Identity:
        """Return the identity of the file's model together with what is changed in it (rotation,
        adapter). `own`: the identity without these changes."""
        adapter = adapters.checked(self.adapter) if self.adapter else None
        return adapters.identified(identified(own, self.rope), adapter)


@dataclass(frozen=True)
class GGUF(GGUFSource):
    """Provide a model from a GGUF file of the user's. `file`: its path, or its name in a repository
    on the hub. `name`: hub id of that repository. `revision`: branch, tag or commit of it. `window`,
    `rope`, `device_map`, `adapter`: as of `HuggingFace`."""

    file: str
    name: str | None = None
    revision: str | None = None
    window: int | None = None
    rope: dict[str, Any] | None = None
    device_map: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        checked = HuggingFace(
            name=self.file, window=self.window, rope=self.rope, device_map=self.device_map
        )
        object.__setattr__(self, "rope", checked.rope)

    def gguf(self) -> Path:
        file = Path(self.file).expanduser()
        if file.is_file():
            if self.revision is not None:
                raise ModelError(
                    f"model.revision={self.revision} does not apply to the local file {file}: set it to null."
                )
            return file
        if self.name is None:
            raise ModelError(
                f"model.file={self.file} is no file here: give the path of a GGUF file, or the hub id of the "
                "repository that holds it (model.name=OWNER/NAME)."
            )
        return hub_file(self.name, self.revision, self.file)

    def identity(self) -> Identity:
        file = self.gguf()
        return self.identified(Identity(file.name, f"{HASH}{file_sha256(file)}", "gguf"))

    def quantised(self, config: PreTrainedConfig, model: PreTrainedModel) -> Quantised | None:
        return Quantised(f"GGUF {getattr(config, SCHEME)}", dequantised=True, plain=True)


def _complete(target: Path, file: Path, write: Callable[[Path, Path], None]) -> None:
    """Let `write` make the file or folder `target` from the GGUF file `file`. In the end it is
    complete or does not exist; where several processes make it at once, the first one's stays."""
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".gguf-", dir=cache_root()) as unfinished:
            made = Path(unfinished) / target.name
            write(file, made)
            if not target.exists():
                made.rename(target)
    except ModelError:
        raise
    except Exception as error:  # libraries in Rust report a full disk as a bare Exception
        if target.exists():
            return
        remedy = (
            "run `make setup`"
            if isinstance(error, ImportError)
            else "set KV_HARNESS_CACHE to a folder with more room"
        )
        raise ModelError(
            f"{file} cannot be unpacked into {cache_root()} (4 bytes for each parameter): {error}; {remedy}."
        ) from error


def convert(file: Path, folder: Path) -> None:
    """Write config and tokenizer of the GGUF file `file` to the new folder `folder`."""
    reader = _opened(file)
    with naming(file, ELSE, ImportError):
        config = _config(reader, file)
        _check_tensors(reader, file, config)
        tokenizer = _tokenizer(reader, file, config)
    folder.mkdir()
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def convert_weights(folder: Path, file: Path, target: Path) -> None:
    """Write the weights of the GGUF file `file`, expanded exactly to fp32, to the safetensors file
    `target`. `folder`: holds the config that `convert` has made of that file."""
    from safetensors.torch import save_file
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = _Named(AutoConfig.from_pretrained(folder))
    with naming(file, ELSE, ImportError):  # such as a quantisation that gguf does not know
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    tensors = read["tensors"]
    save_file({name: t.contiguous() for name, t in tensors.items()}, target, {"format": "pt"})


class _Named:
    """Stand in for a model where transformers' reader of GGUF files asks for the names of its
    weights. Given the model itself, the reader would go through all modules and build the table of
    names for each."""

    def __init__(self, config: PreTrainedConfig) -> None:
        from transformers import AutoModelForCausalLM

        self.config = config
        self.state_dict = on_meta(config, AutoModelForCausalLM.from_config).state_dict

    def named_children(self) -> tuple[()]:
        return ()


def _check_tensors(reader: GGUFReader, file: Path, config: PreTrainedConfig) -> None:
    """Raise `ModelError` if transformers has no place for one of the file's tensors."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    processor = TENSOR_PROCESSORS.get(_architecture(reader), TensorProcessor)(config.to_dict())
    known = get_gguf_hf_weights_map(_Named(config), processor)
    for name in (tensor.name for tensor in reader.tensors):
        # the weights of all experts of a layer have no suffix there
        if name not in known and name.removesuffix(".weight") not in known:
            raise _unread(file, f"the tensor {name}")


def _opened(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(f"{file} is no whole GGUF file ({error}): fetch it again.") from error
    if (parts := _field(reader, "split.count", 1)) > 1:
        raise ModelError(
            f"{file} is one of {parts} parts of a model: join them with llama.cpp's "
            "`llama-gguf-split --merge FIRST_PART FILE`, and give that file."
        )
    return reader


def _field(reader: GGUFReader, name: str, otherwise: Any = None) -> Any:
    field = reader.fields.get(name)
    return otherwise if field is None else field.contents()


def _architecture(reader: GGUFReader) -> str:
    return str(_field(reader, "general.architecture"))


def _config(reader: GGUFReader, file: Path) -> PreTrainedConfig:
    from gguf import LlamaFileType
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture, mapping = _architecture(reader), dict[str, Any](GGUF_TO_TRANSFORMERS_MAPPING)
    plain = {_plain(name): keys for name, keys in mapping["config"].items()}
    if _plain(architecture) not in plain:
        raise ModelError(
            f"{file} holds a model of the architecture {architecture}, which transformers {version('transformers')} "
            "is not known to read from GGUF files: take the model's own repository (model=hf), or choose another."
        )
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"{file} is a {config.model_type}, which continues no text: choose another model."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for key, value in _settings(reader, architecture):
        implied = IMPLIED.get(key, lambda value, head_dim: False)
        if plain[_plain(architecture)].get(key) is None and not implied(value, head_dim):
            raise _unread(file, f"{architecture}.{key}={value}")
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.update({key: _shortest(value) for key, value in config.to_dict().items()})
    for key in ("_model_name_or_path", "unk_token_id"):  # which the file, but no config, has
        vars(config).pop(key, None)
    config.eos_token_id = _ends(reader)
    file_type = LlamaFileType(_field(reader, "general.file_type", LlamaFileType.ALL_F32))
    setattr(config, SCHEME, file_type.name.removeprefix("MOSTLY_").removeprefix("ALL_"))
    return config


def _plain(architecture: str) -> str:
    """Return an architecture as llama.cpp and transformers both spell it, without its dashes."""
    return architecture.replace("-", "").replace("_", "")


def _settings(reader: GGUFReader, architecture: str) -> Iterator[tuple[str, Any]]:
    """Yield what the file says of its architecture, as key and value."""
    prefix = f"{architecture}."
    for name, field in reader.fields.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), field.contents()


def _unread(file: Path, what: str) -> ModelError:
    return ModelError(
        f"{file} has {what}, which transformers {version('transformers')} does not read, so the model would compute "
        "something else: take the model's own repository (model=hf)."
    )


def _shortest(value: Any) -> Any:
    """Return a number that the file stores in 32 bits as the shortest decimal that has these bits,
    which is what was meant: 1e-05 and not 9.99999974e-06."""
    import numpy as np

    if isinstance(value, dict):
        return {key: _shortest(item) for key, item in value.items()}
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _ends(reader: GGUFReader) -> int | list[int]:
    """Return the ids of the tokens that end an answer: one, or a list of several."""
    tokens = _field(reader, "tokenizer.ggml.tokens")
    named = {
        name: _field(reader, f"tokenizer.ggml.{name}_token_id")
        for name in (*ENDS, "bos", "padding")
    }
    ends = [
        i for name, i in named.items() if i is not None and (name in ENDS or tokens[i] in ALSO_ENDS)
    ]
    several = list(dict.fromkeys(ends))
    return several[0] if len(several) == 1 else several


def _tokenizer(reader: GGUFReader, file: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    if _field(reader, "tokenizer.ggml.pre") != "smollm":
        _check_splitter(reader, file)
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Digits are split off first, as in the published tokenizer and in llama.cpp; transformers' own reader omits this,
    # and then splits the white space before a digit differently.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {
        ours: _field(reader, f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()
    }
    return byte_level(
        tokens,
        special,
        pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        merges,
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=config.max_position_embeddings,
        **{f"{name}_token": tokens[i] for name, i in ids.items()},
    )


def _check_splitter(reader: GGUFReader, file: Path) -> None:
    """Raise `ModelError` if transformers does not know how the tokenizer of a file splits a text
    before it merges pairs of bytes: it would then split it as GPT-2 does."""
    splitter = _field(reader, "tokenizer.ggml.pre")
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        raise ModelError(
            f"{file} needs a newer transformers than {version('transformers')}, which splits texts otherwise: run "
            "`pip install -U transformers`."
        ) from None
    if _field(reader, "tokenizer.ggml.model") == "gpt2" and splitter not in (
        "gpt-2",
        *GGUF_PRE_TOKENIZER_SPLITS,
    ):
        raise _unread(file, f"a tokenizer that splits texts as {splitter}")


def byte_level(
    tokens: Sequence[str],
    special: Sequence[str],
    splitter: PreTokenizer,
    merges: Sequence[Any] = (),
    **options: Any,
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer of `tokens`, in the order of their ids, some of which are
    `special`. `splitter`: splits a text before pairs are merged; `merges`: these pairs, most
    frequent first; `options`: further arguments of transformers' tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
