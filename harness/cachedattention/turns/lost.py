"""store.lost=fail: the sentence that ends a run where a turn's history is lost."""

from __future__ import annotations

from pathlib import Path

from harness.cachedattention.store.block import Loss
from harness.cachedattention.store.disk import HistoryError

ADVICE = {
    Loss.DISK_FULL: "Free some space in {folder}, or name another folder with store.folder",
    Loss.NO_ROOM: "Raise store.host or store.disk",
    Loss.TOO_OLD: "Raise store.ttl_s",
    Loss.DAMAGED: "See what damages files in {folder}",
    Loss.UNUSABLE: "See what ails the disk of {folder}",
    Loss.NOT_COPIED: "Free some host memory",
}


def refusal(session: str, tokens: int, loss: Loss, folder: Path | None) -> HistoryError:
    """`tokens` of the session were stored; `folder`: of the disk tier, if there is one."""
    return HistoryError(
        f"The stored history of {session} ({tokens} tokens) is lost, for {loss}, and computing it again would change "
        f"the answers of this method. {ADVICE[loss].format(folder=folder)}, and run the same command again; "
        "store.lost=count goes on and counts such turns."
    )
