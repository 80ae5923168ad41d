"""Composes a configuration with Hydra for other commands and notebooks, and turns what Hydra says into a sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import OmegaConf

from harness.config import plugins
from harness.config.catalogue import CONF, GROUPS
from harness.config.errors import sentence
from harness.config.overrides import Partial, checked
from harness.config.plugins import suggestion, wrong_type
from harness.config.settings import NESTED, RunConfig, Settings, SettingsError, settings_of


@cache
def tell_hydra_the_schema() -> None:
    """Register the schema, once a process: Hydra checks every configuration against it."""
    ConfigStore.instance().store("schema", RunConfig)


def composed(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """Return what `python -m harness OVERRIDES` would run, as plain values; raise `SettingsError` on a wrong
    override."""
    tell_hydra_the_schema()
    read = checked(overrides, config_dirs)
    try:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            config = compose("config", overrides=with_folders(read.words, config_dirs))
    except HydraException as error:
        raise SettingsError(explain(error)) from error
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    refuse_unknown(plain)
    for kind, lacking in read.partial.items():  # left by the plug-in that an experiment chose first
        plain[kind] = {name: value for name, value in plain[kind].items() if name not in lacking}
    return plain


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a key that no setting has, as a user's own yaml file may bring one."""
    for name in config.keys() - {known.name for known in fields(RunConfig)}:
        raise SettingsError(f"There is no setting {name}: take it out of your yaml file.")


def with_folders(words: Sequence[str], config_dirs: Sequence[Path]) -> list[str]:
    """Return `words` for Hydra, which looks for yaml files in these folders too."""
    path = ",".join(f"file://{folder.resolve()}" for folder in config_dirs)
    return [f"hydra.searchpath=[{path}]", *words] if path else list(words)


def built(config: Mapping[str, Any], partial: Partial | None = None) -> tuple[Any, Any, Any, Settings]:
    """Build method, task, model and settings of a composed configuration."""
    method, task, model = (plugins.build(config[kind], kind, (partial or {}).get(kind, ())) for kind in GROUPS)
    return method, task, model, settings_of(config)


def explain(error: HydraException) -> str:
    """Return what Hydra says of an override as a sentence: the nearest name that there is, or the type that is
    wanted."""
    if isinstance(error, MissingConfigException):
        return f"Cannot find {error.missing_cfg_file}{suggestion(str(error.missing_cfg_file), error.options or [])}"
    merging = re.search(r"Error merging override (\S+)", str(error))
    if isinstance(error, ConfigCompositionException) and merging:
        key, _, value = merging[1].lstrip("+").partition("=")
        section, _, name = key.rpartition(".")
        hints = get_type_hints(NESTED.get(section, Settings))
        if not value and key not in NESTED:
            return f"{key} is empty: give it a value, or leave it out."
        return (
            wrong_type(key, yaml.safe_load(value) if value else "", hints[name]) if name in hints else sentence(error)
        )
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        beside = map(str, getattr(error.__cause__, "parent_node", None) or ())
        near = suggestion(unknown[1].rpartition(".")[2], [name for name in beside if not name.startswith("_")])
        return f"There is no setting {unknown[1]}{near}"
    return sentence(error)
