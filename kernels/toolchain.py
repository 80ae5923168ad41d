"""Finds what Triton needs beside a GPU: a C compiler and Python's headers, with which it builds the
launcher of a kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

from kernels.temporary import TemporaryFolder

_SOURCE = "#include <Python.h>\nint probe(void) { return PY_VERSION_HEX != 0; }\n"


@cache
def unfit() -> str | None:
    """Return why Triton cannot build a launcher here, or None. It is tried once in a process, by
    building a file as Triton would."""
    path = compiler()
    if path is None:
        return "there is no C compiler: install gcc or clang, or name one in CC"
    if not headers().is_file():
        return f"Python's headers are missing ({headers()}): install python3-dev, or the like"
    with TemporaryFolder("kv-probe-") as folder:
        source = folder / "probe.c"
        source.write_text(_SOURCE)
        command = [path, str(source), "-shared", "-fPIC", f"-I{headers().parent}", "-o", f"{folder}/probe.so"]
        try:
            built = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            return f"the C compiler {path} does not start: {error.strerror}"
    if built.returncode:
        return f"the C compiler {path} fails: {(built.stderr.strip() or 'it says nothing').splitlines()[-1]}"
    return None


def compiler() -> str | None:
    """Return the C compiler that Triton takes: CC, else gcc, else clang; None if there is none."""
    return shutil.which(os.environ.get("CC") or "gcc") or (None if os.environ.get("CC") else shutil.which("clang"))


def headers() -> Path:
    """Return where Python.h should be, as Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]) / "Python.h"
