"""Loads the filler text of needle tasks: Paul Graham's essays from the data root, or text that
every Python carries."""

from __future__ import annotations

import hashlib
import re
from importlib import import_module
from typing import NamedTuple

from evals.base import NO_DATA_ROOT, TaskEnv, TaskError
from evals.data import value_of

# File names below the data root; the first that exists is taken.
ESSAY_FILES = {
    "essays": ("PaulGrahamEssays.json", "paul_graham_essays_ruler_full.json"),
    "essays49": ("paul_graham_essays_repo49.json",),
}
ESSAYS = {"text": "text that is not blank"}  # all text in one field
NAMES = ("auto", *ESSAY_FILES, "pydoc")
SPLITTER = r"(?<=[.!?])\s+"  # stands in for NLTK's punkt, whose data no package index has


class Haystack(NamedTuple):
    """Hold one long text in which needles can be hidden, and the SHA-256 of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def load(name: str, env: TaskEnv) -> Haystack:
    """Load the filler text called `name`, one of NAMES, in which needles are hidden. `auto` takes
    the first of essays, essays49 and pydoc that is there. Raises `TaskError` where files are
    missing."""
    if name not in NAMES:
        raise TaskError(f"haystack={name!r} is unknown: choose one of {', '.join(NAMES)}")
    for wanted, files in ESSAY_FILES.items():
        if name not in ("auto", wanted):
            continue
        folders = (env.data_root / "essays", env.data_root) if env.data_root else ()
        places = (folder / file for file in files for folder in folders)
        path = next((path for path in places if path.is_file()), None)
        if path is not None:
            return _haystack(wanted, value_of(path.read_bytes(), ESSAYS, str(path))["text"])
        if name == wanted:
            where = " or ".join(map(str, folders)) or f"the data root {NO_DATA_ROOT}"
            raise TaskError(f"haystack={name} needs {' or '.join(files)} in {where}; or use pydoc")
    return _haystack("pydoc", _pydoc_text())


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences at the regular expression `SPLITTER`.

    >>> split_sentences("One. Two!  Three? four")
    ['One.', 'Two!', 'Three?', 'four']
    """
    return re.split(SPLITTER, text)


def _haystack(name: str, text: str) -> Haystack:
    return Haystack(name, text, hashlib.sha256(text.encode()).hexdigest())


def _pydoc_text() -> str:
    """Return Python's own help topics, 65,501 words in 3.11. They differ between versions of
    Python, hence the hash."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))
