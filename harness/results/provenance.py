"""What a run must say of itself: the code that ran, the versions around it, the machine under it."""

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("harness", "methods", "kernels", "evals")
SOURCES = (".py", ".cpp", ".hpp", ".yaml", ".json")  # .json: prompt templates
DISTRIBUTIONS = ("torch", "transformers", "triton", "pyarrow", "numpy", "scipy", "gguf", "hydra-core", "kv-harness")


def now() -> str:
    """ISO 8601, UTC, whole seconds."""
    return when(datetime.now(UTC).timestamp())


def when(seconds: float) -> str:
    """The same of a file's time stamp."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def source_hash(root: Path = ROOT) -> str:
    """sha256 over names and contents of all sources of the four packages."""
    digest = hashlib.sha256()
    inside = [file for package in PACKAGES for file in (root / package).rglob("*") if file.suffix in SOURCES]
    named = [(file.relative_to(root).as_posix(), file) for file in inside if file.is_file()]
    for name, file in sorted(named):
        content = file.read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


def git() -> dict[str, Any]:
    """Commit and dirty flag of the checkout that holds this file; null without git, or where git does not know it."""
    unknown = {"commit": None, "dirty": None}
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return unknown
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", str(ROOT))
    return {"commit": commit, "dirty": bool(changes)} if commit and changes is not None else unknown


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def versions(distributions: Sequence[str] = DISTRIBUTIONS) -> dict[str, str | None]:
    """Installed versions, null where absent. Imports nothing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine at this moment; the load average tells whether it was idle."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": _physical_cores() or None,
        "cpus_usable": len(os.sched_getaffinity(0)),
        "threads": _torch_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": load_average(),
        "device": device,
        **_device(device),
    }


def load_average() -> list[float]:
    """Processes that ran or waited to, mean over 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()]


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Everything above, as it is stored in run.json."""
    return {
        "time": now(),
        "sources": source_hash(),
        "git": git(),
        "versions": versions(),
        "machine": machine(device),
        "process": {"host": socket.gethostname(), "pid": os.getpid()},
    }


def _cpuinfo() -> str:
    """A paragraph per logical CPU; empty where the system has no /proc."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""


def _cpu_model() -> str:
    named = re.search(r"^model name\s*: (.+)", _cpuinfo(), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _physical_cores() -> int:
    ids = re.findall(r"^physical id\s*: (\d+)$(?:\n.+)*?\ncore id\s*: (\d+)$", _cpuinfo(), re.MULTILINE)
    return len(set(ids))


def _torch_threads() -> int | None:
    """Threads of one operation; asked only of a torch that is already loaded."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else None


def _device(name: str) -> dict[str, str | None]:
    """The device's own name, and which GPU of the machine it is, whatever number it has for this process."""
    if not name.startswith("cuda"):
        return {"device_name": _cpu_model(), "device_id": None}
    import torch

    uuid = torch.cuda.get_device_properties(name).uuid
    return {"device_name": str(torch.cuda.get_device_name(name)), "device_id": str(uuid)}
