"""The disk tier: a folder that holds a file for each block (consecutive tokens with their keys and
values) and a small file for each session (a stored conversation), and that one process uses at a
time.

One thread opens the folder. From then on another thread makes all changes, in the order in which
they were decided, so a reader finds the folder as it would be in a store without threads, at most a
little late. Any thread may read the files of blocks that it was given. A process may be killed at
any moment: every file is replaced as a whole, and the file of a session is written after those of
its blocks.

The spare copies that sessions leave on disk when they move into memory (`DiskAccount`) outlive a
crash too.

Only files that the store itself names are read or removed, and no link is followed: whatever else
lies in the folder is named in a warning and left alone."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from harness.cachedattention.store.block import Block, WrittenFile, write
from harness.cachedattention.store.fingerprint import EXACT
from harness.cachedattention.store.placement import DiskAccount
from harness.results.lock import FolderInUse, FolderLock, owner
from harness.results.records import StoreError
from harness.terminal.stopping import whole
from kernels.temporary import remove_abandoned, replacing

FORMAT = 6  # of a session's file
HEX = "[0-9a-f]"  # each character of a name that the store makes
# by JSON that is not the store's
MISREAD = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class HistoryWarning(UserWarning):
    """The warning that a stored conversation is lost, and that its tokens will be computed
    again."""


class HistoryError(StoreError):
    """Raised where a store of conversations cannot be opened or used as asked; the message says
    what to do."""


@dataclass(frozen=True, slots=True)
class SessionOnDisk:
    """A stored conversation as it lies on disk: its blocks, with their files and without tensors in
    memory. `lineage`: a hash of what happened to the text before its rows were computed, such as
    dropped tokens; EXACT where nothing did."""

    blocks: list[Block]
    lineage: str = EXACT


class Disk:
    """The disk tier of a store: a folder with room for `capacity` bytes of keys and values; the
    heads of files and the token ids come on top."""

    def __init__(self, folder: Path, capacity: int) -> None:
        self.folder, self.files = folder, DiskAccount(capacity)
        try:
            for inside in (folder / "blocks", folder / "sessions"):
                inside.mkdir(parents=True, exist_ok=True)
                _refuse_link(inside)
            self._lock = FolderLock(folder)
        except FolderInUse as error:
            raise HistoryError(
                f"{folder} is in use by another store, of {owner(folder)}: wait until that ends, or name another folder"
            ) from error
        except OSError as error:
            raise _unusable(folder, error) from error
        self.sessions: dict[str, SessionOnDisk] = {}
        self._used = 0  # nanoseconds of the wall clock, at which a session was used last
        try:
            self._found = list(self._restored())
        except BaseException as error:
            self._lock.release()
            if isinstance(
                error, OSError
            ):  # says nothing of a session, which the next start may well read
                raise _unusable(folder, error) from error
            raise

    def restored(self, now_s: float) -> Iterator[tuple[str, SessionOnDisk, float]]:
        """Yield the sessions (stored conversations) that an earlier process left in the folder, the
        least recently used first: key, content, and the time of last use. That time is on the clock
        of the caller, which says `now_s` now."""
        for key, used_s in self._found:
            yield key, self.sessions[key], now_s - max(0.0, time.time() - used_s)

    def _restored(self) -> Iterator[tuple[str, float]]:
        """Read the files of all sessions. Remove what a crash has left: blocks that no session
        names, and sessions that lack a block. Yield each session's key and when it was used last,
        in seconds of the wall clock, the least recently used first. A session whose files cannot be
        read now, as permissions may have it, is passed over, and no block is removed then."""
        sizes: dict[Path, int] = {}
        all_read = True
        for folder in _own(self.folder / "blocks", f"{HEX}{{2}}", S_ISDIR):
            try:
                sizes |= {
                    path: path.lstat().st_size
                    for path in _own(folder, rf"{HEX}{{32}}\.safetensors", S_ISREG)
                }
            except OSError as error:
                all_read = False
                warn(
                    f"{folder} cannot be read ({error.strerror}): it is passed over, and no block is removed"
                )
        named: set[Path] = set()
        files = _own(self.folder / "sessions", rf"{HEX}{{32}}\.json", S_ISREG)
        for path in sorted(files, key=lambda path: path.lstat().st_mtime_ns):
            try:
                key, session = self._session_in(path)
                is_whole = all(
                    sizes.get(self.path(block)) == block.file.bytes
                    for block in session.blocks
                    if block.file
                )
            except OSError as error:
                all_read = False
                warn(
                    f"{path} cannot be read ({error.strerror}): it is passed over, and no block is removed"
                )
                continue
            except MISREAD:
                warn(f"{path} is damaged or of another version: its session is dropped")
                _unlink(path)
                continue
            if not is_whole:
                if all_read:
                    warn(f"{self.folder}: files of a session are missing or cut off; it is dropped")
                    _unlink(path)
                continue
            self._used = path.lstat().st_mtime_ns
            self.sessions[key] = session
            self.files.hold(key, _sizes(session.blocks))
            named |= {self.path(block) for block in session.blocks}
            yield key, self._used / 1e9
        if not all_read:
            return
        if sizes and not self.sessions:
            warn(f"{self.folder} has blocks of no session that could be read: they are dropped")
        for path in sizes.keys() - named:
            _unlink(path)

    @whole()
    def write(self, key: str, blocks: Sequence[Block], lineage: str) -> tuple[int, list[Block]]:
        """Make `blocks` all that the folder has of the session `key`, and write those that it does
        not have yet. `lineage`: the hash of what was dropped or recomputed before the session's
        rows, which is written along. Return the bytes written, and all blocks with their files and
        without tensors in memory."""
        before = self.sessions[key].blocks if key in self.sessions else []
        known, names = {block.name: block for block in before}, {block.name for block in blocks}
        new = [block for block in blocks if block.name not in known]
        self.files.make_room(key, _sizes(blocks), self.drop)
        try:
            known |= {block.name: block for block in self._written(new)}
            session = SessionOnDisk([known[block.name] for block in blocks], lineage)
            # one line with the checksum of all that follows, then key, lineage and blocks
            files = [
                [block.name, block.tokens, block.size, block.file.sha256, block.file.bytes]
                for block in session.blocks
                if block.file is not None
            ]
            content = {"format": FORMAT, "key": key, "lineage": lineage, "blocks": files}
            data = json.dumps(content).encode()
            with replacing(self._session_path(key)) as file:
                file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
            self.sessions[key] = session
            self.touch(key)
        except BaseException:  # the rows that were to be written may be missing too
            self._remove(new)
            raise
        self._remove([block for block in before if block.name not in names])
        return self.files.hold(key, _sizes(blocks)), list(session.blocks)

    def touch(self, key: str) -> None:
        """Note that the session was used just now, by the time stamp of its file; do nothing where
        it is not on disk."""
        if key in self.sessions:
            # no two sessions at once, however the clock is set
            self._used = max(time.time_ns(), self._used + 1)
            with suppress(OSError):
                os.utime(self._session_path(key), ns=(self._used, self._used))

    @whole()
    def drop(self, key: str) -> None:
        """Remove the session and the files of its blocks. Where the session's own file cannot be
        removed now, it is when the folder is opened next, since its blocks are missing."""
        session = self.sessions.pop(key, None)
        if session is not None:
            _unlink(self._session_path(key))
            self._remove(session.blocks)
            self.files.drop(key)

    def close(self) -> None:
        self._lock.release()

    def path(self, block: Block) -> Path:
        return self.folder / "blocks" / block.name[:2] / f"{block.name}.safetensors"

    def _session_path(self, key: str) -> Path:
        return self.folder / "sessions" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def _session_in(self, path: Path) -> tuple[str, SessionOnDisk]:
        """Read the file of a session; return the session's key and content. Raise one of `MISREAD`
        where it is not what was written there."""
        checksum, _, data = path.read_bytes().partition(b"\n")
        if hashlib.sha256(data).hexdigest().encode() != checksum:
            raise ValueError(f"{path} is not what was written")
        content = json.loads(data)
        if content["format"] != FORMAT or path != self._session_path(content["key"]):
            raise ValueError(f"{path} is of format {content['format']} or of another session")
        blocks = [
            Block(name, tuple(tokens), size, None, WrittenFile(sha256, length))
            for name, tokens, size, sha256, length in content["blocks"]
        ]
        return content["key"], SessionOnDisk(blocks, content["lineage"])

    def _written(self, blocks: Sequence[Block]) -> Iterator[Block]:
        for block in blocks:
            path = self.path(block)
            path.parent.mkdir(exist_ok=True)
            _refuse_link(path.parent)
            yield replace(block, rows=None, file=write(path, block))

    def _remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            _unlink(self.path(block))


def _unusable(folder: Path, error: OSError) -> HistoryError:
    return HistoryError(
        f"the store cannot use {error.filename or folder} ({error.strerror}): name another folder"
    )


def _own(folder: Path, name: str, is_kind: Callable[[int], bool]) -> Iterator[Path]:
    """Yield the entries of `folder` that the store may have made: of a full `name`, a regular
    expression, and of the kind of a file or a folder. All else, a link too, is named in a warning
    and stays."""
    remove_abandoned(folder)
    for path in list(folder.iterdir()):
        if re.fullmatch(name, path.name) and is_kind(path.lstat().st_mode):
            yield path
        else:
            warn(f"{path} is nothing that this store has made: it is passed over")


def _refuse_link(folder: Path) -> None:
    """Raise `OSError` where `folder` is a link, since nothing is written or removed behind one."""
    if folder.is_symlink():
        raise OSError(errno.ENOTDIR, "links are not followed", str(folder))


def _unlink(path: Path) -> None:
    """Remove a file, or leave it if that fails: no session names it any more, so it goes when the
    folder is opened again."""
    with suppress(OSError):
        _refuse_link(path.parent)
        path.unlink()


def _sizes(blocks: Sequence[Block]) -> dict[str, int]:
    return {block.name: block.size for block in blocks}


def warn(message: str) -> None:
    warnings.warn(message, HistoryWarning, stacklevel=3)
