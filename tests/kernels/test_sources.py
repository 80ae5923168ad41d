"""The C++ files are right on a processor without AVX-512 too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AVX2 = "x86-64-v3"


@pytest.fixture(scope="module")
def compiler() -> str:
    library = pytest.importorskip("kernels.cpu.ffi.library")
    try:
        return str(library._compiler())
    except ImportError as error:
        pytest.skip(str(error))


def defines(compiler: str, march: str) -> str:
    """What the compiler says of a processor; empty where it does not know it."""
    command = [compiler, f"-march={march}", "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_results_are_right_without_avx512(compiler: str) -> None:
    """The tests of the compiled backend once more, built for AVX2, in a process of their own."""
    if "__AVX512F__" not in defines(compiler, "native") or not defines(compiler, AVX2):
        pytest.skip("this processor has no AVX-512: its own branch is tested already")
    files = [f"tests/kernels/test_{name}.py" for name in ("ops", "block", "kmeans")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cpu or compiled", *files]
    environment = {**os.environ, "KV_HARNESS_MARCH": AVX2}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 250
    assert "needs AVX-512" in done.stdout  # the skips say that it was that build
