"""A fault that is made, and what came of it."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.faults import harm, judge
from tests.faults.draw import Fault
from tests.faults.targets import ENDED, KILLED, Said, Strike, Subject, prepare, ran

DISK = "32m"  # of the file system that is filled


class Sound(NamedTuple):
    """A command that nothing happened to: the folder it began in, and how that was in the end; its steps."""

    start: Path
    end: Path
    steps: list[str]


class Outcome(NamedTuple):
    """`wrong`: what is not as it should be. `told`: all that the commands printed."""

    wrong: list[str]
    harmed: str
    told: str


class Bench:
    """Makes faults in folders of its own below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sound = cache(self._sound)

    def outcome(self, fault: Fault) -> Outcome:
        """Where the steps of a command did not come as far as was drawn, something happens half as far."""
        sound = self.sound(fault.subject)
        draw = random.Random(fault.seed)
        at = draw.randrange(sum(bool(re.search(fault.target.pattern, step)) for step in sound.steps)) + 1
        while True:
            with TemporaryDirectory(dir=self.folder) as name:
                work, told = Path(name, "work"), Path(name, "told")
                with small_disk(work) if fault.kind == harm.FULL else nullcontext():
                    if done := self._tried(fault, sound, draw, at, work, told):
                        return done
            at = (at + 1) // 2

    def _tried(
        self, fault: Fault, sound: Sound, draw: random.Random, at: int, work: Path, told: Path
    ) -> Outcome | None:
        """None where nothing happened."""
        target, words = fault.target, fault.subject.words
        copied(sound.end if fault.moment == ENDED else sound.start, work)
        said = list[Said]()
        if fault.moment != ENDED:
            kind = "kill" if fault.moment == KILLED else fault.kind
            said.append(ran(words, work, Strike(kind, target.pattern, at, fault.seed, told)))
            if not told.exists():
                return None
        harmed = told.read_text() if told.exists() else ""
        if fault.moment in (ENDED, KILLED):
            harmed = " ".join(map(str, harm.to_files(fault.kind, target.pattern, draw, work)))
        (work / harm.BALLAST).unlink(missing_ok=True)
        wrong = [*judge.of_end(kind, said[0].code)] if said else []
        wrong += judge.of_reading(sound.end, work)
        if target.anew:
            shutil.rmtree(work / "runs", ignore_errors=True)
        said.append(again := ran(words, work))
        wrong += [*judge.of_output(*said), *judge.of_ending(sound.end, work, again)]
        wrong += [*judge.of_reading(sound.end, work), *judge.of_files(sound.end, work, fault.kind in harm.TO_FILES)]
        return Outcome(list(dict.fromkeys(wrong)), harmed, "\n".join(f"-> {code}\n{text}" for code, text in said))

    def _sound(self, subject: Subject) -> Sound:
        folder = Path(self.folder, f"sound {subject.name}")
        start, end = folder / "start", folder / "end"
        if subject.behind:
            copied(self.sound(subject.behind).end, start)
        else:
            prepare(start)
        copied(start, end)
        said = ran(subject.words, end, Strike("", "", 0, "", folder / "steps"))
        assert said.code == 0, said.text
        return Sound(start, end, json.loads((folder / "steps").read_text()))


def copied(source: Path, to: Path) -> None:
    shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own at `folder`."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def can_mount(folder: Path) -> bool:
    try:
        with small_disk(folder / "disk"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
