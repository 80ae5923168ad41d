"""What makes a run the run it is: the same identity is continued, another one opens another folder.

It holds the configuration without keys at their defaults (so that a new key orphans no result), the code of the
plug-ins, the version of all other code, and what task, model, prompts and right answers are. The code is a hash of what
it means for each module, which comments, docstrings and layout leave alone: for the modules that define a run's method,
task and model, and all they import from outside the shared core, the standard library and installed packages. Commit,
dirty flag and hash of all sources are information in run.json; nothing depends on them.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from harness.config import plugins
from harness.config.catalogue import GROUPS
from harness.config.settings import NESTED, WITHOUT_EFFECT, recorded_defaults
from harness.results.files import canonical

# Of the code that all runs share. Raise it when outputs change, or a default of `Settings`, and make the stored tokens
# again (python -m tests.stored_tokens); and when older folders cannot be continued, as since 3.
CORE_VERSION = 3
PARTS = {
    "core": "the shared code (CORE_VERSION)",
    "task_version": "the task's version",
    "model_revision": "the model's revision",
    "prompts": "the prompts",
    "answers": "the right answers",
}
OURS = ("harness", "methods", "kernels", "evals")
# modules, and all below them, that many plug-ins share
CORE = (
    "harness", "kernels", "methods.base", "methods.budget", "methods.layers", "methods.parts", "methods.pools",
    "methods.tiers", "evals.base", "evals.bounded", "evals.data", "evals.hub", "evals.stats",
)  # fmt: skip
Values = Mapping[str, Any]


def identity(
    config: Values, named: Values, *, revision: str | None, prompts: Iterable[str], answers: Iterable[str]
) -> dict[str, Any]:
    """Return the identity of the run that `config` resolves to. `named`: its method, task and model; `prompts` and
    `answers`: the hashes of each example's prompt and of what its output is scored by."""
    return asked(config, named) | {
        "core": CORE_VERSION,
        "code": code_of(*named.values()),
        "task_version": named["task"].version,
        "model_revision": revision,
        "prompts": of_all(prompts),
        "answers": of_all(answers),
    }


def of_all(hashes: Iterable[str]) -> str:
    """Return one hash of the hashes of all examples, in their order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def asked(config: Values, named: Values) -> dict[str, Any]:
    """Return `config` without what changes no result and without what is at its default."""
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
    """Return the hub's name or the folder, else the class, with the shape of random weights."""
    model = config.get("model")
    if isinstance(model, Mapping):
        kind = str(model.get("_target_", "unknown")).rpartition(".")[2]
        model = model.get("name") or " ".join(filter(None, (kind, model.get("shape"))))
    return str(model)


def word(key: str) -> str:
    """Return a part of an identity in words; a setting is its own."""
    return f"the code of {key.removeprefix('code.')}" if key.startswith("code.") else PARTS.get(key, key)


def _same(key: str, one: Values, other: Values) -> bool:
    """Return whether two values are stored alike: a tuple is a list, but 1 (a token) is not 1.0 (the whole prompt)."""
    if key in one and key in other:
        return canonical({key: one[key]}) == canonical({key: other[key]})
    return key not in one and key not in other


def code_of(*plugins: Any) -> dict[str, str]:
    """Return the hash of what each module means. A plug-in defined where there is no file, as in a notebook, has none.
    One that is told which code to run says in `modules` where that stands."""
    pending = [type(plugin).__module__ for plugin in plugins]
    pending += [module for plugin in plugins for module in getattr(plugin, "modules", ())]
    packages = {*OURS, *(name.partition(".")[0] for name in pending)}
    found: dict[str, str] = {}
    for name in pending:  # grows
        file = None if name in found else _file(name)
        if file is not None:
            found[name], imported = _read(file.read_bytes(), name, file.name == "__init__.py")
            pending += [module for module in imported if not _is_core(module) and _is_own(module, packages)]
    return dict(sorted(found.items()))


@lru_cache(maxsize=256)
def _read(source: bytes, name: str, is_package: bool) -> tuple[str, tuple[str, ...]]:
    """Return the hash and the imported names of a module."""
    tree = ast.parse(source)
    package = name if is_package else name.rpartition(".")[0]
    return meaning(tree), tuple(dict.fromkeys(_imports(tree, package)))


def meaning(tree: ast.AST) -> str:
    """Return a hash of the syntax tree; the same with every version of Python that parses it alike."""
    return hashlib.sha256(repr(_shape(tree)).encode()).hexdigest()[:16]


def _shape(node: Any) -> Any:
    """Return a syntax tree without places, docstrings (any statement that is but a text), and fields that are empty."""
    if isinstance(node, list):
        return [_shape(one) for one in node if not _is_text(one)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _shape(value)) for name, value in ast.iter_fields(node)]
    return type(node).__name__, [(name, value) for name, value in fields if value is not None and value != []]


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield dotted names that may be modules: `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _is_core(module: str) -> bool:
    return module in OURS or any(module == core or module.startswith(f"{core}.") for core in CORE)


def _is_own(module: str, packages: set[str]) -> bool:
    """Return whether a module belongs to a plug-in, or at least to no package with a version number."""
    first = module.partition(".")[0]
    if first in packages:
        return True
    file = None if first in sys.stdlib_module_names else _file(module)
    return file is not None and not {"site-packages", "dist-packages"}.intersection(file.parts)


def _file(module: str) -> Path | None:
    """Return the file of a module's source, or None. Its parents are imported, and not the module itself."""
    origin = getattr(sys.modules.get(module), "__file__", None)
    if origin is None:
        with suppress(ImportError, ValueError, AttributeError):  # no module, but a name in one
            origin = getattr(find_spec(module), "origin", None)
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None
