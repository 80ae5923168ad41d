"""The identity of a run: a run with the same identity is continued, one with another identity gets
another folder.

The identity holds the configuration without keys at their defaults (so that a new key orphans no
result), hashes of the plug-ins' code, the version of all other code, and hashes of model, prompts
and right answers. The code hash of a module ignores comments, docstrings and layout. It covers the
modules that define a run's method, task and model, and all that they import except the shared core,
the standard library and installed packages. Commit, dirty flag and the hash of all sources are only
recorded in run.json; nothing depends on them.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from harness.config import plugins
from harness.config.catalogue import GROUPS
from harness.config.settings import NESTED, WITHOUT_EFFECT, recorded_defaults
from harness.results.files import canonical

# Of the code that all runs share. Raise it when outputs change, or a default of `Settings`, and make the stored tokens
# again (python -m tests.stored_tokens); and when older folders cannot be continued, as since 3.
CORE_VERSION = 4
PARTS = {
    "core": "the shared code (CORE_VERSION)",
    "task_version": "the task's version",
    "model_revision": "the model's revision",
    "prompts": "the prompts",
    "answers": "the right answers",
    "served": "what the server says of the model",
}
OURS = ("harness", "methods", "kernels", "evals")
# modules, and all below them, that many plug-ins share
CORE = (
    "harness", "kernels", "methods.abilities", "methods.base", "methods.budget", "methods.layers", "methods.parts",
    "methods.pools", "methods.tiers", "evals.base", "evals.bounded", "evals.data", "evals.hub", "evals.stats",
)  # fmt: skip
Values = Mapping[str, Any]


def identity(
    config: Values,
    named: Values,
    *,
    revision: str | None,
    prompts: Iterable[str],
    answers: Iterable[str],
) -> dict[str, Any]:
    """Return the identity of the run that `config` describes, as plain values. `named`: its method,
    task and model; `prompts` and `answers`: a hash per example of its prompt and of its right
    answers."""
    return asked(config, named) | {
        "core": CORE_VERSION,
        "code": code_of(*named.values()),
        "task_version": named["task"].version,
        "model_revision": revision,
        "prompts": of_all(prompts),
        "answers": of_all(answers),
    }


def of_all(hashes: Iterable[str]) -> str:
    """Return one hash over the hashes of all examples, in their order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def asked(config: Values, named: Values) -> dict[str, Any]:
    """Return `config` without keys that change no result and without values at their defaults, so
    that what stays identifies the run. `named`: its method, task and model, which know the defaults
    of their parameters."""
    usual = recorded_defaults() | {kind: plugins.defaults(plugin) for kind, plugin in named.items()}
    asked: dict[str, Any] = {}
    for key, value in config.items():
        if key in NESTED or key in GROUPS:
            kept = [name for name in value if f"{key}.{name}" not in WITHOUT_EFFECT]
            value = {name: value[name] for name in kept if not _same(name, value, usual[key])}
        if key not in WITHOUT_EFFECT and value != {} and not _same(key, config, usual):
            asked[key] = value
    return asked


def model_name(config: Mapping[str, Any]) -> str:
    """Return the name of the model's file, its name on the hub or its folder; without one, its class,
    and for random weights the shape; then the name of an adapter's folder."""
    model = config.get("model")
    if isinstance(model, Mapping):
        kind = str(model.get("_target_", "unknown")).rpartition(".")[2]
        adapter = model.get("adapter")
        file, named = model.get("file"), model.get("checkpoint") or model.get("name")
        shape = " ".join(filter(None, (kind, model.get("shape"))))
        model = Path(file).name if file else named or shape
        if adapter:
            model = f"{model} with {Path(adapter).name}"
    return str(model)


def word(key: str) -> str:
    """Return a key of a run's identity (all that decides the run's results) in words for messages,
    as "the code of ..."; settings keep their names."""
    return (
        f"the code of {key.removeprefix('code.')}"
        if key.startswith("code.")
        else PARTS.get(key, key)
    )


def _same(key: str, one: Values, other: Values) -> bool:
    """Return True if a key has the same value in both mappings as JSON stores it: a tuple equals a
    list, but 1 (one token) is not 1.0 (the whole prompt)."""
    if key in one and key in other:
        return canonical({key: one[key]}) == canonical({key: other[key]})
    return key not in one and key not in other


def code_of(*plugins: Any) -> dict[str, str]:
    """Return a hash of the code of each module that the plug-ins are defined in or import from
    outside the shared core. A plug-in without a source file, as in a notebook, has no hash. A
    plug-in that runs code named by a parameter lists its modules in `modules`."""
    pending = [type(plugin).__module__ for plugin in plugins]
    pending += [module for plugin in plugins for module in getattr(plugin, "modules", ())]
    packages = {*OURS, *(name.partition(".")[0] for name in pending)}
    hashes: dict[str, str] = {}
    for name in pending:  # grows
        file = None if name in hashes else _file(name)
        if file is not None:
            hashes[name], imported = parsed(file.read_bytes(), name, file.name == "__init__.py")
            pending += [
                module for module in imported if not _is_core(module) and _is_own(module, packages)
            ]
    return dict(sorted(hashes.items()))


@cache
def parsed(source: bytes, name: str, is_package: bool) -> tuple[str, tuple[str, ...]]:
    """Return the hash of a module's code, and the names that it imports."""
    tree = ast.parse(source)
    package = name if is_package else name.rpartition(".")[0]
    return meaning(tree), tuple(dict.fromkeys(_imports(tree, package)))


def meaning(tree: ast.AST) -> str:
    """Return a hash of a syntax tree that ignores layout and docstrings and is the same under every
    version of Python."""
    return hashlib.sha256(repr(_shape(tree)).encode()).hexdigest()[:16]


def _shape(node: Any) -> Any:
    """Return a syntax tree as nested tuples, without positions, docstrings (any statement that is
    only a string) and empty fields."""
    if isinstance(node, list):
        return [_shape(part) for part in node if not _is_text(part)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _shape(value)) for name, value in ast.iter_fields(node)]
    return type(node).__name__, [
        (name, value) for name, value in fields if value is not None and value != []
    ]


def _is_text(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that a module imports; `from a import b` gives a and a.b, since b may
    be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else str(node.module)
            )
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _is_core(module: str) -> bool:
    return module in OURS or any(module == core or module.startswith(f"{core}.") for core in CORE)


def _is_own(module: str, packages: set[str]) -> bool:
    """Return True if a module belongs to a plug-in or is in no installed package, so that no
    version number stands for its code."""
    first = module.partition(".")[0]
    if first in packages:
        return True
    file = None if first in sys.stdlib_module_names else _file(module)
    return file is not None and not {"site-packages", "dist-packages"}.intersection(file.parts)


def _file(module: str) -> Path | None:
    """Return the source file of a module, or None. Finding it imports the module's parent packages,
    but not the module itself."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    if origin is None:
        with suppress(ImportError, ValueError, AttributeError):  # no module, but a name in one
            origin = getattr(find_spec(module), "origin", None)
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None
