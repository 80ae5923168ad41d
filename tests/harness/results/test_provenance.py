"""The hash of the sources sees every change that can move a number, and only those."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from harness.results import provenance
from harness.results.provenance import git, source_hash, versions  # as they are before tests/conftest.py

ROOT = Path(__file__).parents[3]


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
