"""A history store that is killed again and again, for tests/harness/cachedattention/store/test_store_faults.py.

Each kill is SIGKILL to a fork at a random line of the store, in any of its threads. The next one opens what was left,
and every session that had been saved must be found whole, with its own rows, in a state that it was in since.
Without threads it is saved when `put` is done, with threads when `flush` is. A line of JSON says what came of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.histories import WholeStore, opened, right, rows

SESSIONS, STEPS = 6, 8
CODE = f"{os.sep}cachedattention{os.sep}store{os.sep}"


def store(folder: Path, threads: int) -> WholeStore:
    return opened(folder / "store", host=0, threads=threads)


def work(folder: Path, seed: int, threads: int, journal: int) -> None:
    """Says what it begins, and when all is saved that was begun; the last lines may be of something half done."""
    rng = random.Random(seed)
    with store(folder, threads) as history:
        for _ in range(STEPS):
            session = f"s{rng.randrange(SESSIONS)}"
            known = last_of(folder).get(session, [[]])[-1]
            new = [rng.randrange(500) for _ in range(rng.randrange(1, 12))]
            whole = new if rng.random() < 0.3 else known + new
            os.write(journal, f"begin {json.dumps([session, whole])}\n".encode())
            extends = whole is not new and save(history, session, len(known), new)
            if not extends:
                save(history, session, 0, whole)
            if threads and rng.random() < 0.7:
                continue
            if threads:
                history.flush()
            os.write(journal, b"done\n")


def save(history: WholeStore, session: str, start: int, tokens: list[int]) -> bool:
    """In two parts, which a thread of the store copies where it has some."""
    half = len(tokens) // 8 * 4  # whole blocks
    parts = [(start, tokens[:half]), (start + half, tokens[half:])]
    leaving = [history.leave(part, rows(session, part, first)) for first, part in parts if part]
    return history.hold(session, start, leaving)


def last_of(folder: Path) -> dict[str, list[list[int]]]:
    """The states in which each session may be: the last one that was saved, and those that were begun after it."""
    states: dict[str, list[list[int]]] = {}
    for line in (folder / "journal").read_text().splitlines():
        if line == "done":
            states = {session: known[-1:] for session, known in states.items()}
        else:
            session, tokens = json.loads(line.partition(" ")[2])
            states.setdefault(session, [[]]).append(tokens)
    return states


class Killer:
    """Counts lines; at the `last` the process is gone."""

    def __init__(self, last: int) -> None:
        self.last, self.lines = last, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if CODE not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def forked(folder: Path, seed: int, threads: int, last: int) -> int:
    """The lines that ran; -1 if it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        journal = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        killer = Killer(last)
        threading.settrace(killer)
        sys.settrace(killer)
        try:
            work(folder, seed, threads, journal)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        sys.settrace(None)
        os.write(writer, str(killer.lines).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        lines = said.read()
    assert os.WIFSIGNALED(status) or status == 0, status
    return int(lines) if lines else -1


def settled(folder: Path) -> dict[str, int]:
    """Looks at what a kill left, and writes the journal anew with what is there."""
    told = {"saved": 0, "found": 0, "wrong": 0, "files": 0, "left": 0}
    lines: list[str] = []
    with store(folder, 0) as history:
        for session, states in last_of(folder).items():
            found = [history.get(session, tokens) for tokens in states]
            whole = [tokens for tokens, one in zip(states, found, strict=True) if tokens and one.tokens == len(tokens)]
            told["wrong"] += sum(not right(one, session, tokens) for tokens, one in zip(states, found, strict=True))
            told["saved"] += bool(states[0])
            told["found"] += bool(whole) and bool(states[0])
            lines += [f"begin {json.dumps([session, tokens])}\ndone\n" for tokens in whole[-1:]]
        assert history.contents.disk
        told["files"] = sum(len(entry.blocks) for entry in history.contents.disk.sessions.values())
    told["left"] = sum(path.is_file() for path in (folder / "store" / "blocks").rglob("*"))
    (folder / "journal").write_text("".join(lines))
    return told


def kill_again_and_again(folder: Path, seed: int, kills: int, threads: int) -> None:
    """In a process of its own, for torch must not have run in it."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # a kill damages nothing
    rng = random.Random(seed)
    (folder / "journal").touch()
    lines = forked(folder, seed, threads, 0)
    total = {"kills": 0, "saved": 0, "found": 0, "wrong": 0, "orphans": 0}
    files = len(os.listdir("/proc/self/fd"))
    while total["kills"] < kills:
        total["kills"] += forked(folder, rng.randrange(10**9), threads, rng.randrange(1, lines)) < 0
        told = settled(folder)
        for name in ("saved", "found", "wrong"):
            total[name] += told[name]
        total["orphans"] += told["left"] - told["files"]
    print(json.dumps(total | {"open_files": len(os.listdir("/proc/self/fd")) - files}))
