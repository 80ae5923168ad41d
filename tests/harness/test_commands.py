"""`python -m harness report` is `python -m harness.report`, for every command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config.catalogue import REMOVED_COMMANDS, REMOVED_KEYS, commands, removed_command
from harness.config.compose import composed
from harness.config.settings import SettingsError
from tests import forks
from tests.forks import Forked


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_command_may_stand_behind_the_harness(name: str) -> None:
    behind, dotted = Forked(forks.module, "harness", name, "--help"), Forked(forks.module, f"harness.{name}", "--help")
    assert behind.wait() == dotted.wait() == 0, behind.err
    assert behind.out == dotted.out != ""


def test_a_command_among_settings_is_told_where_it_belongs() -> None:
    with pytest.raises(SettingsError, match="report is a"):
        composed(["method=full", "report"])


def test_what_has_gone_says_what_replaces_it() -> None:
    for word, instead in (*REMOVED_COMMANDS.items(), *((f"{key}=on", text) for key, text in REMOVED_KEYS.items())):
        if not word.startswith("bench "):
            with pytest.raises(SettingsError, match=re.escape(instead)):
                composed([word])
    dotted = subprocess.run([sys.executable, "-m", "harness.lint"], capture_output=True, text=True)
    assert (dotted.returncode, dotted.stderr) == (1, f"error: {removed_command('lint')}\n")
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [name for name in (*REMOVED_COMMANDS, *REMOVED_KEYS) if f"`{name}" not in changelog] == []
