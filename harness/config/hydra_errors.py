"""What Hydra says of an override, as a sentence for the user."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException

from harness.config.errors import sentence
from harness.config.plugins import spell, suggestion
from harness.config.settings import NESTED, Settings


def explain(error: HydraException) -> str:
    """Hydra's complaint about one override, with the type that was wanted."""
    if isinstance(error, MissingConfigException):
        return f"Cannot find {error.missing_cfg_file}{suggestion(str(error.missing_cfg_file), error.options or [])}"
    merging = re.search(r"Error merging override (\S+)", str(error))
    if isinstance(error, ConfigCompositionException) and merging:
        shown = merging[1].lstrip("+")
        key, _, value = shown.partition("=")
        return (
            f"{shown} has the wrong type{_share(key, value) or _wanted(key)}{_listed(key, value)}."
            if value
            else f"{key} is empty{_wanted(key)}."
        )
    if unknown := re.match(r"Could not override '([^']+)'", str(error)):
        return f"There is no setting {unknown[1]}{_near(unknown[1], error)}"
    return sentence(error)


def _near(key: str, error: BaseException) -> str:
    """What there is beside `key`, as OmegaConf knows it."""
    beside = getattr(error.__cause__, "parent_node", None) or ()
    return suggestion(key.rpartition(".")[2], [name for name in map(str, beside) if not name.startswith("_")])


def _listed(key: str, value: str) -> str:
    """How to write a single value where a list is wanted."""
    return f", as in {key}=[{value}]" if get_origin(_hint(key)) is list and not value.startswith("[") else ""


def _share(key: str, value: str) -> str:
    """For a percentage where a share may stand: with its point, for a whole 1 is one token."""
    percent, hint = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value), _hint(key)
    if not percent or float not in (hint, *get_args(hint)):
        return ""
    share = float(f"{float(percent[1]) / 100:g}")
    return f": write {share} for {percent[1]} %" if share <= 1 else ": a share is at most 1.0"


def _wanted(key: str) -> str:
    """ ": it should be a whole number" for a setting whose type is known."""
    if key in NESTED:
        return f": it holds settings, to be named one by one, as {key}.{fields(NESTED[key])[0].name}=VALUE"
    hint = _hint(key)
    return f": it should be {spell(hint)}" if hint else ""


def _hint(key: str) -> Any:
    """The type of a setting; None where it is not known."""
    *parents, name = key.split(".")
    owner = NESTED.get(parents[0]) if parents else Settings
    return get_type_hints(owner).get(name) if owner else None
