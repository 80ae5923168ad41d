"""Command lines with several values of a key: a search's, where `method.kernel=3,7,15` names values to try and every
other word is as for one run, and those that run every combination."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override, QuotedString

from harness.config.catalogue import GROUPS, Entry
from harness.config.overrides import checked
from harness.config.settings import SettingsError
from harness.config.words import parse

SETS_ITSELF = {  # setting -> why a search has no choice
    "seed": "it chooses on examples that no table is about",
    "shared_prefill": "one prefill serves all values of a parameter",
}
NOT_READ = {  # setting -> why a search has no use for it
    "wandb": "a search is shown nowhere else",
}


@dataclass(frozen=True)
class Asked:
    """`words` for one run; `values` to try, by parameter; `chosen`: the yaml of method, task and model."""

    words: list[str]
    values: Mapping[str, tuple[Any, ...]]
    chosen: Mapping[str, Entry]


def read(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> Asked:
    """Read the words of a search; raise `SettingsError` on a word that sets nothing, or names several values of
    anything but a parameter."""
    words, values = [], dict[str, tuple[Any, ...]]()
    for override in parse(overrides):
        word, key = str(override.input_line), override.key_or_group
        if key in SETS_ITSELF:
            raise SettingsError(f"harness.tune sets {key} itself, since {SETS_ITSELF[key]}: leave {word} out.")
        group, _, parameter = key.partition(".")
        if group in NOT_READ:
            raise SettingsError(f"{word} changes nothing for harness.tune, since {NOT_READ[group]}: leave it out.")
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


class Word(NamedTuple):
    """A single value of a key."""

    text: str  # key=value, as a command line for one run says it
    value: Any


def combinations(words: Sequence[str], slowest: str) -> Iterator[dict[str, Word]]:
    """Yield every combination of the values, by key; those of `slowest` vary slowest. The last of two words for one key
    wins."""
    given = {override.key_or_group: override for override in parse(words)}
    keys = sorted(given, key=lambda key: key != slowest)
    for point in product(*(_words(given[key]) for key in keys)):
        yield dict(zip(keys, point, strict=True))


def _words(override: Override) -> list[Word]:
    if not override.is_sweep_override():
        return [Word(str(override.input_line), _frozen(override.value()))]
    key = str(override.input_line).partition("=")[0]
    texts = [f"{key}={text}" for text in override.sweep_string_iterator()]
    return [Word(*one) for one in zip(texts, _values(override), strict=True)]


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
    """Return a value as a method's fields hold it."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return value.text if isinstance(value, QuotedString) else value
