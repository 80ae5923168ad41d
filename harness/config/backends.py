"""Reads another order of backends than kernels/ops.py has: `backends=FILE`, a yaml file such as

segment_attention: [flash, triton]
top_k: [torch]

The backends that it names for an operation are tried first; the others follow in their usual order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from harness.config.plugins import suggestion
from harness.config.values import SettingsError
from kernels import ops

_LINE = re.compile(r"\w+=\w+(,\w+)*(;\w+=\w+(,\w+)*)*")


def in_one_line(given: str | None) -> str | None:
    """Return what a file says as the run records it, so that the run depends on no path:
    "segment_attention=flash,triton;top_k=torch"; None where it changes no order. Takes such a line too."""
    if given is None:
        return None
    asked = orders(given) if _LINE.fullmatch(given) else _read(Path(given).expanduser())
    known = {op.name: list(op.targets) for op in ops.ALL}
    for name, backends in asked.items():
        if name not in known:
            raise SettingsError(f"backends: there is no operation {name!r}{suggestion(name, known)}")
        for backend in backends:
            if backend not in known[name]:
                there = ", ".join(known[name])
                raise SettingsError(f"backends: {name} has no backend {backend!r}: choose from {there}.")
    changed = {name: backends for name, backends in asked.items() if known[name][: len(backends)] != backends}
    return ";".join(f"{name}={','.join(backends)}" for name, backends in sorted(changed.items())) or None


def orders(line: str | None) -> Mapping[str, list[str]]:
    """Return the backends that such a line names by operation, as `ops.prefer` takes them."""
    parts = [part.partition("=") for part in line.split(";")] if line else []
    return {name: backends.split(",") for name, _, backends in parts}


def _read(file: Path) -> Mapping[str, list[str]]:
    try:
        asked = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise SettingsError(f"backends={file} cannot be read ({reason}): name a yaml file.") from error
    if not isinstance(asked, dict) or not all(_named(backends) for backends in asked.values()):
        raise SettingsError(f"backends={file} should name operations, each with a list: `top_k: [torch]`.")
    return {str(name): list(backends) for name, backends in asked.items()}


def _named(backends: object) -> bool:
    """Say whether this is a list of different names."""
    if not isinstance(backends, Sequence) or isinstance(backends, str) or not backends:
        return False
    return all(isinstance(name, str) for name in backends) and len({*backends}) == len(backends)
