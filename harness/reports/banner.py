"""The alarms of a table, above it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from typing import TextIO

from harness.reports.compare import Comparison
from harness.results.alarms.alarm import Alarm
from harness.terminal.visible import visible

RED, YELLOW, PLAIN = "\033[1;31m", "\033[33m", "\033[0m"


def shows_colour(stream: TextIO) -> bool:
    """Only a terminal, and only where https://no-color.org is not asked for."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def banner(table: Comparison, width: int, colour: bool) -> Iterator[str]:
    """For a terminal: a paragraph per alarm."""
    for alarm in table.alarms:
        said = visible(f"{word(alarm)}: {alarm.text}")
        text = textwrap.fill(said, width, initial_indent="  ", subsequent_indent="    ")
        yield f"{RED if alarm.red else YELLOW}{text}{PLAIN}" if colour else text


def markdown_banner(table: Comparison) -> Iterator[str]:
    """A quote per alarm; red ones stand out without colour too."""
    for alarm in table.alarms:
        yield f"> {'🟥' if alarm.red else '🟨'} **{word(alarm)}:** {alarm.text}\n"


def word(alarm: Alarm) -> str:
    return "ALARM" if alarm.red else "caution"
