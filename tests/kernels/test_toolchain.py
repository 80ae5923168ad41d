"""What Triton builds its launchers with is tried once, and named where it is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import toolchain

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    toolchain.unfit.cache_clear()


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in (toolchain.unfit() or "")


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'ld: cannot find -lc' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert f"{broken} fails: ld: " in str(toolchain.unfit())


@pytest.mark.slow
def test_triton_falls_back_with_that_reason(tmp_path: Path) -> None:
    code = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "from kernels import ops; print(ops.top_k.refusal('triton', torch.rand(2, 3), 1))"
    )
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "install gcc" in done.stdout, done.stderr
