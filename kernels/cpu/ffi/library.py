"""Builds a C++ file of kernels/cpu/ into a shared library, once per machine and version, and loads
it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch  # first: its OpenMP runtime is then the one the libraries share  # noqa: F401

from kernels.cpu.ffi.bindings import Function, bound, header
from kernels.temporary import TemporaryFolder, remove_abandoned

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[1]
FLAGS = (
    "-O3 -fopenmp -shared -fPIC -std=c++17 -fno-math-errno -fno-trapping-math -ffp-contract=fast "
    "-fvisibility=hidden -Wall -Wextra -Wno-psabi"  # no vector goes from one library to another
).split()


def load(name: str, *functions: Function) -> SimpleNamespace:
    """Load these functions of the C++ file `name`.cpp, building it first if it is not cached.
    Return a namespace with one Python function each. Raises ImportError, which says why, where it
    cannot."""
    if sys.platform != "linux":
        raise ImportError(f"the compiled CPU backend is built on Linux only, not on {sys.platform}")
    team()
    calls = header(functions)
    return SimpleNamespace(calls=calls, **bound(_load(name, calls), functions))


def march() -> str:
    """Return the processor to build for, as the compiler's -march names it: this machine's, or
    KV_HARNESS_MARCH. x86-64-v3 is AVX2 without AVX-512."""
    return os.environ.get("KV_HARNESS_MARCH") or "native"


@cache
def team() -> ctypes.CDLL:
    """Load the library that holds the state which all compiled libraries share, such as the number
    of threads (team.cpp); they find its functions among the global names."""
    remove_abandoned(_folder())
    library = _load("team", "", ctypes.RTLD_GLOBAL)
    library.kv_team_size.argtypes = [ctypes.c_int64]
    library.kv_team_report.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return library


def _load(name: str, calls: str, mode: int = ctypes.RTLD_LOCAL) -> ctypes.CDLL:
    compiler = _compiler()
    built = _folder() / f"{name}-{_key(name, calls, compiler)}.so"
    if not built.exists():
        _build(SOURCES / f"{name}.cpp", calls, built, compiler)
    try:
        return ctypes.CDLL(str(built), mode)
    except OSError as error:
        raise ImportError(f"cannot load {built}: {error}") from error


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise ImportError("no C++ compiler found (g++ or clang++, or set CXX)")


def _folder() -> Path:
    named = os.environ.get("KV_HARNESS_CACHE")
    base = (
        Path(named).expanduser()
        if named
        else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kv-harness")
    )
    return base.expanduser() / "kernels"


def _key(name: str, calls: str, compiler: str) -> str:
    """Return a hash of all that a built library depends on, for its file name: the source, the
    flags, and what the compiler says about itself and the processor."""
    digest = hashlib.sha256(" ".join([*FLAGS, march(), calls]).encode())
    for file in (*sorted(SOURCES.glob("*.hpp")), SOURCES / f"{name}.cpp"):
        digest.update(file.read_bytes())
    digest.update(
        _run([compiler, f"-march={march()}", "-dM", "-E", "-x", "c++", os.devnull]).encode()
    )
    return digest.hexdigest()[:16]


def _build(source: Path, calls: str, built: Path, compiler: str) -> None:
    """Compile a C++ file to the library `built`, by way of a temporary file that is renamed, so
    that concurrent processes each build and none loads half a library."""
    log.info("building %s (once per machine and version)", source.name)
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("build-", _folder()) as folder:
            fresh = folder / source.with_suffix(".so").name
            (folder / "calls.hpp").write_text(calls)
            _run(
                [
                    compiler,
                    *FLAGS,
                    f"-march={march()}",
                    f"-I{folder}",
                    str(source),
                    "-o",
                    str(fresh),
                ]
            )
            fresh.replace(built)
    except OSError as error:
        raise ImportError(
            f"cannot write into {_folder()}: {error.strerror}; set KV_HARNESS_CACHE"
        ) from error


def _run(command: list[str]) -> str:
    """Run a compiler and return its output. The processes that it starts end with it, also where a
    signal stops this one."""
    try:
        compiling = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = compiling.communicate(timeout=1800)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(compiling.pid, signal.SIGKILL)
            compiling.communicate()
            raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImportError(f"{command[0]} failed: {error}") from error
    if compiling.returncode:
        lines = errors.splitlines() or ["no message"]
        raise ImportError(
            f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}"
        )
    return out
