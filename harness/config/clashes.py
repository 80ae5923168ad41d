"""Keeps our plainly named packages ours in this process, whatever else is installed under those names.

PyPI's `kernels` (Hugging Face's hub kernels) may live beside us. Here transformers does without it: it would import
our folder instead. Other processes are not touched.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

OURS = ("kernels", "methods", "evals")
ROOT = Path(__file__).resolve().parents[2]


class NameClashError(ImportError):
    """Another package stands where one of ours should be."""


def clashes() -> list[str]:
    """List what is wrong, one sentence each; nothing where all is well."""
    found = []
    for name in OURS:
        spec = find_spec(name)
        place = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if place != ROOT / name:
            found.append(
                f"The package `{name}` comes from {place or 'nowhere'} instead of {ROOT / name}: import harness before "
                "what imports that package."
            )
    return found


def settle_clashes() -> None:
    """Make our packages the ones that are found, and transformers blind for PyPI's `kernels`."""
    if clashes():
        sys.path.insert(0, str(ROOT))
    if found := clashes():  # one was imported already
        raise NameClashError(" ".join(found))
    if hub_kernels():
        _hide_hub_kernels()


def hub_kernels() -> str | None:
    """The version of PyPI's `kernels`, where it is installed."""
    try:
        return version("kernels")
    except PackageNotFoundError:
        return None


def _hide_hub_kernels() -> None:
    """Change transformers' answer to whether they are installed."""
    import_utils = import_module("transformers.utils.import_utils")

    def is_kernels_available(*versions: str) -> bool:
        return False

    for module in (import_utils, sys.modules["transformers.utils"]):
        if hasattr(module, "is_kernels_available"):
            setattr(module, "is_kernels_available", is_kernels_available)  # noqa: B010 (modules have no such field)
