"""Checkpoints with quantised weights: their values, bytes and words, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from harness import Engine, attached
from harness.commands.report import main
from harness.engine.hf import layer_specs
from harness.models import quantised
from harness.models.base import ModelError, ModelInfo, torch_dtype
from harness.models.hub import HuggingFace
from harness.models.random import byte_tokenizer
from methods.full import Full
from methods.quest import Quest
from tests.harness.conftest import Cli
from tests.tiny import SHAPE, fresh, prompt, saved, tiny

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers asks for accelerate")
Tensors = dict[str, Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # FP4's positive numbers; the fourth bit is the sign
BLOCK = 32
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def mxfp4(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
    """The tensors that stand for an expert's matrix [E in out], and its values. 32 codes share an exponent."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    experts, inner, out = weight.shape
    random = torch.Generator().manual_seed(len(name) + out)
    codes = torch.randint(0, 16, (experts, out, inner), generator=random)
    exponents = torch.randint(121, 125, (experts, out, inner // 32), generator=random)
    signed = E2M1[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
    values = signed * torch.exp2(exponents - 127.0).repeat_interleave(32, -1)
    packed = (codes[..., 0::2] + 16 * codes[..., 1::2]).view(experts, out, inner // 32, 16)
    return {f"{name}_blocks": packed.byte(), f"{name}_scales": exponents.byte()}, values.transpose(1, 2).contiguous()


def fp8(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
    """The tensors that stand for a layer's matrix, and its values: each block of 32 x 32 has a scale."""
    if not name.endswith("_proj.weight"):  # of each expert, too
        return None
    tiles = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # [rows BLOCK columns BLOCK]
    scales = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = codes.float() * scales[:, None, :, None]
    stored = {name: codes.reshape(weight.shape), f"{name}_scale_inv": scales}
    return stored, values.reshape(weight.shape)


def int8(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
    """The tensors that stand for a layer's matrix in compressed-tensors, and its values: each row has a scale."""
    if not name.endswith("_proj.weight"):
        return None
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {name: codes, name.replace("weight", "weight_scale"): scales}, codes * scales


W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "config_groups": {"all": {"targets": ["Linear"], "weights": W8, "format": "int-quantized"}}, "ignore": ["lm_head"],
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], Callable[[str, Tensor], tuple[Tensors, Tensor] | None]]] = {
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
    "fp8": ("qwen3", FP8, fp8),
    "fp8 in experts": ("qwen3_moe", FP8, fp8),
    "compressed-tensors": ("llama", COMPRESSED, int8),
}


def checkpoint(folder: Path, scheme: str) -> tuple[HuggingFace, Tensors]:
    """A tiny quantised checkpoint, and the values that its weights stand for."""
    architecture, settings, quantise = CASES[scheme]
    source = saved(fresh(architecture, vocab_size=len(byte_tokenizer()), moe_intermediate_size=64), folder)
    stored, values = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors, values[name] = quantise(name, weight) or ({name: weight}, weight)
        stored |= tensors
    write(folder, stored, settings)
    return source, values


def write(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings or None}
    (folder / "config.json").write_text(json.dumps(config))


def tokens_agree(model: PreTrainedModel) -> None:
    """Full, and Quest with the whole prompt as its budget, give the tokens of `generate`."""
    ids = prompt(60)
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 60:].tolist()
    for method, budget in ((Full(), None), (Quest(), 1.0)):
        with attached(model, method, budget=budget) as kv:
            [ours] = Engine(kv, prefill_chunk=32).generate(ids, max_new_tokens=8).tokens
            assert ours[: len(theirs)] == theirs


def close_forecast(info: ModelInfo, model: PreTrainedModel, dtype: str) -> None:
    weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}
    assert info.weight_bytes(dtype) == pytest.approx(sum(weights.values()), rel=0.1)


@needs_accelerate
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("scheme", ["mxfp4", "fp8", "compressed-tensors"])
def test_weights_are_dequantised_to_the_values_that_they_stand_for(scheme: str, dtype: str, tmp_path: Path) -> None:
    if scheme == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    source, values = checkpoint(tmp_path, scheme)
    model, info = source.load(dtype, "cpu").model, source.describe()
    state, target = model.state_dict(), torch_dtype(dtype)
    assert {name: state[name].dtype for name in values} == dict.fromkeys(values, target)
    rounded = scheme == "compressed-tensors" and dtype == "bf16"  # its scales are in the run's dtype, too
    for name, value in values.items():
        torch.testing.assert_close(state[name], value.to(target), rtol=0.01 if rounded else 0, atol=0, msg=name)
    assert info.quantised is not None
    assert info.quantised.held(dtype).startswith(scheme)
    assert info.quantised.held(dtype).endswith(f", dequantised to {dtype}")
    assert info.weight_bytes(dtype) == sum(value.numel() for value in values.values()) * target.itemsize
    if dtype == "fp32":
        tokens_agree(model)
    with attached(model, Full()) as kv:
        assert (Engine(kv).forward is None) == (scheme != "fp8")  # plain modules of an architecture that has blocks


@needs_accelerate
def test_experts_in_fp8_are_dequantised_before_they_are_joined(tmp_path: Path) -> None:
    source, values = checkpoint(tmp_path, "fp8 in experts")
    model, info = source.load("fp32", "cpu").model, source.describe()
    write(tmp_path, values, {})
    plain = HuggingFace(str(tmp_path)).load("fp32", "cpu").model.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, plain[name]), name
    assert info.weight_bytes("fp32") == sum(weight.nbytes for weight in plain.values())


@needs_accelerate
def test_a_run_says_how_its_weights_were_held(tmp_path: Path, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where config.json names no dtype."""
    source, _ = checkpoint(tmp_path / "model", "mxfp4")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "dtype": None}))
    assert source.describe().dtype == "bf16"
    words = ("model=hf", f"model.name={tmp_path / 'model'}", "method=snapkv", "budget=0.5", "task.lengths=[300]")
    code, out, err = cli(*words, "task.depths=[0]", f"results.root={tmp_path / 'runs'}", "device=cpu")
    assert code == 0, err
    assert "fp32 (mxfp4 weights) on " in out
    assert main([str(tmp_path / "runs"), "--details"]) == 0
    assert "dtype: fp32 (weights: mxfp4, dequantised to fp32);" in capfd.readouterr().out


SCALES = "model.layers.1.mlp.up_proj.weight_scale_inv"


@needs_accelerate
@pytest.mark.parametrize(
    ("change", "block", "message"),
    [
        (lambda stored: {name: x for name, x in stored.items() if name != SCALES}, BLOCK, f"lacks {SCALES}"),
        (dict, 24, r"\[128, 160\] with scales of \[4, 5\] for blocks of \[24, 24\]"),
        (lambda stored: {name: value.float() for name, value in stored.items()}, BLOCK, "stores no weight in FP8"),
        (lambda stored: stored | {SCALES: torch.ones(4, 4)}, BLOCK, r"scales of \[4, 4\]"),  # 40 rows a block
    ],
)
def test_weights_in_fp8_whose_scales_do_not_fit_are_refused(
    change: Callable[[Tensors], Tensors], block: int, message: str, tmp_path: Path
) -> None:
    source, _ = checkpoint(tmp_path, "fp8")
    write(tmp_path, change(load_file(tmp_path / "model.safetensors")), FP8 | {"weight_block_size": [block, block]})
    with pytest.raises(ModelError, match=message):
        source.load("fp32", "cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "quanto"}, "by quanto, which is not supported.* mxfp4, fp8"),
        ({"bits": 4}, "by a scheme without a name"),
        ({"quant_method": "gptq", "bits": 4}, "pip install accelerate optimum gptqmodel`"),
        ({"quant_method": "awq", "bits": 4}, "needs accelerate and gptqmodel"),
        ({"load_in_4bit": True}, "by bitsandbytes, .*pip install accelerate bitsandbytes`"),
        (COMPRESSED, "pip install accelerate compressed-tensors`"),
        (COMPRESSED | {"kv_cache_scheme": W8}, "has a kv_cache_scheme"),
    ],
)
def test_schemes_that_cannot_be_loaded_are_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, "fp8")
    write(tmp_path, {}, settings)
    monkeypatch.setattr(quantised, "find_spec", lambda package: None)
    with pytest.raises(ModelError, match=message):
        HuggingFace(str(tmp_path)).describe()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "settings"), [("nf4", {"load_in_4bit": True}), ("int8", {"load_in_8bit": True})])
def test_weights_that_bitsandbytes_has_packed_stay_packed(
    kind: str, settings: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    checkpoint(tmp_path / "plain", "fp8")
    fresh("llama", intermediate_size=192).save_pretrained(tmp_path / "plain")  # in whole blocks of 64, for its kernels
    options = BitsAndBytesConfig(**settings, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    place = {"device_map": {"": "cpu"}, "dtype": torch.float32}
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=options, **place)
    source = saved(packed, tmp_path / "packed")
    info, model = source.describe(), source.load(dtype, "cpu").model
    assert info.quantised is not None
    assert info.quantised.held(dtype) == f"bitsandbytes {kind}"
    assert model.model.norm.weight.dtype == model.lm_head.weight.dtype == torch_dtype(dtype)
    close_forecast(info, model, dtype)
    if dtype == "fp32":
        tokens_agree(model)
    with attached(model, Full()) as kv:
        assert "quantised weights?" in str(Engine(kv).plain_reason)


class Packed(nn.Module):
    """Stands for a package's layer: its weights are integers, which it multiplies with its scale."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.abs().max() / 127
        self.codes = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.codes * self.scale).T


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_layers_that_are_not_plain_run_by_the_models_own_forward(architecture: str) -> None:
    with torch.inference_mode(mode=False):
        model, plain = (type(tiny(architecture))(tiny(architecture).config).eval() for _ in range(2))
    model.load_state_dict(tiny(architecture).state_dict())
    for path, module in [*model.named_modules()]:
        if type(module) is nn.Linear and path != "lm_head":
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, Packed(module))
    dense = {f"{path}.weight": m.codes * m.scale for path, m in model.named_modules() if isinstance(m, Packed)}
    plain.load_state_dict(tiny(architecture).state_dict() | dense)
    tokens_agree(model)
    with attached(model, Full()) as kv:
        assert "a Packed, which is not from transformers" in str(Engine(kv).plain_reason)
    hidden = torch.randn(1, 5, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(layer_specs(model), layer_specs(plain), strict=True):
        torch.testing.assert_close(ours.project_query(hidden), theirs.project_query(hidden))
