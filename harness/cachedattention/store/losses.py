"""What a disk and the way to host memory may do to a session, and why one that was stored is not there any more."""

from __future__ import annotations

import errno
import sqlite3
from enum import StrEnum


class DamagedBlock(ValueError):
    """A block's file is missing, or is not what was written."""


class NotSaved(RuntimeError):
    """Rows could not be brought to host memory."""


class HistoryLost(RuntimeError):
    """The rows that were found cannot be read: compute their tokens again, in a fresh cache."""


LOST = (OSError, sqlite3.Error, DamagedBlock, NotSaved)  # what a session does not outlive


class Loss(StrEnum):
    """The words in which records say it."""

    DISK_FULL = "the disk is full"
    NO_ROOM = "the tiers are full"
    TOO_OLD = "its time to live was over"
    DAMAGED = "a file is damaged or missing"
    UNUSABLE = "the disk cannot be used"
    NOT_COPIED = "its rows did not come from the device"


def loss_by(error: Exception) -> Loss:
    """error: one of `LOST`"""
    if isinstance(error, DamagedBlock):
        return Loss.DAMAGED
    if isinstance(error, NotSaved):
        return Loss.NOT_COPIED
    in_index = isinstance(error, sqlite3.Error) and "full" in str(error)
    in_file = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Loss.DISK_FULL if in_index or in_file else Loss.UNUSABLE
