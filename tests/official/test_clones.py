"""What `make test-official` does with the clones that it is given, without any of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.official.clones import VARIABLE, Repository, TopK, released, without_cuda

SOMETHING = Repository("somebody/Something", "0" * 40)


def test_without_clones_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="make test-official CLONES=folder"):
        SOMETHING.clone()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"git clone https://github\.com/somebody/Something"):
        SOMETHING.clone()


def test_another_commit_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone = tmp_path / "Something"
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(clone)], check=True)
    subprocess.run(["git", *author, "-C", str(clone), "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.warns(UserWarning, match=f"what differs was measured at {SOMETHING.commit}"):
        assert SOMETHING.clone() == clone


def test_their_modules_are_gone_afterwards(tmp_path: Path) -> None:
    """Names of theirs may be ours, and what they import may be missing here."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise AssertionError('a package on the way must not run')")
    (tmp_path / "kernels" / "choice.py").write_text(
        "import torch\nfrom no_such_package.inner import number\nfrom .beside import other\n"
        "def choose(x):\n    assert x.is_cuda\n"
        "    return x.topk(number).indices + torch.zeros(other, dtype=torch.int64, device='cuda')\n"
    )
    (tmp_path / "kernels" / "beside.py").write_text("other = 1")
    ours = sys.modules["kernels"]
    stubs = {"no_such_package.inner": {"number": 2}}
    with released(tmp_path, "kernels.choice", stubs) as module, without_cuda(), TopK() as top:
        assert module.choose(torch.tensor([3.0, 1.0, 2.0])).tolist() == [0, 2]
    assert [one.tolist() for one in top.chosen] == [[0, 2]]
    assert sys.modules["kernels"] is ours
    assert not {"kernels.choice", "kernels.beside", "no_such_package.inner"} & sys.modules.keys()
    assert str(tmp_path) not in sys.path
