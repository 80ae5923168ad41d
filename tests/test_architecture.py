"""Dependencies point one way, every yaml lists every field, and names do not clash."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.clashes import clashes
from harness.config.catalogue import GROUPS, entries
from harness.config.plugins import describe, required
from harness.config.settings import NESTED, Settings
from harness.results.files import canonical

ROOT = Path(__file__).parents[1]
# package -> first parts of what it may import beside the standard library's modules
ALLOWED = {
    "kernels": {"kernels", "torch", "triton", "flash_attn"},
    "methods": {"methods", "kernels", "torch"},
    "evals": {
        "evals", "numpy", "scipy", "datasets", "huggingface_hub", "pyarrow", "rouge", "rapidfuzz", "jieba",
        "wonderwords", "tokenizers",
    },
}  # fmt: skip
# room of the harness -> rooms it may import beside itself
ROOMS = {
    "terminal": set(),
    "config": {"terminal"},
    "models": set(),
    "prompts": set(),
    "engine": {"models", "prompts"},
    "results": {"terminal", "config", "engine"},
    "jobs": {"terminal", "config", "models", "prompts", "engine", "results"},
    "reports": {"terminal", "config", "engine", "results"},
    "bench": {"terminal", "config", "models", "prompts", "engine", "results", "jobs"},
}
COMMANDS = {"__main__", "clashes", "doctor", "lint", "list", "report", "rescore", "show"}  # they may import any room
TRANSFORMERS = {f"harness/engine/{name}.py" for name in ("attach", "cache", "calibration", "forward", "hf")}
HYDRA = {"harness/__main__.py", *(f"harness/config/{name}.py" for name in ("compose", "errors", "overrides"))}
METHODS_KNOWN_TO_THE_HARNESS = ("methods.base", "methods.full", "methods.layers", "methods.parts.stores")
METHOD_ROOMS = ("base", "parts", "layers")  # of methods/, each imports from those before it; on top stand the methods


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = "." not in node.module  # `from evals import stats` names a module
            yield from (f"{node.module}.{alias.name}" if whole else node.module for alias in node.names)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def harness_modules() -> dict[str, Path]:
    files = {file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): file for file in sources("harness")}
    return {name.removesuffix(".__init__"): file for name, file in files.items()}


def imported_modules(file: Path, known: Iterable[str]) -> Iterator[str]:
    """The modules of `known` that `file` imports, whether it names the module or something in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names}.intersection(known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = {f"{node.module}.{alias.name}" for alias in node.names}.intersection(known)
            yield from named or {node.module}.intersection(known)


@pytest.mark.parametrize("package", ALLOWED)
def test_dependencies_point_one_way(package: str) -> None:
    for file in sources(package):
        for name in imports(file):
            first = name.partition(".")[0]
            assert first in ALLOWED[package] | set(sys.stdlib_module_names), f"{file.relative_to(ROOT)} imports {name}"


def test_the_harness_knows_contracts_not_plugins() -> None:
    for file in sources("harness"):
        place = file.relative_to(ROOT).as_posix()
        for name in imports(file):
            if name.startswith("methods"):
                assert name.startswith(METHODS_KNOWN_TO_THE_HARNESS), f"{place} imports {name}"
            if name.startswith("evals"):
                assert name in ("evals.base", "evals.stats", "evals.haystack"), f"{place} imports {name}"
            if name.partition(".")[0] == "transformers":
                known = place in TRANSFORMERS or place.startswith(("harness/models/", "harness/bench/"))
                assert known, f"{place} imports {name}"
            if name.partition(".")[0] in ("hydra", "omegaconf"):
                assert place in HYDRA, f"{place} imports {name}"


def test_the_rooms_of_methods_point_one_way() -> None:
    """The contract knows no part, a part no ready-made layer, and none of them a method."""
    for file in sources("methods"):
        room = file.relative_to(ROOT / "methods").parts[0].removesuffix(".py")
        for name in imports(file):
            if room in METHOD_ROOMS and name.startswith("methods."):
                allowed = METHOD_ROOMS[: METHOD_ROOMS.index(room) + 1]
                assert name.split(".")[1] in allowed, f"{file.relative_to(ROOT)} imports {name}"


def test_a_method_is_one_file() -> None:
    """Whatever several share lies in a room; the yaml names a class in a file directly in methods/."""
    found = {path.stem for path in (ROOT / "methods").glob("*.py")} - {"__init__", *METHOD_ROOMS}
    assert found == {entry.values()["_target_"].split(".")[1] for entry in entries("method")}


def test_rooms_of_the_harness_point_one_way() -> None:
    known = harness_modules()
    assert {file.parent.name for file in known.values()} - {"harness", "common"} == set(ROOMS)
    for name, file in known.items():
        room = name.split(".")[1] if "." in name else ""
        if room in ROOMS:
            others = {module.split(".")[1] for module in imported_modules(file, known)} - {room}
            assert others <= ROOMS[room], f"{name} imports from {', '.join(sorted(others - ROOMS[room]))}"
        else:
            assert room in COMMANDS | {""}, f"{file.relative_to(ROOT)}: put it into the room it belongs to"


def test_files_and_folders_stay_small() -> None:
    for file in sources("harness"):
        assert len(file.read_text().splitlines()) <= 300, f"{file.relative_to(ROOT)}: split it by duty"
    for folder in {file.parent for file in sources("harness")}:
        assert len(list(folder.glob("*.py"))) <= 15, f"{folder.relative_to(ROOT)}: put some into a folder of their own"


def test_the_kernels_package_imports_nothing_and_clashes_with_nothing() -> None:
    assert not list(imports(ROOT / "kernels" / "__init__.py"))
    assert clashes() == []
    assert not (0, 18, 2) <= tuple(int(part) for part in version("kv-harness").split(".")) < (0, 19)


@pytest.mark.parametrize("group", GROUPS)
def test_every_yaml_lists_every_field_with_a_comment(group: str) -> None:
    explained: dict[tuple[str, str], list[str]] = {}
    for entry in entries(group):
        config = entry.values()
        if "_target_" not in config:
            continue
        module, _, name = config.pop("_target_").rpartition(".")
        known = [field for field in fields(getattr(import_module(module), name)) if field.init]
        assert set(config) == {field.name for field in known}, entry.file.name
        assert entry.headline, entry.file.name
        assert entry.card(), f"{module} has no docstring"
        for key, _, comment in entry.parameters():
            explained.setdefault((name, key), []).append(comment)
    bare = [key for key, comments in explained.items() if not any(comments)]
    assert not bare, f"no yaml says what these are: {bare}"


@pytest.mark.parametrize("group", GROUPS)
def test_defaults_in_python_are_the_yamls(group: str) -> None:
    """A class may have several yaml files (presets, a paper's variant): one of them holds its defaults."""
    differences: dict[str, list[dict[str, tuple[Any, Any]]]] = {}
    for entry in entries(group):
        from_yaml = entry.values()
        target = from_yaml.pop("_target_")
        module, _, name = target.rpartition(".")
        cls = getattr(import_module(module), name)
        given = {key: from_yaml[key] for key in required(cls)}
        from_python = json.loads(canonical(describe(cls(**given))))
        found = {key: (from_python[key], value) for key, value in from_yaml.items() if from_python[key] != value}
        differences.setdefault(target, []).append(found)
    for target, found in differences.items():
        assert {} in found, f"{target}: (Python, yaml) differ: {min(found, key=len)}"


def test_config_yaml_lists_every_setting() -> None:
    config = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())
    assert set(config) - {"defaults", "hydra"} == {field.name for field in fields(Settings)}
    for name, kind in NESTED.items():
        assert list(config[name]) == [field.name for field in fields(kind)]
        assert config[name] == vars(kind()), f"{name}: yaml and schema differ in a default"
    plain = {name: value for name, value in vars(Settings()).items() if name not in NESTED}
    assert {name: config[name] for name in plain} == plain


def test_no_property_has_a_deadline() -> None:
    """On a busy machine a first import alone takes a second."""
    hypothesis = pytest.importorskip("hypothesis")
    assert hypothesis.settings().deadline is None
