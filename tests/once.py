"""What each run looks up anew, and tests in one process but once."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from harness.results import provenance


def look_up_once(patch: pytest.MonkeyPatch) -> None:
    """No test in this process changes the sources, the commit or what is installed. For each command line Hydra reads
    the files of conf/ with a parser written in Python, and copies the schemas that it only reads."""
    for look in (provenance.source_hash, provenance.git, provenance.versions):
        patch.setattr(provenance, look.__name__, cache(look))
    with suppress(ImportError):  # a bare GPU machine has no Hydra
        from hydra.core.config_store import ConfigStore

        patch.setattr(ConfigStore, "__deepcopy__", lambda store, memo: store, raising=False)
        _parse_once(patch)
    if os.environ.get("TRITON_INTERPRET"):
        with suppress(ImportError):
            _replace_once(patch)


def _parse_once(patch: pytest.MonkeyPatch) -> None:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf._utils import get_yaml_loader

    really = OmegaConf.load

    @cache
    def parsed(text: str) -> Any:
        return yaml.load(text, Loader=get_yaml_loader())

    def load(file: Any) -> Any:
        if not hasattr(file, "read"):
            return really(file)
        text = file.read()
        with suppress(yaml.YAMLError):
            return OmegaConf.create({} if parsed(text) is None else parsed(text))
        file.seek(0)
        return really(file)  # whose error names the file

    patch.setattr(OmegaConf, "load", load)


def _replace_once(patch: pytest.MonkeyPatch) -> None:
    """For each call of a function within a kernel, Triton's interpreter looks through the whole language for what it
    replaces there, and at each sum of whole numbers for an overflow that it reports only where it debugs."""
    import triton.language as tl
    from triton.runtime import interpreter

    class Launch(interpreter._LangPatchScope):
        running = False

        def restore(self) -> None:
            super().restore()
            Launch.running = False

    all_of_it = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    changes = [(owner, name, getattr(owner, name)) for owner, name, _ in all_of_it._changes]
    all_of_it.restore()

    def replaced(function: Any) -> Any:
        if Launch.running:  # the launch has replaced everything for the functions that its kernel calls
            return None
        launch, Launch.running = Launch(), True
        for change in changes:
            launch.set_attr(*change)
        return launch

    patch.setattr(interpreter, "_patch_lang", replaced)
    patch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False))
