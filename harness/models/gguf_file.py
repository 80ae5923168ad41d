"""Converts a Llama in a GGUF file (llama.cpp's format) to the Hugging Face layout, in fp32.

Every value of the config and the whole tokenizer come from the file's metadata; quantised weights
are expanded exactly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

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


def convert(file: Path, folder: Path) -> None:
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

    values = {name.removeprefix("llama."): f.contents() for name, f in reader.fields.items() if "llama." in name}
    tokens = {name: _field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
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
        bos_token_id=tokens["bos"],
        eos_token_id=tokens["eos"],
        pad_token_id=tokens["padding"],
    )


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerBase:
    """Return the byte-level BPE tokenizer, which takes every digit by itself.

    Digits are split off first, as in the published tokenizer and in llama.cpp (`tokenizer.ggml.pre`
    = smollm); transformers' own GGUF reader omits this, and then splits the white space before a
    digit differently."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: _field(reader, f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    fast: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase = fast(
        tokenizer_object=backend,
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        **{f"{name}_token": tokens[i] for name, i in ids.items()},
    )
    return tokenizer


def _tensors(reader: GGUFReader, config: PreTrainedConfig) -> dict[str, np.ndarray]:
    import gguf

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        *block, kind, _ = tensor.name.split(".")  # blk.7.attn_q.weight, or output_norm.weight
        rows = gguf.dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            rows = unpermute(rows, heads[kind])
        name = f"model.layers.{block[1]}.{LAYER_TENSORS[kind]}" if block else TENSORS[kind]
        weights[f"{name}.weight"] = rows
    return weights


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two halves of every head of q and k, which transformers
    does not use."""
    import numpy as np

    halves = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()
