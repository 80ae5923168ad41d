"""Words of a command line one by one: flags, and what is `key=value`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from harness.config.catalogue import REMOVED_COMMANDS, commands
from harness.config.settings import SettingsError
from harness.terminal.arguments import typed

SWEEP = ("-m", "--multirun")
VALUED = (  # Hydra's flags that take the next word
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
)  # fmt: skip
HOW = "write key=value, a list as key=[1,2], text with spaces or commas as key='\"a, b\"'"
FLAGS = (*SWEEP, *VALUED, "--info", "-i", "--resolve", "--run", "-r", "--hydra-help", "--experimental-rerun")


def asks_hydra(arguments: Sequence[str]) -> bool:
    """Say whether the command line is about Hydra itself, so that its words are no settings."""
    return any(flag in arguments for flag in ("-sc", "--shell-completion"))


def refuse_flags(arguments: Sequence[str], places: Sequence[int]) -> None:
    """Raise `SettingsError` for a flag that Hydra does not know. `places`: where flags stand."""
    for place in places:
        flag, equals, value = arguments[place].partition("=")
        if flag not in FLAGS:
            value = value if equals else [*arguments, "VALUE"][place + 1]
            raise SettingsError(f"{flag} is no flag: write settings without dashes, as in {flag.lstrip('-')}={value}.")


def parse(overrides: Sequence[str]) -> Iterator[Override]:
    """Parse the words one by one; raise `SettingsError` on a word that is no `key=value`."""
    for word in map(_from_home, overrides):
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise SettingsError(_unread(word)) from error
        if not override.key_or_group:
            raise SettingsError(_unread(word))
        yield override


def _from_home(word: str) -> str:
    """Spell out the home of a path, because Hydra knows no ~ in a value."""
    key, _, value = word.partition("=")
    return f"{key}={typed(value, f'{key}=')}" if value.startswith("~") else word


def _unread(word: str) -> str:
    if word in commands():
        return f"{word} is a command and no setting: put it first, as in `python -m harness {word}`."
    if word in REMOVED_COMMANDS:
        return f"There is no command {word} any more: {REMOVED_COMMANDS[word]}. See CHANGELOG.md."
    if near := get_close_matches(word, commands(), n=1):
        return f"There is no command {word!r}; did you mean {near[0]}?"
    return f"Cannot read {word!r}: {HOW}."
