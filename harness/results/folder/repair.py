"""Makes a damaged folder whole for the same command: what can be made anew is, and records that are sound stay.

What is taken out of a file lies beside it, in a file whose name ends in .damaged. Every repair is said. Only run.json
holds what nobody can make anew: machine, versions and times of earlier sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.results import files
from harness.results.files import RunLine, plain
from harness.results.folder import bound
from harness.results.folder.bound import FILES, SETTINGS, Digest, Info
from harness.results.folder.names import DAMAGED, EXAMPLES, INFO, RESCORED
from harness.results.provenance import now
from harness.results.records import RecordError, StoreError
from harness.terminal.notices import say_once


def repaired(folder: Path, run: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """run.json, after which all files of the folder are as it says; empty where there is neither that nor a record.

    The caller holds the folder's lock. `run`: the identity that the folder is for; `config`: what it resolves to.
    """
    files.drop_half_line(folder / EXAMPLES)
    info, is_new = _info(folder, run, config)
    if not info:
        return {}
    _, others = _sound_lines(folder, EXAMPLES, info)
    repairs = [is_new, others, _first_scores(folder, info, others)]
    if others and info.get("status") == "complete":
        info["status"] = "interrupted"
    if any(repairs):
        info = bound.bind(folder, info, EXAMPLES, RESCORED)
        if "rescored" in info:
            info["rescored"] = {**info["rescored"], "records": bound.records_digest(info)}
        bound.write_info(folder, info)
    return info


def _info(folder: Path, run: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """run.json, and whether it is new: where it is gone or damaged, it is what can be said of the records there."""
    try:
        info = bound.read_info(folder)
        if (owner := info.get("identity_sha256", run)) == run:
            return info, False
        why = f"{folder / INFO} is another run's"
    except StoreError as error:
        owner, why = "", _told(error)
    if owner[:8] == run[:8]:
        raise StoreError(f"{folder} holds another run whose hash starts the same: move that folder away")
    _set_aside(folder / INFO)
    records = len(files.whole_lines(folder / EXAMPLES))
    if not records:
        return {}, False
    say_once(f"{why}: it is made anew, and of machine, versions and times of the sessions before nothing is known")
    return {
        "identity_sha256": run,
        "status": "interrupted",
        "began_with": records,
        "rebuilt": {"at": now(), "records": records},
        SETTINGS: plain(config),
        FILES: {},
    }, True


def _sound_lines(folder: Path, name: str, info: Info) -> tuple[list[RunLine], bool]:
    """The lines of a file that are as they were written, and whether that is not all of them."""
    path, noted = folder / name, info[FILES].get(name)
    sound, damaged, texts = list[RunLine](), list[tuple[bytes, str]](), list[bytes]()
    for text, line in bound.each_line(folder, name, info):
        if isinstance(line, RecordError):
            damaged.append((text, str(line)))
        else:
            sound.append(line)
            texts.append(text)
    again = "what is missing runs again"
    if damaged:
        with open(path.with_name(name + DAMAGED), "ab") as aside:
            aside.writelines(text + b"\n" for text, _ in damaged)
        files.write_atomically(path, b"".join(text + b"\n" for text in texts).decode())
        more = f", and {len(damaged) - 1} more lines are damaged" if len(damaged) > 1 else ""
        say_once(f"{damaged[0][1]}{more}; set aside in {name}{DAMAGED}, and {again}")
    if noted and (count := len(sound) + len(damaged)) < noted["lines"]:
        say_once(f"{path} holds {count} of the {noted['lines']} lines that it had; {again}")
    return sound, bool(damaged) or (noted is not None and Digest(sound[: noted["lines"]]).plain() != noted)


def _first_scores(folder: Path, info: dict[str, Any], other_records: bool) -> bool:
    """Drops later scores that are damaged, or of records that are no longer all there; whether it did."""
    path = folder / RESCORED
    if "rescored" not in info and not path.exists():
        return False
    try:
        bound.read_rescored(folder, info)
        if "rescored" in info and not other_records:
            return False
        why = f"{path} holds scores of other records than {EXAMPLES} does"
    except StoreError as error:
        why = _told(error)
    _set_aside(path)
    info.pop("rescored", None)
    say_once(f"{why}: the scores are the first ones again, until python -m harness.rescore {folder}")
    return True


def _set_aside(path: Path) -> None:
    if path.exists():
        path.replace(path.with_name(path.name + DAMAGED))


def _told(error: StoreError) -> str:
    """Without the advice: what it advises is what happens."""
    return str(error).partition("; ")[0]
