"""Escapes control characters in text of a model, a data set or a run's folder, because a terminal
obeys them."""

from __future__ import annotations

from unicodedata import category

KEPT = "\n\t\u200c\u200d"  # line ends, tabs, and the joiners used by scripts and emoji


def visible(text: str) -> str:
    r"""Return `text` with control characters, and those that change the direction of writing, as
    escapes: ESC becomes the four characters \x1b."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    harmless = char.isprintable() or char in KEPT or category(char) == "Zs"
    return char if harmless else char.encode("unicode_escape").decode()
