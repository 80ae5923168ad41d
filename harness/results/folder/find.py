"""Where the folders of runs are, whole ones and damaged ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.config.settings import Results
from harness.results.folder.bound import read_info
from harness.results.folder.names import CONFIG, EXAMPLES, INFO, SUMMARY
from harness.results.lock import is_locked
from harness.results.records import StoreError

NAME = re.compile(r".+-.+-[0-9a-f]{8}")  # task, method and the start of the identity's hash
OTHERS = {CONFIG, EXAMPLES, SUMMARY}  # by which a folder of such a name is known where run.json is gone


def find(paths: Iterable[Path]) -> list[Path]:
    """All run folders at or below `paths`, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise StoreError(f"no such folder: {path}{instead(path)}")
        below = list(runs_below(path))
        if not below:
            raise StoreError(f"no runs in {path}: give the folder that results.root named; that of a run holds {INFO}")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def runs_below(path: Path) -> Iterator[Path]:
    """The folders of runs at or below `path`, by name; those that have lost their run.json too."""
    yield from sorted(Path(folder) for folder, _, names in os.walk(path) if is_run(Path(folder), names))


def is_run(folder: Path, files: Iterable[str]) -> bool:
    """Whether a folder that holds these `files` is a run's."""
    names = {*files}
    if INFO in names:
        return True
    known = bool(OTHERS & names) and NAME.fullmatch(folder.resolve().name) is not None
    return known and not is_locked(folder)  # else it is about to begin


def akin(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Other runs of the same task and method beside `folder`, with their run.json, as far as it can be read."""
    for path in sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*/{INFO}")):
        if path.parent != folder:
            with suppress(StoreError):
                yield path.parent, read_info(path.parent)


def instead(path: Path) -> str:
    """Where the run may be that was named without its folder."""
    root = Path(Results().root)
    if (usual := root / path).is_dir():
        return f"; did you mean {usual}?"
    if len(path.parts) == 1:
        return f"; name a run with its folder, as in {usual}"
    return f"; give the folder that results.root named, such as {root}, or a run's in it"
