"""Makes sure that `import kernels`, `methods` and `evals` find our packages in this process,
whatever else is installed under these names.

PyPI's `kernels` (Hugging Face's hub kernels) may be installed as well. transformers would then
import our folder in its place, so in this process it is told that `kernels` is not installed.
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
    """Another package of the same name was imported in place of one of ours."""


def clashes() -> list[str]:
    """Return a sentence for each of our packages that is found elsewhere than in this project."""
    clashing = []
    for name in OURS:
        spec = find_spec(name)
        place = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if place != ROOT / name:
            clashing.append(
                f"The package `{name}` comes from {place or 'nowhere'} instead of {ROOT / name}: import harness before "
                "what imports that package."
            )
    return clashing


def settle_clashes() -> None:
    """Put our packages first on the search path, and make transformers believe that PyPI's
    `kernels` is not installed. Raise `NameClashError` if a wrong package has been imported
    already."""
    if clashes():
        sys.path.insert(0, str(ROOT))
    if found := clashes():  # one was imported already
        raise NameClashError(" ".join(found))
    if hub_kernels():
        _hide_hub_kernels()


def hub_kernels() -> str | None:
    """Return the version of PyPI's `kernels` package, or None if it is not installed."""
    try:
        return version("kernels")
    except PackageNotFoundError:
        return None


def _hide_hub_kernels() -> None:
    """Make transformers believe that PyPI's `kernels` package is not installed, because importing
    it would give transformers this project's package of the same name."""
    import_utils = import_module("transformers.utils.import_utils")

    def is_kernels_available(*versions: str) -> bool:
        return False

    for module in (import_utils, sys.modules["transformers.utils"]):
        if hasattr(module, "is_kernels_available"):
            setattr(module, "is_kernels_available", is_kernels_available)  # noqa: B010 (modules have no such field)
