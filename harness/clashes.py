"""Our packages have plain names; this finds foreign ones in their place before they do harm."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

OURS = ("kernels", "methods", "evals")
ROOT = Path(__file__).resolve().parent.parent


class NameClashError(ImportError):
    """Another package stands where one of ours should be."""


def clashes() -> list[str]:
    """What is wrong, one sentence each; empty where all is well."""
    found = []
    for name in OURS:
        spec = find_spec(name)
        place = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if place != ROOT / name:
            found.append(
                f"The package `{name}` comes from {place or 'nowhere'} instead of {ROOT / name}: start Python in the "
                "project's folder, or uninstall the other package of that name."
            )
    try:
        hub = version("kernels")
    except PackageNotFoundError:
        return found
    # transformers imports this package when it is installed, and would find our folder in its place
    return [*found, f"The PyPI package `kernels` {hub} clashes with our folder: run `pip uninstall kernels`."]


def refuse_clashes() -> None:
    if found := clashes():
        raise NameClashError(" ".join(found))
