"""The origin of a run's numbers, as run.json records it: the code, the versions of packages, the
machine."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness.results.identity import parsed

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("harness", "methods", "kernels", "evals")
SOURCES = (".py", ".cpp", ".hpp", ".yaml", ".json")  # .json: prompt templates
PROSE = re.compile(r"(?:^ *|  )// .*", re.MULTILINE)  # of C++
DISTRIBUTIONS = (
    "torch",
    "transformers",
    "triton",
    "pyarrow",
    "numpy",
    "scipy",
    "gguf",
    "hydra-core",
    "kv-harness",
)


def now() -> str:
    """Return the current time as ISO 8601 text, UTC, in whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def source_hash(root: Path = ROOT) -> str:
    """Return a SHA-256 hash over names and contents of all source files of our four packages."""
    digest = hashlib.sha256()
    inside = [
        file
        for package in PACKAGES
        for file in (root / package).rglob("*")
        if file.suffix in SOURCES
    ]
    named = [(file.relative_to(root).as_posix(), file) for file in inside if file.is_file()]
    for name, file in sorted(named):
        content = file.read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def code_hash(module: str, root: Path = ROOT) -> str | None:
    """Return a hash over the code of a module and of all that it imports below `root`, with the C++
    that it builds, without comments, docstrings and layout; None if there is no such module."""
    pending, code = [module], dict[Path, str]()
    for name in pending:  # grows
        file = source_file(name, root)
        if file is None or file in code:
            continue
        code[file], imported = parsed(file.read_bytes(), name, file.name == "__init__.py")
        pending += [name.rpartition(".")[0], *imported]
        if file.with_suffix(".cpp").is_file():
            shared = [*file.parent.glob("*.hpp"), *file.parent.glob("team.cpp")]
            code |= {one: _compiled(one) for one in (file.with_suffix(".cpp"), *shared)}
    text = "\n".join(code[file] for file in sorted(code))
    return hashlib.sha256(text.encode()).hexdigest()[:12] if code else None


def source_file(module: str, root: Path) -> Path | None:
    """Return the file of a module below `root`; None if there is none."""
    place = root.joinpath(*module.split("."))
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def _compiled(file: Path) -> str:
    """Return what a file of C++ says to a compiler."""
    return " ".join(PROSE.sub("", file.read_text(encoding="utf-8")).split())


def git() -> dict[str, Any]:
    """Return commit and dirty flag of this project's checkout; None where git does not know it."""
    unknown = {"commit": None, "dirty": None}
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return unknown
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", str(ROOT))
    return {"commit": commit, "dirty": bool(changes)} if commit and changes is not None else unknown


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def versions(distributions: Sequence[str] = DISTRIBUTIONS) -> dict[str, str | None]:
    """Return the installed version of each package, None if it is missing. Nothing is imported."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in distributions:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return the facts of this machine, with its present load average. The number of threads is
    None unless torch has been imported."""
    cpuinfo, loaded = "", sys.modules.get("torch")
    with suppress(OSError):  # a system without /proc
        cpuinfo = Path("/proc/cpuinfo").read_text()  # a paragraph per logical CPU
    model = re.search(r"^model name\s*: (.+)", cpuinfo, re.MULTILINE)
    cpu = model[1].strip() if model else platform.processor() or platform.machine()
    cores = re.findall(
        r"^physical id\s*: (\d+)$(?:\n.+)*?\ncore id\s*: (\d+)$", cpuinfo, re.MULTILINE
    )
    device_name, device_id = cpu, None
    # which GPU of the machine it is, whatever number it has for this process
    if device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(device)
        device_name, device_id = str(torch.cuda.get_device_name(device)), str(properties.uuid)
    return {
        "platform": platform.platform(),
        "cpu": cpu,
        "cores": len(set(cores)) or None,
        "cpus_usable": len(os.sched_getaffinity(0)),
        "threads": loaded.get_num_threads() if loaded else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": load_average(),
        "device": device,
        "device_name": device_name,
        "device_id": device_id,
    }


def load_average() -> list[float]:
    """Return the mean number of running or waiting processes over the last 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Return everything that this module knows, as run.json stores it."""
    return {
        "time": now(),
        "sources": source_hash(),
        "git": git(),
        "versions": versions(),
        "machine": machine(device),
        "process": {"host": socket.gethostname(), "pid": os.getpid()},
    }
