"""`python -m harness report` is `python -m harness.report`, for every command."""

from __future__ import annotations

import pytest

from harness.config.catalogue import commands
from harness.config.compose import composed
from harness.config.settings import SettingsError
from tests import forks
from tests.forks import Forked
from tests.quick import every


@pytest.mark.parametrize("name", every(5, sorted(commands())))
def test_a_command_may_stand_behind_the_harness(name: str) -> None:
    behind, dotted = Forked(forks.module, "harness", name, "--help"), Forked(forks.module, f"harness.{name}", "--help")
    assert behind.wait() == dotted.wait() == 0, behind.err
    assert behind.out == dotted.out != ""


def test_a_command_among_settings_is_told_where_it_belongs() -> None:
    with pytest.raises(SettingsError, match="report is a"):
        composed(["method=full", "report"])
