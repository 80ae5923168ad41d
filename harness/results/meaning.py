"""The code of plug-ins by what it means: a hash per module, which comments, docstrings and layout leave alone.

Counted are the modules that define a run's method, task and model, and all they import from outside the shared core,
the standard library and installed packages. The core has a version instead (harness/results/identity.py).
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

OURS = ("harness", "methods", "kernels", "evals")
# modules, and all below them, that many plug-ins share
CORE = (
    "harness", "kernels", "methods.base", "methods.budget", "methods.layers", "methods.parts", "methods.pools",
    "methods.tiers", "evals.base", "evals.bounded", "evals.cache", "evals.data", "evals.hub", "evals.stats",
)  # fmt: skip


def code_of(*plugins: Any) -> dict[str, str]:
    """Module -> hash of what it means. A plug-in defined where there is no file, as in a notebook, has none."""
    pending = [type(plugin).__module__ for plugin in plugins]
    packages = {*OURS, *(name.partition(".")[0] for name in pending)}
    found: dict[str, str] = {}
    for name in pending:  # grows
        file = None if name in found else _file(name)
        if file is not None:
            found[name], imported = _read(file.read_bytes(), name, file.name == "__init__.py")
            pending += [module for module in imported if not _is_core(module) and _is_own(module, packages)]
    return dict(sorted(found.items()))


def meaning_now(module: str) -> str | None:
    """The hash of a module as its file is now; null where that cannot be found."""
    file = _file(module)
    return _read(file.read_bytes(), module, file.name == "__init__.py")[0] if file else None


@lru_cache(maxsize=256)
def _read(source: bytes, name: str, is_package: bool) -> tuple[str, tuple[str, ...]]:
    """Hash and imported names of a module."""
    tree = ast.parse(source)
    package = name if is_package else name.rpartition(".")[0]
    return meaning(tree), tuple(dict.fromkeys(_imports(tree, package)))


def meaning(tree: ast.AST) -> str:
    """A hash of the syntax tree; the same with every version of Python that parses it alike."""
    return hashlib.sha256(repr(_shape(tree)).encode()).hexdigest()[:16]


def _shape(node: Any) -> Any:
    """Without places, docstrings (any statement that is but a text), and fields that are empty."""
    if isinstance(node, list):
        return [_shape(one) for one in node if not _is_text(one)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _shape(value)) for name, value in ast.iter_fields(node)]
    return type(node).__name__, [(name, value) for name, value in fields if value is not None and value != []]


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that may be modules: `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _is_core(module: str) -> bool:
    return module in OURS or any(module == core or module.startswith(f"{core}.") for core in CORE)


def _is_own(module: str, packages: set[str]) -> bool:
    """Whether it is of a plug-in's package, or at least nobody's who has a version number."""
    first = module.partition(".")[0]
    if first in packages:
        return True
    file = None if first in sys.stdlib_module_names else _file(module)
    return file is not None and not {"site-packages", "dist-packages"}.intersection(file.parts)


def _file(module: str) -> Path | None:
    """Where its source is; None where there is none. Imports nothing."""
    origin = getattr(sys.modules.get(module), "__file__", None) or _origin(module)
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None


def _origin(module: str) -> str | None:
    folders, parts = None, module.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), folders)
        if spec is None or (end < len(parts) and spec.submodule_search_locations is None):
            return None
        folders = spec.submodule_search_locations
    return spec.origin if spec else None
