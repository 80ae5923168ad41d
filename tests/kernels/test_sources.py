"""The C++ files: without warnings, and right on a processor without AVX-512 too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AVX2 = "x86-64-v3"
FILES = sorted(file.stem for file in (ROOT / "kernels" / "cpu").glob("*.cpp"))


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
@pytest.mark.parametrize("march", ["native", pytest.param(AVX2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_no_warnings(name: str, march: str, compiler: str, tmp_path: Path) -> None:
    from kernels.cpu.ffi import library

    if not defines(compiler, march):
        pytest.skip(f"{compiler} does not build for {march}")
    calls = "" if name == "team" else import_module(f"kernels.cpu.{name}")._library.calls
    (tmp_path / "calls.hpp").write_text(calls)
    command = [compiler, *library.FLAGS, f"-march={march}", "-Werror", "-fsyntax-only", f"-I{tmp_path}"]
    done = subprocess.run([*command, str(library.SOURCES / f"{name}.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    assert int(passed[1]) > 300
    assert "needs AVX-512" in done.stdout  # the skips say that it was that build
