"""What each run looks up anew, and tests in one process but once."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
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
