"""Runs code of a method's authors from a clone of their repository, on the CPU. None of it is stored in this tree.

`CLONES` is a folder of clones, each under the repository's own name, as `git clone` makes them.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

VARIABLE = "KV_HARNESS_CLONES"


@dataclass(frozen=True)
class Repository:
    """Names a repository on GitHub and the commit that the comparisons were written for."""

    name: str
    commit: str

    def clone(self) -> Path:
        """Return the folder of the user's clone. The test is skipped where there is none; another commit is a
        warning."""
        folder = os.environ.get(VARIABLE)
        if not folder:
            pytest.skip(f"no clones of released code: run `make test-official CLONES=folder`, or set {VARIABLE}")
        clone = Path(folder).expanduser().resolve() / self.name.partition("/")[2]
        if not clone.is_dir():
            pytest.skip(f"{clone} is missing: git clone https://github.com/{self.name} there")
        asked = ["git", "-C", str(clone), "rev-parse", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if commit != self.commit:
            there = commit or "no commit"
            warnings.warn(f"{clone} is at {there}; what differs was measured at {self.commit}", stacklevel=2)
        return clone


@contextmanager
def released(root: Path, module: str, stubs: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[Any]:
    """Give the module of that dotted name below `root`. `stubs` are modules that it imports, here or when it runs: the
    names that they hold. Packages on the way to it run no `__init__`. Behind it, no module is left."""
    with patch.dict(sys.modules):
        names = module.split(".")
        for depth in range(1, len(names)):
            package = _module(".".join(names[:depth]))
            package.__path__ = [str(root.joinpath(*names[:depth]))]
        for name, held in (stubs or {}).items():
            _module(name).__dict__.update({"__path__": [], **held})
        sys.modules.pop(module, None)
        with patch.object(sys, "path", [str(root), *sys.path]):
            yield importlib.import_module(module)


def _module(name: str) -> ModuleType:
    sys.modules[name] = ModuleType(name)
    return sys.modules[name]


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what code asks for on a CUDA device, and calls every tensor one of that device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.is_cuda.__get__:
            return True
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def without_cuda() -> Iterator[None]:
    """Run code written for a CUDA device: `OnCpu`, with streams and events that do nothing."""
    with ExitStack() as stack:
        for name in ("Stream", "Event", "current_stream", "synchronize"):
            stack.enter_context(patch.object(torch.cuda, name, MagicMock()))
        stack.enter_context(patch.object(torch.cuda, "stream", lambda stream: nullcontext()))
        stack.enter_context(OnCpu())
        yield


class TopK(TorchFunctionMode):
    """Notes the indices of every top-k that runs meanwhile, in `chosen`."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self.chosen.append(out.indices)
        return out


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *_: Any, causal: bool = False, **__: Any) -> Tensor:
    """What flash-attn computes. q [B T H D], k, v [B S G D] -> [B T H D]"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1 + logits.shape[-1] - logits.shape[-2])
        logits = logits.masked_fill(later, float("-inf"))
    return (logits.softmax(-1) @ v).transpose(1, 2)


FLASH_ATTN = {
    "flash_attn": {"flash_attn_func": flash_attn_func},
    "flash_attn.flash_attn_interface": {"flash_attn_func": flash_attn_func},
}
