"""Dependencies point one way and stay inside this tree, files and folders stay small, and names do not clash."""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.config.catalogue import entries
from harness.config.clashes import clashes

ROOT = Path(__file__).parents[1]
# package -> first parts of what it may import beside the standard library's modules
ALLOWED = {
    "kernels": {"kernels", "torch", "triton", "flash_attn"},
    "methods": {"methods", "kernels", "torch"},
    "evals": {
        "evals", "numpy", "scipy", "huggingface_hub", "pyarrow", "rouge_score", "rapidfuzz", "jieba",
        "wonderwords", "tokenizers", "lm_eval", "jinja2", "math_verify",
    },
}  # fmt: skip
# files that declare what records hold; they import no more than the form of a declaration, results/fact.py
FACTS = ("results.fact", "engine.facts", "prompts.facts", "jobs.facts", "cachedattention.facts")
# room of the harness -> rooms that it may import, itself apart; a folder of a room may have an entry of its own
ROOMS: dict[str, set[str] | None] = {
    **{file: {"results.fact"} for file in FACTS},
    "commands": None,  # they may import any room
    "terminal": set(),
    "config": {"terminal", "models"},
    "models": {"terminal"},
    "prompts": set(),
    "engine": {"models", "prompts"},
    "results": {"terminal", "config", "engine", *FACTS},
    "jobs": {"terminal", "config", "models", "prompts", "engine", "results"},
    "sweeps": {"terminal", "config", "models", "results", "jobs"},
    "reports": {"terminal", "config", "engine", "results"},
    "endpoint": {"terminal", "config", "models", "prompts", "results", "jobs"},
    "checks": {"engine", "jobs"},
    "attention_statistics": {"config", "engine", "jobs", "models", "reports", "results"},
    "cachedattention": {"terminal", "config", "models", "prompts", "engine", "results", "reports"},
    "cachedattention.serving": {
        "terminal", "config", "models", "engine", "results", "reports", "jobs", "cachedattention",
    },
    "tuning": {"terminal", "config", "models", "results", "jobs", "reports"},
    "bench": {
        "terminal", "config", "models", "prompts", "engine", "results", "jobs", "bridges",
    },
    "bridges": {"terminal", "config", "models", "prompts", "engine", "results", "jobs"},
}  # fmt: skip
TRANSFORMERS = {
    f"harness/{name}.py"
    for name in (
        *(f"engine/{name}" for name in ("attach", "cache", "forward", "hf", "loop", "rotation", "states")),
        "prompts/prompt",  # the day that chat templates are told
    )
}
HYDRA = {"harness/commands/run.py", "harness/config/compose.py", "harness/sweeps/sweep.py"}
EVALS_KNOWN_TO_THE_HARNESS = (
    "evals.base", "evals.data", "evals.haystack", "evals.hub", "evals.multiturn", "evals.stats",
)  # fmt: skip
METHODS_KNOWN_TO_THE_HARNESS = (
    "methods.abilities", "methods.base", "methods.budget", "methods.dsa", "methods.full", "methods.layers",
    "methods.pools", "methods.tiers",
)  # fmt: skip
PACKAGES = ("kernels", "methods", "evals", "harness")
METHOD_ROOMS = (
    "budget",
    "tiers",
    "base",
    "pools",
    "parts",
    "layers",
    "abilities",
)  # of methods/, each imports from those before it; on top stand the methods


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def modules(*packages: str) -> dict[str, Path]:
    """Dotted name -> file."""
    files = [file for package in packages for file in sources(package)]
    named = {file.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in named.items()}


class Names(NamedTuple):
    """What a file says, without its syntax tree: hundreds of trees would slow down every later garbage collection."""

    imported: list[tuple[str, str]]  # (module, name) of each `from module import name`; the name is "" without `from`
    bound: set[str]  # functions, classes, imports, constants


@cache
def names(file: Path) -> Names:
    """Wherever they stand in the file."""
    found = Names([], set())
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.imported.extend((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file.relative_to(ROOT)}: name the package in full"
            found.imported.extend((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.bound.add(node.id)
    found.bound.update(name or module for module, name in found.imported)
    return found


def imports(file: Path) -> Iterator[str]:
    for module, name in names(file).imported:
        whole = name and "." not in module  # `from evals import stats` names a module
        yield f"{module}.{name}" if whole else module


def imported_modules(file: Path, known: Container[str]) -> Iterator[str]:
    """The modules of `known` that `file` imports, whether it names the module or something in it."""
    for module, name in names(file).imported:
        if (whole := f"{module}.{name}") in known:
            yield whole
        elif module in known:
            yield module


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
                bridge = place.startswith("harness/bridges/") and name.startswith("methods.parts")  # it holds methods
                assert bridge or name.startswith(METHODS_KNOWN_TO_THE_HARNESS), f"{place} imports {name}"
            if name.startswith("evals"):
                assert name in EVALS_KNOWN_TO_THE_HARNESS, f"{place} imports {name}"
            if name.partition(".")[0] == "transformers":
                known = place in TRANSFORMERS or place.startswith(
                    ("harness/models/", "harness/bench/", "harness/bridges/")
                )
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
    built_in = (entry for entry in entries("method").values() if not entry.bridged)
    assert found == {str(entry.target).split(".")[1] for entry in built_in}


def room_of(module: str) -> str:
    """Return the entry of `ROOMS` to which a module of the harness belongs, or its folder where there is none."""
    parts = module.split(".")[1:3]
    return ".".join(parts) if ".".join(parts) in ROOMS else next(iter(parts), "")


def test_rooms_of_the_harness_point_one_way() -> None:
    known = modules("harness")
    folders = {file.parent.name for file in (ROOT / "harness").glob("*/__init__.py")}
    assert folders == {room.partition(".")[0] for room in ROOMS}
    for name, file in known.items():
        room = room_of(name)
        assert room in {*ROOMS, "", "__main__"}, f"{file.relative_to(ROOT)}: put it into a room"
        if (allowed := ROOMS.get(room)) is not None:
            declared = {facts for facts in FACTS if facts.partition(".")[0] in {*allowed, room.partition(".")[0]}}
            others = {room_of(module) for module in imported_modules(file, known)} - {room, *declared}
            assert others <= allowed, f"{name} imports from {', '.join(sorted(others - allowed))}"


def test_no_room_comes_back_to_one_below_it() -> None:
    TopologicalSorter({room: set(allowed or ()) - {room} for room, allowed in ROOMS.items()}).prepare()
    jobs = (ROOT / "harness" / "jobs").glob("*.py")
    named = [file.name for file in jobs if "harness.cachedattention" in file.read_text()]
    assert named == ["histories.py"]  # which finds it by its name alone


def test_nothing_imports_the_endpoint() -> None:
    """A run that asks for none does not load it: a yaml file names its class."""
    known = modules("harness")
    inside = {name for name in known if name.startswith("harness.endpoint")}
    for name, file in known.items():
        assert name in inside or not inside.intersection(imported_modules(file, known)), name


def test_no_imports_in_a_circle() -> None:
    """Those for types alone count too: two files that need each other's types are one thing, or lack an interface."""
    known = modules(*PACKAGES)
    try:
        TopologicalSorter({name: set(imported_modules(file, known)) for name, file in known.items()}).prepare()
    except CycleError as circle:
        pytest.fail(f"imports in a circle: {' <- '.join(circle.args[1])}")


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_what_is_imported_from_us_is_a_file_of_this_tree(package: str) -> None:
    """Not one of another checkout, and none that was moved and is still found by its compiled form."""
    known = modules(*PACKAGES, "tests")
    for file in sources(package):
        for module, name in names(file).imported:
            if module.partition(".")[0] in (*PACKAGES, "tests"):
                found = f"{module}.{name}" in known or (
                    module in known and (not name or name in names(known[module]).bound)
                )
                assert found, f"{file.relative_to(ROOT)} imports {name} from {module}, which is no file here"


def test_the_kernels_package_imports_nothing_and_clashes_with_nothing() -> None:
    assert not list(imports(ROOT / "kernels" / "__init__.py"))
    assert clashes() == []
    assert not (0, 18, 2) <= tuple(int(part) for part in version("kv-harness").split(".")) < (0, 19)
