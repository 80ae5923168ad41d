"""The command line of a search: `method.kernel=3,7,15` names values to try, every other word is as for one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from harness.config.catalogue import GROUPS, Entry
from harness.config.overrides import checked, parse
from harness.config.settings import SettingsError

SETS_ITSELF = {  # setting -> why a search has no choice
    "seed": "it chooses on examples that no table is about",
    "shared_prefill": "one prefill serves all values of a parameter",
}


@dataclass(frozen=True)
class Asked:
    """`words` for one run; `values` to try, by parameter; `chosen`: the yaml of method, task and model."""

    words: list[str]
    values: Mapping[str, tuple[Any, ...]]
    chosen: Mapping[str, Entry]


def read(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> Asked:
    """Raises `SettingsError` on a word that sets nothing, or names several values of anything but a parameter."""
    words, values = [], dict[str, tuple[Any, ...]]()
    for override in parse(overrides):
        word, key = str(override.input_line), override.key_or_group
        if key in SETS_ITSELF:
            raise SettingsError(f"harness.tune sets {key} itself, since {SETS_ITSELF[key]}: leave {word} out.")
        group, _, parameter = key.partition(".")
        if group == "method" and parameter:
            _refuse_nothing(override)
        if not override.is_sweep_override():
            words.append(word)
        elif group == "method" and parameter:
            values[parameter] = _values(override)
        else:
            raise SettingsError(f"{word} names several values: a search has one {key}; parameters alone have a grid.")
    chosen = checked([*words, *(f"method.{name}=null" for name in values)], config_dirs).chosen
    return Asked(words, values, {group: chosen[group][0] for group in GROUPS})


def _refuse_nothing(override: Override) -> None:
    if not override.is_sweep_override() and override.value() == "":
        key = override.key_or_group
        raise SettingsError(f"{key} is empty: name the values to try, as in {key}=A,B.")


def _values(override: Override) -> tuple[Any, ...]:
    if not override.is_discrete_sweep():
        key = override.key_or_group
        raise SettingsError(f"{override.input_line} has no steps: name the values, as in {key}=A,B.")
    return tuple(dict.fromkeys(map(_frozen, override.sweep_iterator())))


def _frozen(value: Any) -> Any:
    """As a method's fields hold it."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return value.text if isinstance(value, QuotedString) else value
