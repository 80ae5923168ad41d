"""Finds what Triton needs beside a GPU: a C compiler and Python's headers, with which it builds the
launcher of a kernel."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path


@cache
def unfit() -> str | None:
    """Return why Triton cannot build the launcher of a kernel on this machine, or None."""
    if compiler() is None:
        return "there is no C compiler: install gcc or clang, or name one in CC"
    if not headers().is_file():
        return f"Python's headers are missing ({headers()}): install python3-dev, or the like"
    return None


def compiler() -> str | None:
    """Return the path of the C compiler that Triton takes: CC if it is set, else gcc, else clang;
    None if there is none."""
    return shutil.which(os.environ.get("CC") or "gcc") or (None if os.environ.get("CC") else shutil.which("clang"))


def headers() -> Path:
    """Return the path where Python.h should be, as Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]) / "Python.h"
