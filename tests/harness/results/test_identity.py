"""What re-runs a run, and what does not."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.config.plugins import describe
from harness.config.settings import Settings
from harness.results import identity as identities
from harness.results import provenance
from harness.results.identity import code_of, identity
from harness.results.provenance import code_hash, git, source_hash, versions  # as they are before tests/conftest.py
from methods.full import Full
from methods.h2o import H2O
from methods.pqcache import PQCache
from methods.pyramidkv import PyramidKV
from tests.fast import MODEL, PQ, niah

CODE = '''
"""About it."""
import mine_helper
from numpy import array  # installed
def f(x):
    """Twice."""
    return 2 * x  # twice
'''


def hashed(source: str) -> str:
    return identities.meaning(ast.parse(source))


def named(method: Any) -> dict[str, Any]:
    return {"method": method, "task": niah(), "model": MODEL}


def made(method: Any, **settings: Any) -> dict[str, Any]:
    plugs = named(method)
    config = asdict(Settings(**settings)) | {kind: describe(one) for kind, one in plugs.items()}
    return identity(config, plugs, revision="r", prompts=["a"], answers=["b"])


def test_a_comment_or_docstring_changes_nothing_and_code_does() -> None:
    other = CODE.replace("About it", "Of that").replace('"""Twice."""', "").replace("# twice", "# doubled")
    assert hashed(other.replace("2 * x", "(2 *\n        x)")) == hashed(CODE)
    assert hashed(CODE.replace("2 * x", "3 * x")) != hashed(CODE)
    assert hashed(CODE.replace("2 * x", "2.0 * x")) != hashed(CODE)


def _elsewhere(changed: Path, find: Callable[[str], Path | None], name: str) -> Path | None:
    return changed if name == "methods.h2o" else find(name)


def test_a_change_in_one_method_reruns_that_method_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = [made(method) for method in (H2O(), PQ, Full())]
    source, find = Path(importlib.import_module("methods.h2o").__file__ or ""), identities._file
    for text, same in ((f"# a comment\n{source.read_text()}", True), (f"{source.read_text()}\nx = 1\n", False)):
        changed = tmp_path / "h2o.py"
        changed.write_text(text)
        monkeypatch.setattr(identities, "_file", partial(_elsewhere, changed, find))
        after = [made(method) for method in (H2O(), PQ, Full())]
        assert after[1:] == before[1:]
        assert (after[0] == before[0]) is same


def test_a_plug_ins_modules_are_those_outside_the_core() -> None:
    assert code_of(H2O()).keys() == {"methods.h2o"}
    assert code_of(PyramidKV()).keys() == {"methods.pyramidkv", "methods.snapkv"}
    assert code_of(niah()).keys() == {"evals.niah", "evals.needles", "evals.haystack"}
    assert code_of(MODEL).keys() == {"harness.models.random"}


def test_a_plug_in_from_outside_brings_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_helper.py").write_text("x = 1")
    (tmp_path / "mine_method.py").write_text(f"{CODE}\nclass Mine: pass\n")
    plugin = importlib.import_module("mine_method").Mine()
    before = code_of(plugin)
    assert before.keys() == {"mine_method", "mine_helper"}
    (tmp_path / "mine_helper.py").write_text("x = 2")
    after = code_of(plugin)
    assert [name for name in after if after[name] != before[name]] == ["mine_helper"]


def test_a_key_at_its_default_is_no_part_of_it() -> None:
    plain = made(PQCache())
    assert plain["method"].keys() == {"_target_"}
    assert not {"seed", "generation", "windows", "results"} & plain.keys()
    assert made(PQCache(), seed=42) == plain != made(PQCache(), seed=43)
    assert made(PQCache(b=5))["method"]["b"] == 5
    assert made(PQCache(), budget=1)["budget"] == 1
    assert made(PQCache(), budget=None)["budget"] is None  # not the default, which is left out


# The hash of the sources sees every change that can move a number, and only those.


ROOT = Path(__file__).parents[3]


def test_code_hash_sees_code_that_is_imported_or_compiled_and_no_prose(tmp_path: Path) -> None:
    files = {"__init__.py": "", "fast.py": "import torch\nfrom ours.shared import x\n", "shared.py": "x = 6 // 2\n"}
    files |= {"other.py": "", "fast.cpp": "int x = 6 / 2;\n", "simd.hpp": "#include <y>\n"}
    (tmp_path / "ours").mkdir()

    def hashed(name: str = "", more: str = "") -> str | None:
        for file, text in files.items():
            (tmp_path / "ours" / file).write_text(text + more * (file == name))
        code_hash.cache_clear()
        return code_hash("ours.fast", tmp_path)

    first = hashed()
    prose = [("fast.py", '"""Says."""\n# says\n'), ("fast.cpp", "// says\n"), ("other.py", "y = 2\n")]
    assert {hashed(*change) for change in prose} == {first}
    changes = [(name, "y = 2;\n") for name in ("fast.py", "shared.py", "fast.cpp", "simd.hpp")]
    # where a line stands in Python, and a text that C++ is made of, say something
    changes += [
        ("fast.py", text) for text in ("if x:\n    x = 2\n    x = 3\n", "if x:\n    x = 2\nx = 3\n", 'z = """a"""\n')
    ]
    assert len({first, *(hashed(*change) for change in changes)}) == 8
    assert code_hash("ours.gone", tmp_path) is None


def test_source_hash_sees_content_and_name(tmp_path: Path) -> None:
    for package in provenance.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text(package)
    hashes = [source_hash(root=tmp_path)]
    (tmp_path / "evals" / "notes.md").write_text("no source")
    assert source_hash(root=tmp_path) == hashes[0]
    (tmp_path / "kernels" / "fast.cpp").write_text("int a;")
    hashes.append(source_hash(root=tmp_path))
    (tmp_path / "kernels" / "fast.cpp").rename(tmp_path / "kernels" / "faster.cpp")
    hashes.append(source_hash(root=tmp_path))
    assert len({*hashes}) == 3


def test_git_knows_its_own_checkout_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "harness"
    package.mkdir()
    file = package / "provenance.py"
    file.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(file))
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert git() == {"commit": None, "dirty": None}
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    known = git()
    assert len(known["commit"]) == 40
    assert known["dirty"] is False
    file.write_text("x = 1")
    assert git() == known | {"dirty": True}


def test_provenance_is_plain_and_imports_no_torch() -> None:
    code = "import json, sys; from harness.results.provenance import provenance; print(json.dumps(provenance()))"
    code += "; assert 'torch' not in sys.modules"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = json.loads(printed)
    assert known["versions"]["python"].startswith("3.")
    assert known["versions"]["torch"]
    assert known["machine"]["memory_bytes"] > 0
    assert len(known["machine"]["load_average"]) == 3
    assert datetime.fromisoformat(known["time"]).utcoffset().total_seconds() == 0
    assert versions(["no-such-thing"])["no-such-thing"] is None
