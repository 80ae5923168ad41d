"""What may happen to a file, and to the process that writes it."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

from tests.faults.steps import Torn

FULL = "full disk"
BALLAST = "ballast"  # fills the disk
LEFT = 20_000  # bytes, at most, that a full disk still has room for
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def flip(file: Path, draw: random.Random) -> None:
    """One bit, or all bits of a few bytes."""
    held = bytearray(file.read_bytes())
    if held:
        at = draw.randrange(len(held))
        end, mask = draw.choice([(at + 1, 1 << draw.randrange(8)), (at + draw.randrange(2, 100), 255)])
        held[at:end] = bytes(byte ^ mask for byte in held[at:end])
    file.write_bytes(held)


def cut(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.choice((0, draw.randrange(file.stat().st_size + 1))))


def delete(file: Path, draw: random.Random) -> None:
    file.unlink()


def kill(draw: random.Random, torn: Torn) -> None:
    torn()
    os.kill(os.getpid(), signal.SIGKILL)


def send(draw: random.Random, torn: Torn) -> None:
    os.kill(os.getpid(), draw.choice(SIGNALS))


def fill(draw: random.Random, torn: Torn) -> None:
    """The file system of the working folder, which is small."""
    here = os.statvfs(".")
    size = here.f_bavail * here.f_frsize - draw.randrange(LEFT)
    with open(BALLAST, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


TO_FILES: dict[str, Callable[[Path, random.Random], None]] = {"flip": flip, "cut": cut, "delete": delete}
TO_PROCESSES: dict[str, Callable[[random.Random, Torn], None]] = {"kill": kill, "signal": send, FULL: fill}
KINDS = (*TO_FILES, *TO_PROCESSES)


def files(pattern: str, work: Path = Path()) -> list[Path]:
    """Those of the working folder in whose paths `pattern` is found; no temporary ones, and no locks."""
    below = sorted(path for path in work.rglob("*") if re.search(pattern, path.relative_to(work).as_posix()))
    return [path for path in below if path.is_file() and not path.name.startswith(".") and path.suffix != ".partial"]


def to_files(kind: str, pattern: str, draw: random.Random, work: Path = Path()) -> list[Path]:
    """One of them, or all. Those that were harmed."""
    found = files(pattern, work)
    harmed = draw.choice([found, [draw.choice(found)]]) if found else []
    for file in harmed:
        TO_FILES[kind](file, draw)
    return harmed
