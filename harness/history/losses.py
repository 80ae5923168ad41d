"""Why a session that was stored is not there any more."""

from __future__ import annotations

from enum import StrEnum


class Loss(StrEnum):
    """The words in which records say it."""

    DISK_FULL = "the disk is full"
    NO_ROOM = "the tiers are full"
    TOO_OLD = "its time to live was over"
    DAMAGED = "a file is damaged or missing"
    UNUSABLE = "the disk cannot be used"
    NOT_COPIED = "its rows did not come from the device"
