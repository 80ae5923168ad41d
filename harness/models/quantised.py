"""Says how the weights of a quantised checkpoint are held: by which scheme, with which packages, in
how many bytes.

MXFP4, FP8 and compressed-tensors are dequantised, the first two while they load. The faster ways of
transformers need the PyPI package `kernels`, which is hidden by this project's folder of that name;
compressed-tensors has a faster way for one kind of FP8 only. Everything else stays packed, in
modules of the scheme's own package."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.models.base import ModelError, Quantised
from harness.models.snapshots import headers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


class Scheme(NamedTuple):
    """Describe how transformers loads one way of quantising weights."""

    packages: tuple[str, ...]  # the modules that it imports for that
    # whether the weights are plain numbers of the run's dtype from then on
    dequantised: bool = False
    plain: bool = False  # whether its modules are then those of a model that is not quantised


SCHEMES = {  # by `quant_method` of config.json
    "mxfp4": Scheme((), dequantised=True, plain=True),
    "fp8": Scheme(("accelerate",), dequantised=True, plain=True),
    "compressed-tensors": Scheme(("accelerate", "compressed_tensors"), dequantised=True),
    "bitsandbytes": Scheme(("accelerate", "bitsandbytes")),
    "awq": Scheme(("accelerate", "gptqmodel")),
    "gptq": Scheme(("accelerate", "optimum", "gptqmodel")),
}
# of compressed-tensors: what a cache's rows, or activations, become
IGNORED = ("kv_cache_scheme", "transform_config")
# weights that share a scale where config.json does not say how many: bitsandbytes' in 4 bits
BLOCK = 64
SCALE_BYTES = 4  # of a scale, and of a zero point where there is one
FP8_SCALE = "_scale_inv"  # after the name of a weight in FP8: its scales


def quantisation(config: Mapping[str, Any] | PreTrainedConfig) -> dict[str, Any]:
    """Return the part of a model's config about its quantised weights; empty if they are not."""
    given = config if isinstance(config, Mapping) else vars(config)
    return dict(given.get("quantization_config") or {})


def _method(settings: Mapping[str, Any]) -> str:
    """Return the name of the scheme that a `quantization_config` asks for. Older ones of
    bitsandbytes do not name it."""
    bits = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return "bitsandbytes" if bits else str(settings.get("quant_method", "a scheme without a name"))


def check_scheme(config: Mapping[str, Any], name: str) -> None:
    """Raise `ModelError` if the weights of the model `name` are quantised in a way that cannot be
    loaded here: an unknown one, or one whose packages are not installed."""
    settings = quantisation(config)
    if not settings:
        return
    method = _method(settings)
    scheme = SCHEMES.get(method)
    if scheme is None:
        raise ModelError(
            f"{name} has weights quantised by {method}, which is not supported: use a version that is not quantised, "
            f"or by one of {', '.join(SCHEMES)}."
        )
    if wanted := [key for key in IGNORED if settings.get(key)]:
        raise ModelError(
            f"The config.json of {name} has a {wanted[0]} in its quantization_config, which would be ignored here: use "
            "a version without."
        )
    if lacking := [
        package.replace("_", "-") for package in scheme.packages if find_spec(package) is None
    ]:
        raise ModelError(
            f"{name} has weights quantised by {method}, for which transformers needs {' and '.join(lacking)}, not "
            f"installed here: `pip install {' '.join(lacking)}`, or use a version that is not quantised."
        )


def quantised(config: PreTrainedConfig, model: PreTrainedModel) -> Quantised | None:
    """Describe the quantised weights of `model`, which may have been made without weights; None if
    they are not quantised."""
    from torch import nn

    settings = quantisation(config)
    if not settings:
        return None
    method = _method(settings)
    scheme = SCHEMES[method]
    if scheme.dequantised:
        return Quantised(
            " ".join(filter(None, (method, settings.get("format")))), True, scheme.plain
        )
    bits = int(
        settings.get("bits") or settings.get("w_bit") or (8 if settings.get("load_in_8bit") else 4)
    )
    kind = f"{bits} bits"
    if method == "bitsandbytes":
        kind = "int8" if bits == 8 else str(settings.get("bnb_4bit_quant_type", "fp4"))
    kept = (
        settings.get("llm_int8_skip_modules")
        or settings.get("modules_to_not_convert")
        or ["lm_head"]
    )
    linear = [
        module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not _in(name, kept)
    ]
    packed = sum(module.weight.numel() for module in linear)
    group = int(settings.get("group_size") or settings.get("q_group_size") or BLOCK)
    scales = (
        sum(module.out_features for module in linear) if bits == 8 or group < 0 else packed // group
    )
    return Quantised(
        f"{method} {kind}", False, False, packed, packed * bits // 8 + scales * SCALE_BYTES
    )


def _in(name: str, kept: list[str]) -> bool:
    """Return True if the module `name` is one of those that stay as they are, or lies in one."""
    return any(
        name == part or name.startswith(f"{part}.") or f".{part}" in f".{name}" for part in kept
    )


def prepare(config: PreTrainedConfig) -> None:
    """Prepare `config` so that transformers loads the quantised weights in the way that `SCHEMES`
    says, and silence its advice: to install `kernels`, and that MXFP4 becomes bf16, which is wrong
    where another dtype was asked for. The caller lets transformers speak again after loading."""
    from transformers.utils import logging as reports

    if SCHEMES[_method(quantisation(config))].plain:
        config.quantization_config["dequantize"] = True
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    reports.set_verbosity_error()


def complete(model: PreTrainedModel, config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Bring the quantised weights that transformers has loaded into the form in which they are
    held. Raise `ModelError` if the model does not compute in `dtype`."""
    settings = quantisation(config)
    if not settings:
        return
    method = _method(settings)
    # which would dequantise them in the first forward, while a clock runs
    if method == "compressed-tensors":
        quantizer: Any = model.hf_quantizer
        if quantizer.quantization_config.is_quantization_compressed:
            quantizer.compressor.decompress_model(model)
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for path, module in model.named_modules():
        if not kept.intersection(path.split(".")) and type(module).__module__.startswith(
            ("torch.", "transformers.")
        ):
            # some are left in the dtype in which they were stored
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.to(dtype) if weight.is_floating_point() else weight.data
    if model.dtype != dtype:
        names = [str(each).removeprefix("torch.") for each in (dtype, model.dtype)]
        raise ModelError(
            f"Weights quantised by {method} cannot be computed with in {names[0]} here, but in {names[1]}: set dtype."
        )


def check_scales(folder: Path, config: PreTrainedConfig) -> None:
    """Raise `ModelError` if no weight is in FP8, if weights in FP8 lack scales, or if their scales
    are for blocks of another size than config.json says. transformers takes the size from the
    number of scales, which is wrong where the last block of a row or column is smaller than the
    others."""
    settings = quantisation(config)
    if not settings or _method(settings) != "fp8":
        return
    block, stored = list(settings.get("weight_block_size", (128, 128)) or ()), headers(folder)
    if not any(dtype.startswith("F8") for dtype, _ in stored.values()):
        raise ModelError(
            f"{folder} stores no weight in FP8, and its config.json says so in quantization_config: fetch the model "
            "again, or take that part out of a local copy."
        )
    for name, (dtype, shape) in stored.items():
        if not dtype.startswith("F8") or name.endswith(FP8_SCALE):
            continue
        if name + FP8_SCALE not in stored:
            raise ModelError(
                f"{folder} stores {name} in FP8 and lacks {name}{FP8_SCALE}: fetch the model again."
            )
        scales = stored[name + FP8_SCALE][1]
        if block and [count * size for count, size in zip(scales, block, strict=False)] != shape:
            raise ModelError(
                f"{folder} has {name} of {shape} with scales of {scales} for blocks of {block}, which it does not "
                "fill, and which transformers would dequantise wrongly: use a version that is not quantised."
            )
