"""What re-runs a run, and what does not."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.config.plugins import describe
from harness.config.settings import Settings
from harness.results import identity as identities
from harness.results.identity import code_of, identity
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
