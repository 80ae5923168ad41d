"""Models from GGUF files: what transformers reads of them is what runs, and what it passes over is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from harness.models import embedded, gguf
from harness.models.base import ModelError
from harness.models.embedded import SmolLM2
from harness.models.gguf import GGUF
from harness.results.identity import model_name
from tests.tiny import prompt, saved, tiny

needs_wheel = pytest.mark.skipif(not embedded.installed(), reason=f"needs the wheel {embedded.WHEEL}")
needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="transformers builds a model from a GGUF file with accelerate only"
)
QWEN = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "kv-harness-models")
QWEN_FILE = QWEN / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
needs_qwen = pytest.mark.skipif(not QWEN_FILE.is_file(), reason="needs Qwen2.5-Coder-0.5B's GGUF file in the cache")
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEXTS = [
    "def f(x: int) -> str:\n    return f'{x!r}'  # code\n\n\tif a != b: pass",
    "naïve Grüße, 日本語の都市, emoji 🙂👩‍👩‍👧, עברית, \u00a0 nbsp, e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><file_sep>x year 1999, 3.14",
]
Written = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Return a function that writes a tiny Qwen2 as llama.cpp's converter does, in 8 bits."""
    return partial(write, tmp_path / "tiny.gguf")


def write(file: Path, *, tensors: dict[str, Any] | None = None, arch: str = "qwen2", **settings: Any) -> Path:
    """Write a GGUF file of random weights. `settings`: change or add to the architecture's, with __ for a dot."""
    import numpy as np
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter, LlamaFileType, quantize

    writer, draw = GGUFWriter(file, arch), np.random.default_rng(0)
    tokens = [END, START, STOP, *sorted(ByteLevel.alphabet()), "Ġt", "he"]
    usual = {
        "block_count": 2, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    for key, value in {**usual, **{key.replace("__", "."): value for key, value in settings.items()}}.items():
        name = key if key.startswith("split.") else f"{arch}.{key}"
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[type(value)](name, value)
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), 64), "output_norm.weight": (64,)}
    for layer in range(2):
        block = {
            "attn_norm.weight": (64,), "ffn_norm.weight": (64,), "attn_q.weight": (64, 64), "attn_k.weight": (32, 64),
            "attn_v.weight": (32, 64), "attn_q.bias": (64,), "attn_k.bias": (32,), "attn_v.bias": (32,),
            "attn_output.weight": (64, 64), "ffn_gate.weight": (128, 64), "ffn_up.weight": (128, 64),
            "ffn_down.weight": (64, 128),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in {**shapes, **(tensors or {})}.items():
        values = draw.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) > 1:
            writer.add_tensor(name, quantize(values, Kind.Q8_0), raw_dtype=Kind.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@needs_accelerate
def test_a_file_runs_as_transformers_reads_it(written: Written, tmp_path: Path) -> None:
    file = written()
    source = GGUF(str(file))
    ours = source.load("fp32", "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokens = prompt(20) % 261
    assert torch.equal(ours.model(tokens).logits, theirs(tokens).logits)
    assert (ours.window, ours.eos_ids) == (4096, (0, 2))  # the file names the first as the token of padding alone
    described = source.describe()
    assert described.quantised is not None
    assert described.quantised.held("bf16") == "GGUF Q8_0, dequantised to bf16"
    name, revision, weights = source.identity()
    assert (name, weights) == ("tiny.gguf", "gguf")
    assert revision == f"gguf-sha256:{gguf.file_sha256(file)}"
    assert ours.model.config.rms_norm_eps == 1e-6  # and not the 9.99999997e-07 that 32 bits hold


def test_the_weights_are_written_when_a_run_needs_them(written: Written, tmp_path: Path) -> None:
    source = GGUF(str(written()))
    source.describe()
    folder = source.folder()
    assert not (folder / "model.safetensors").exists()
    source.load("fp32", "cpu")
    assert (folder / "model.safetensors").is_file()
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {folder.name}


def test_the_tokenizer_is_that_of_the_vocabulary(written: Written) -> None:
    tokenizer = GGUF(str(written())).tokenizer()
    tokens = [END, START, STOP, *sorted(ByteLevel.alphabet()), "Ġt", "he"]
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[("Ġ", "t"), ("h", "e")])
    theirs.add_special_tokens({"additional_special_tokens": [START, STOP]})
    for text in TEXTS:
        assert tokenizer(text).input_ids == theirs(text).input_ids  # without a first token (BOS)


@needs_qwen
@pytest.mark.slow
def test_the_tokenizer_of_a_real_file_is_qwens() -> None:
    reader = gguf._opened(QWEN_FILE)
    tokens, merges = (gguf._field(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    vocab = {token: i for i, token in enumerate(tokens)}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    theirs.add_special_tokens({"additional_special_tokens": [START, STOP]})
    source = GGUF(str(QWEN_FILE))
    for text in TEXTS:
        assert source.tokenizer()(text).input_ids == theirs(text).input_ids
    assert source.config().eos_token_id == [151645, 151643]
    assert source.context_window() == 32768


def in_hub_cache(cache: Path, file: Path, name: str) -> None:
    """Lay `file` where huggingface_hub keeps it in its cache."""
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    file.rename(folder / file.name)


def test_a_file_of_a_repository_is_the_same_model(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written()
    identity = GGUF(str(file)).identity()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    in_hub_cache(tmp_path / "hub", file, "maker/tiny-GGUF")
    source = GGUF(file.name, name="maker/tiny-GGUF")
    assert model_name({"model": vars(source)}) == "tiny.gguf"  # a repository holds several
    assert source.identity() == identity
    assert source.context_window() == 4096
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        GGUF("other.gguf", name="maker/tiny-GGUF").identity()
    with pytest.raises(ModelError, match=r"model.revision=v1 does not apply to the local file"):
        GGUF(str(written()), name="maker/tiny-GGUF", revision="v1").identity()
    with pytest.raises(ModelError, match=r"model.file=tiny.gguf is no file here.*model.name=OWNER/NAME"):
        GGUF(file.name).identity()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arch": "whisper"}, "architecture whisper, which transformers .* is not known to read"),
        ({"split__count": 3}, "one of 3 parts of a model: join them with .*llama-gguf-split --merge"),
        ({"rope__scaling__factor": 4.0}, "has qwen2.rope.scaling.factor=4.0, which transformers .* does not read"),
        ({"attention__key_length": 32}, "has qwen2.attention.key_length=32"),
        ({"tensors": {"rope_freqs.weight": (8,)}}, "has the tensor rope_freqs.weight"),
    ],
)
def test_what_transformers_passes_over_is_refused(written: Written, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        GGUF(str(written(**change))).describe()
    assert not list(gguf.cache_root().glob("tiny-*"))


def test_a_file_that_transformers_cannot_read_is_named(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise KeyError("tokens")

    monkeypatch.setattr(gguf, "_tokenizer", fail)
    with pytest.raises(ModelError, match=r"tiny.gguf cannot be read \('tokens'\): take the model's own repository"):
        GGUF(str(written())).describe()


def test_what_follows_from_the_rest_is_no_difference(written: Written) -> None:
    file = written(attention__key_length=16, attention__value_length=16, rope__scaling__type="none")
    assert GGUF(str(file)).describe().head_dim == 16


@pytest.mark.parametrize("size", [3, 600, 40_000])
def test_a_truncated_file_is_refused(written: Written, size: int) -> None:
    file = written()
    assert file.stat().st_size > 40_000
    os.truncate(file, size)
    with pytest.raises(ModelError, match=r"tiny.gguf is no whole GGUF file .*: fetch it again"):
        GGUF(str(file)).describe()


def test_a_tokenizer_that_would_split_otherwise_is_refused(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    monkeypatch.setattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", {})
    with pytest.raises(ModelError, match="a tokenizer that splits texts as qwen2"):
        GGUF(str(written())).describe()


# the embedded model


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return where the embedded model, for which a tiny one stands in, is converted to each time."""
    made: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        saved(tiny("llama"), folder)

    (tmp_path / "tiny.gguf").write_text("the wheel's file")
    monkeypatch.setattr(gguf, "convert", convert)
    monkeypatch.setattr(embedded, "find_gguf", lambda: tmp_path / "tiny.gguf")
    return made


def test_the_embedded_model_is_converted_once_and_completely(conversions: list[Path]) -> None:
    for _ in range(2):
        assert torch.equal(SmolLM2().load("fp32", "cpu").model(prompt(20)).logits, tiny("llama")(prompt(20)).logits)
    folder = SmolLM2().folder()
    assert len(conversions) == 1
    assert list(folder.parent.iterdir()) == [folder]
    gguf._complete(folder, folder, gguf.convert)  # another process was first
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'gguf'"), "make setup"),
        (Exception("No space left on device (os error 28)"), "KV_HARNESS_CACHE"),  # of tokenizers, written in Rust
    ],
)
def test_a_conversion_that_fails_leaves_nothing(
    error: Exception, says: str, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, folder: Path) -> None:
        folder.mkdir()
        raise error

    monkeypatch.setattr(gguf, "convert", fail)
    with pytest.raises(ModelError, match=says):
        SmolLM2().load("fp32", "cpu")
    assert not list(gguf.cache_root().iterdir())


@pytest.mark.slow
@pytest.mark.model
@needs_wheel
def test_the_embedded_tokenizer_agrees_with_transformers_but_for_space_before_digits() -> None:
    file = embedded.find_gguf()
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = SmolLM2().tokenizer()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.decode(ours.encode(TEXTS[0])) == TEXTS[0]
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    # llama.cpp and the published tokenizer split digits off first
    assert ours.tokenize("x\n    12") == ["x", "ĊĠĠĠĠ", "1", "2"]
    assert theirs.tokenize("x\n    12") == ["x", "ĊĠĠĠ", "Ġ", "1", "2"]
