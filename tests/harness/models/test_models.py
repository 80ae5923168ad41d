"""Model sources: what they say without weights, what they load, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from evals.base import TaskError
from harness.models import base, embedded, snapshots
from harness.models.base import ModelError
from harness.models.embedded import SmolLM2
from harness.models.hub import HuggingFace
from harness.models.random import SHAPES, Random, byte_tokenizer
from harness.models.snapshots import fingerprint
from tests.quick import mostly_slow
from tests.tiny import prompt, tiny
from tests.tiny import saved as saved_in

COMMIT = "0123456789abcdef0123456789abcdef01234567"
needs_wheel = pytest.mark.skipif(not embedded.installed(), reason=f"needs the wheel {embedded.WHEEL}")


def local(folder: Path | str, **changes: Any) -> HuggingFace:
    fields = {"name": str(folder), "revision": None, "window": None, "trust_remote_code": False}
    return HuggingFace(**fields | changes)


def random(shape: str = "tiny", **changes: Any) -> Random:
    fields = {"shape": shape, "layers": None, "seed": 0, "tokenizer_name": "bytes"}
    return Random(**fields | changes)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], Path]:
    """A tiny model of the named architecture in the hub's layout."""

    def save(architecture: str = "llama") -> Path:
        return Path(saved_in(tiny(architecture), tmp_path / architecture).name)

    return save


@pytest.fixture
def hub_cache(tmp_path: Path, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds owner/name at COMMIT. -> its snapshot; nothing can be reached."""
    repository = tmp_path / "cache" / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    shutil.move(saved("llama"), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(snapshots, "reachable", lambda endpoint: False)
    return snapshot


# random weights


PARAMETERS = {
    "smollm2": 134_515_008, "llama-3.1-8b": 8_030_261_248, "llama-2-7b-chat": 6_738_415_616,
    "mistral-7b-v0.2": 7_241_732_096, "qwen2-7b": 7_615_616_512, "llama-3.2-1b": 1_235_814_400,
    "yi-9b-200k": 8_829_407_232, "phi-3-mini-128k": 3_821_079_552, "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184, "qwen2.5-14b": 14_770_033_664, "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704, "smollm3-3b": 3_075_098_624, "gemma-3-4b": 3_880_263_168,
    "qwen2.5-coder-0.5b": 494_032_768,
}  # fmt: skip


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_have_the_published_number_of_parameters(shape: str) -> None:
    info = random(shape).describe()
    assert info.num_parameters == PARAMETERS[shape]
    assert info.weight_bytes("bf16") == 2 * PARAMETERS[shape]
    assert info.limit == info.window == SHAPES[shape]["max_position_embeddings"]


@pytest.mark.parametrize("shape", ["gemma-3-1b", "gpt-oss-20b"])
def test_random_weights_of_layers_that_slide(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that no weight file holds are computed: the scale of Gemma's embeddings, rotations."""
    layers = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
    monkeypatch.setitem(SHAPES, shape, SHAPES[shape] | layers | heads)
    source = random(shape, tokenizer_name="bytes")
    model = source.load("fp32", "cpu").model
    plain = type(model)(model.config).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(prompt(20)).logits, plain(prompt(20)).logits)
    windows = {"gemma-3-1b": (512,) * 5 + (None,), "gpt-oss-20b": (128, None) * 3}[shape]
    assert (source.describe().layer_windows, source.describe().limit) == (
        windows,
        SHAPES[shape]["max_position_embeddings"],
    )
    rows = sum(min(1000, window or 1000) for window in windows)
    assert source.describe().kv_bytes("bf16", 1000) == 2 * rows * 16 * 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_random_model_is_what_describe_says(dtype: str) -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"layers": 2}, {"shape": "smollm2"}]
    assert len({random(**change).identity().revision for change in changes}) == 4
    source = random("smollm2", layers=1)
    loaded, info = source.load(dtype, "cpu"), source.describe()
    again, other = (random("smollm2", layers=1, seed=seed).load(dtype, "cpu").model for seed in (0, 4))
    logits = [model(prompt(20)).logits for model in (loaded.model, again, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    assert sum(p.numel() for p in loaded.model.parameters()) == info.num_parameters
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert str(loaded.model.dtype) == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[dtype]
    assert (loaded.window, loaded.name, loaded.revision) == (info.limit, info.name, info.revision)
    assert not loaded.model.training


def test_bytes_make_the_trip() -> None:
    tokenizer = byte_tokenizer()
    text = "Grüße, 日本!\n\t 4711"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) <= SHAPES["tiny"]["vocab_size"]


# local folders


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])  # tests/harness/models/test_families.py has the others
def test_a_local_folder_gives_the_model_that_was_saved(architecture: str, saved: Callable[[str], Path]) -> None:
    loaded = local(saved(architecture)).load("fp32", "cpu")
    assert torch.equal(loaded.model(prompt(30)).logits, tiny(architecture)(prompt(30)).logits)
    assert loaded.weights == "local"
    assert loaded.window == 4096
    assert loaded.model.config._attn_implementation == ("eager" if architecture == "gpt_oss" else "sdpa")


FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "model.safetensors": bytes(2 * 2**20),
    "model.safetensors.index.json": b'{"weight_map": {"x": "model.safetensors", "b": "second.safetensors"}}',
    "second.safetensors": bytes(100),
    "adapter_model.safetensors": bytes(100),
}


def test_a_byte_anywhere_in_a_folder_is_another_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one edited in place, with the size and the time of the last write that the file had."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    before = fingerprint(folder)
    for name, content in FILES.items():
        file, edited = folder / name, bytearray(content)
        old = file.stat()
        edited[edited.index(b"b") if "index" in name else len(edited) // 33] ^= 1
        with open(file, "r+b") as stream:
            stream.write(edited)
        os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
        assert fingerprint(folder) == fingerprint(folder) != before
        file.write_bytes(content)
    assert fingerprint(folder) == before
    assert [file.read_text() for file in (tmp_path / "cache" / "hashes").iterdir()].count(
        sha256(FILES["model.safetensors"]).hexdigest()
    )
    for note in (tmp_path / "cache" / "hashes").iterdir():
        note.write_bytes(b"\xff" * 64)
    assert fingerprint(folder) == before
    for note in list((tmp_path / "cache" / "hashes").iterdir()):
        note.unlink()
        os.mkfifo(note)
    assert fingerprint(folder) == before


def test_weights_that_changed_are_loaded_anew(saved: Callable[[str], Path]) -> None:
    folder = saved("llama")
    before = base.load(local(folder), "fp32", "cpu")
    assert base.load(local(folder), "fp32", "cpu") is before
    changed = deepcopy(tiny("llama"))  # which other tests share
    changed.lm_head.weight.data.zero_()
    changed.save_pretrained(folder)
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('code of a repository ran')")
    after = base.load(local(folder), "fp32", "cpu")
    assert after.revision != before.revision
    assert not after.model.lm_head.weight.any()


def test_every_end_of_an_answer_counts(saved: Callable[[str], Path]) -> None:
    folder = saved("llama")
    edit(folder / "config.json", eos_token_id=7)
    edit(folder / "generation_config.json", eos_token_id=[8, 9])
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    end, turn = byte_tokenizer().convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert local(folder).load("fp32", "cpu").eos_ids == tuple(sorted({7, 8, 9, end, turn}))


def test_a_sliding_window_limits_the_length(saved: Callable[[str], Path]) -> None:
    folder = saved("mistral")
    edit(folder / "config.json", sliding_window=64)
    info = local(folder).describe()
    assert (info.window, info.layer_windows, info.limit) == (4096, (64,) * 3, 64)
    assert "which all slide" in info.limit_because
    assert (info.num_whole_layers, info.kv_bytes("fp32", 100)) == (3, info.kv_bytes("fp32", 64))
    assert local(folder).load("fp32", "cpu").window == 64
    assert local(folder, window=32).describe().limit == 32
    further = local(folder, window=8192).describe()
    assert (further.window, info.caution) == (8192, None)
    assert further.caution.startswith("model.window=8192 goes beyond")


def test_dual_chunk_attention_limits_the_length_to_what_is_read_without(saved: Callable[[str], Path]) -> None:
    """As Qwen2.5-7B-Instruct-1M's config.json has it, with small numbers."""
    folder = saved("qwen2")
    chunks = {"chunk_size": 512, "local_size": 64, "original_max_position_embeddings": 512}
    edit(folder / "config.json", dual_chunk_attention_config=chunks)
    info, further = local(folder).describe(), local(folder, window=2048).describe()
    assert (info.limit, info.caution, further.limit) == (512, None, 2048)
    assert "leaves the model's dual chunk attention out; model.window sets more" in info.limit_because
    assert str(further.caution).startswith("model.window=2048 goes beyond the 512 tokens up to which it needs no dual")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "is GPT2LMHeadModel"),
        ({"model_type": "qwen99"}, "does not know its model_type=qwen99: a newer version may"),
        ({"architectures": None}, "is no architecture"),
        ({"rope_theta": 5e5}, "rope_theta=500000.0 and rope_theta=10000.0"),
        ({"architectures": ["ChatGLMModel"], "model_type": "chatglm", "auto_map": {"AutoConfig": "x"}}, "ends in -hf"),
        ({"attn_logit_softcapping": 50.0}, r"50\.0"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"rope_parameters": None}, "lacks rope_theta"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "lacks rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {}}}, "lacks rope_theta"),
        ({"rope_parameters": {"rope_type": "superrope", "rope_theta": 1e4}}, "superrope.* yarn, longrope"),
        ({"rope_theta": "1e5"}, "'rope_theta'"),
        ({"rope_parameters": {"rope_theta": -1.0}}, r"'rope_parameters\.rope_theta'"),
    ],
)
def test_configs_that_would_be_computed_wrongly_are_refused(
    changes: dict[str, Any], message: str, saved: Callable[[str], Path]
) -> None:
    folder = saved("llama")
    edit(folder / "config.json", **changes)
    with pytest.raises((ModelError, TaskError), match=message):
        local(folder).describe()


def test_a_window_that_no_config_names_must_be_asked_for(saved: Callable[[str], Path]) -> None:
    file = saved("llama") / "config.json"
    config = json.loads(file.read_text())
    del config["max_position_embeddings"]
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no max_position_embeddings.*model\.window"):
        local(file.parent).describe()
    assert local(file.parent, window=300).describe().limit == 300


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": None, "rope_theta": 5e5},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": None, "transformers_version": "4.31.0.dev0"},  # Llama 2's own: there was no other base yet
    ],
)
def test_a_config_of_older_days_says_how_it_rotates(changes: dict[str, Any], saved: Callable[[str], Path]) -> None:
    folder = saved("llama")
    edit(folder / "config.json", **changes)
    assert local(folder).config().rope_parameters["rope_theta"] == changes.get("rope_theta", 1e4)


UP = "model.layers.1.mlp.up_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> HuggingFace:
    """The model in `folder` with other tensors and another config."""
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})
    edit(folder / "config.json", **config)
    return local(folder)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (without(UP), {}, f"lacks {UP}"),
        (dict, {"num_hidden_layers": 4}, r"lacks model\.layers\.3\.\S+, \S+, \S+ and 6 more"),
        (without(HEAD), {}, f"lacks {HEAD}"),  # not tied
        (dict, {"num_hidden_layers": 2}, r"has, without a place in the model, model\.layers\.2\."),
        (lambda held: held | {UP: held[UP][:-8]}, {}, rf"other shapes in {UP} \(\[152, 128\] for \[160, 128"),
        (lambda held: held | {UP: held[UP].to(torch.int8)}, {}, f"stores {UP} as"),
        (lambda held: held | {UP: held[UP].to(torch.float8_e4m3fn)}, {}, f"stores {UP} as"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused_by_name(
    change: Callable[[Tensors], Tensors], config: dict[str, Any], message: str, saved: Callable[[str], Path]
) -> None:
    source = rewritten(saved("llama"), change, **config)
    with pytest.raises(ModelError, match=message):
        source.load("fp32", "cpu")


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (without(HEAD), {"tie_word_embeddings": True}),
        (lambda found: found | {HEAD: found[EMBEDDING].clone()}, {"tie_word_embeddings": True}),
        (lambda found: found | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, {}),
        (lambda found: {name.removeprefix("model."): tensor for name, tensor in found.items()}, {}),
        (lambda found: {name: tensor.double() for name, tensor in found.items()}, {}),
    ],
)
def test_weights_that_are_stored_in_another_way_are_read(
    change: Callable[[Tensors], Tensors], config: dict[str, Any], saved: Callable[[str], Path]
) -> None:
    """Tied embeddings with and without their copy, a buffer of older days, no prefix, another floating point."""
    loaded = rewritten(saved("llama"), change, **config).load("fp32", "cpu").model
    weights = tiny("llama").state_dict()
    weights[HEAD] = weights[EMBEDDING if config else HEAD]
    assert {name: torch.equal(found, weights[name]) for name, found in loaded.state_dict().items()} == dict.fromkeys(
        weights, True
    )


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("config.json", lambda content: content.replace(b'"num_hidden_layers": 3', b'"num_hidden_layers": "3"')),
        ("config.json", lambda content: content[:-9]),
        ("tokenizer.json", lambda content: content[: len(content) // 2]),
        ("model.safetensors", lambda content: content[: len(content) // 2]),
    ],
)
def test_files_that_are_damaged_are_named(
    file: str, damage: Callable[[bytes], bytes], saved: Callable[[str], Path]
) -> None:
    folder = saved("llama")
    content = (folder / file).read_bytes()
    assert damage(content) != content
    (folder / file).write_bytes(damage(content))
    with pytest.raises(ValueError, match=str(folder)):
        (local(folder).describe(), local(folder).load("fp32", "cpu"))


def test_weights_in_another_format_are_named_with_what_to_do(
    saved: Callable[[str], Path], tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "one" / "some.gguf").parent.mkdir()
    file.write_bytes(b"GGUF")
    for place in (file, file.parent):
        with pytest.raises(ModelError, match=f"{file} is a GGUF file: use model=gguf model.file={file}"):
            local(place).describe()
    folder = saved("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"lacks weights.*pytorch_model\.bin, which may hold code, is never read"):
        local(folder).load("fp32", "cpu")
    (hub_cache / "config.json").unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(hub_cache))
    monkeypatch.setattr(snapshots, "reachable", lambda endpoint: True)
    with pytest.raises(ModelError, match=r"model=gguf model\.name=owner/name model\.file=FILE\.gguf"):
        local("owner/name").describe()


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_files_are_named(lost: str, saved: Callable[[str], Path]) -> None:
    folder = saved("llama")
    tiny("llama").save_pretrained(folder, max_shard_size="200KB")
    if lost == "model.safetensors":
        (folder / lost).unlink()
        assert torch.equal(local(folder).load("fp32", "cpu").model(prompt(9)).logits, tiny("llama")(prompt(9)).logits)
        lost = min(file.name for file in folder.glob("model-*.safetensors"))
    (folder / lost).unlink()
    with pytest.raises(ModelError, match="index" if "-" in lost else lost):
        local(folder).load("fp32", "cpu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: local("owner/name", trust_remote_code=True), "trust_remote_code"),
        (lambda: local(""), r"model\.name"),
        (lambda: local("owner/name", window=0), "window=0"),
        (lambda: local(Path(__file__).parent, revision="main").describe(), "revision=main"),
        (lambda: random("gpt-5"), "shape=gpt-5"),
        (lambda: random(layers=4), "1 to 3"),
        (lambda: random(tokenizer_name="words"), "tokenizer_name=words"),
        (lambda: random(tokenizer_name="smollm2"), "49152"),
        (lambda: random().load("fp8", "cpu"), "dtype=fp8"),
        (lambda: random().load("fp32", "auto"), "cuda:N"),
        (lambda: random().load("fp32", "cuda:77"), "cuda:77"),
    ],
)
def test_what_a_user_can_get_wrong(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# the hub and its cache


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_the_cache_serves_without_a_network_and_gives_the_commit(revision: str | None, hub_cache: Path) -> None:
    loaded = local("owner/name", revision=revision).load("fp32", "cpu")
    assert (loaded.name, loaded.revision, loaded.weights) == ("owner/name", COMMIT, "hub")
    assert torch.equal(loaded.model(prompt(9)).logits, tiny("llama")(prompt(9)).logits)


def test_what_is_not_cached_is_one_clear_sentence(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, revision, says in (
        ("owner/other", None, "reached"),
        ("owner/name", "v2", "v2"),
        ("/no/folder", None, "id"),
    ):
        with pytest.raises(ModelError, match=says):
            local(name, revision=revision).describe()
    (hub_cache / "model.safetensors").unlink()
    assert local("owner/name").describe().num_layers == 3
    with pytest.raises(ModelError, match="complete"):
        local("owner/name").load("fp32", "cpu")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        local("owner/other").describe()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "gated"),
        ("RevisionNotFoundError", "revision v2"),
        ("RepositoryNotFoundError", "private"),
        ("LocalEntryNotFoundError", "why"),
    ],
)
def test_refusals_of_the_hub_become_one_sentence(
    error: str, message: str, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from httpx import Request, Response

    kind = getattr(errors, error)
    response = Response(403, request=Request("GET", "http://hub"))
    more = {} if kind is errors.LocalEntryNotFoundError else {"response": response}

    def download(name: str, *, local_files_only: bool = False, **options: Any) -> str:
        raise errors.LocalEntryNotFoundError("not here") if local_files_only else kind("why", **more)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(snapshots, "reachable", lambda endpoint: True)
    with pytest.raises(ModelError, match=message):
        local("owner/other", revision="v2").describe()


def test_weights_are_downloaded_only_to_be_loaded(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, list[str]]] = []

    def download(name: str, *, local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not here")
        asked.append((options["revision"], options["allow_patterns"]))
        return str(hub_cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(snapshots, "reachable", lambda endpoint: True)
    assert local("owner/name").identity().revision == COMMIT
    assert not any(fnmatch("model.safetensors", pattern) for _, patterns in asked for pattern in patterns)
    local("owner/name").load("fp32", "cpu")
    large = [(revision, patterns) for revision, patterns in asked if fnmatch("model.safetensors", patterns[-1])]
    assert [revision for revision, _ in large] == [COMMIT]  # also where the branch has moved on meanwhile
    assert not any(fnmatch("consolidated.safetensors", pattern) for pattern in large[0][1])


# the embedded model


@pytest.mark.model
@needs_wheel
@pytest.mark.parametrize("dtype", mostly_slow(["fp32", "bf16"], "bf16"))
def test_the_embedded_model_speaks_english(dtype: str) -> None:
    loaded = SmolLM2().load(dtype, "cpu")
    turns = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    given = loaded.tokenizer.apply_chat_template(turns, **options)
    tokens = loaded.model.generate(**given, max_new_tokens=20, do_sample=False)[
        0, given["input_ids"].shape[1] :
    ].tolist()
    assert "is Paris" in loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    assert tokens[-1] in loaded.eos_ids
    assert (loaded.window, loaded.weights) == (8192, "embedded")
