"""Every yaml lists every field with a comment, and defaults are the same in Python and in yaml."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.config.catalogue import GROUPS, entries
from harness.config.plugins import describe, required
from harness.config.settings import NESTED, Settings
from harness.results.files import canonical

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("group", GROUPS)
def test_every_yaml_lists_every_field_with_a_comment(group: str) -> None:
    explained: dict[tuple[str, str], list[str]] = {}
    for entry in entries(group).values():
        config = entry.values()
        if "_target_" not in config:
            continue
        module, _, name = config.pop("_target_").rpartition(".")
        known = [field for field in fields(getattr(import_module(module), name)) if field.init]
        assert set(config) == {field.name for field in known}, entry.file.name
        assert entry.headline, entry.file.name
        assert entry.card(), f"{module} has no docstring"
        for key, _, comment in entry.parameters():
            explained.setdefault((name, key), []).append(comment)
    bare = [key for key, comments in explained.items() if not any(comments)]
    assert not bare, f"no yaml says what these are: {bare}"


@pytest.mark.parametrize("group", GROUPS)
def test_defaults_in_python_are_the_yamls(group: str) -> None:
    """A class may have several yaml files (presets, a paper's variant): one of them holds its defaults."""
    differences: dict[str, list[dict[str, tuple[Any, Any]]]] = {}
    for entry in entries(group).values():
        from_yaml = entry.values()
        target = from_yaml.pop("_target_")
        module, _, name = target.rpartition(".")
        cls = getattr(import_module(module), name)
        given = {key: from_yaml[key] for key in required(cls)}
        from_python = json.loads(canonical(describe(cls(**given))))
        found = {key: (from_python[key], value) for key, value in from_yaml.items() if from_python[key] != value}
        differences.setdefault(target, []).append(found)
    for target, found in differences.items():
        assert {} in found, f"{target}: (Python, yaml) differ: {min(found, key=len)}"


def test_config_yaml_lists_every_setting() -> None:
    config = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())
    assert set(config) - {"defaults", "hydra"} == {field.name for field in fields(Settings)}
    for name, kind in NESTED.items():
        assert list(config[name]) == [field.name for field in fields(kind)]
        assert config[name] == vars(kind()), f"{name}: yaml and schema differ in a default"
    plain = {name: value for name, value in vars(Settings()).items() if name not in NESTED}
    assert {name: config[name] for name in plain} == plain
