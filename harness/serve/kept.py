"""Where histories are kept in a run of the loop, as the command line says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.config.groups import SettingsError, size
from harness.config.plugins import suggestion
from harness.conversations.fingerprint import fingerprint
from harness.conversations.histories import DevicePrefix, Histories, Recompute
from harness.conversations.stored import StoredHistories
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.history.placement import DEVICE, DISK, HOST, TIERS
from harness.history.policies import POLICIES
from harness.history.store import HistoryStore
from harness.models.base import LoadedModel

STORE = "store"
KINDS = {"recompute": Recompute, "device_prefix": DevicePrefix}
HISTORIES = (STORE, *KINDS)


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Of history=store."""

    device: str | int = 0  # bytes of each tier: 512MB, 4GiB
    host: str | int = "1GB"
    disk: str | int = 0
    policy: str = "scheduler_aware"  # lru, fifo
    ttl_s: float | None = None  # since the last use; null: for ever
    block_tokens: int = 256

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise SettingsError(f"There is no store.policy {self.policy!r}{suggestion(self.policy, POLICIES)}")
        if self.block_tokens < 1:
            raise SettingsError(f"store.block_tokens={self.block_tokens} must be at least 1.")
        if not any(self.capacities.values()):
            raise SettingsError("The store has no room: set store.host, as to 1GB, or history=recompute.")

    @property
    def capacities(self) -> dict[str, int]:
        """Bytes by tier."""
        return {tier: size(f"store.{tier}", getattr(self, tier)) for tier in TIERS}


@contextmanager
def kept(history: str, tiers: Tiers, attachment: Attachment, loaded: LoadedModel, folder: Path) -> Iterator[Histories]:
    """Empty at first. What goes to disk lies below `folder`, and is gone in the end."""

    def start(capacity: int) -> KVCache:
        return attachment.start(KVCache, capacity=capacity)

    if history in KINDS:
        histories: Histories = KINDS[history](start)
        yield histories
        histories.close()
        return
    with TemporaryDirectory(prefix="store-", dir=folder) as files, _store(tiers, attachment, loaded, files) as store:
        yield StoredHistories(start, attachment, store)


def _store(tiers: Tiers, attachment: Attachment, loaded: LoadedModel, files: str) -> HistoryStore:
    room = tiers.capacities
    return HistoryStore(
        fingerprint(attachment, loaded),
        device=room[DEVICE],
        host=room[HOST],
        disk=room[DISK],
        folder=Path(files) if room[DISK] else None,
        policy=POLICIES[tiers.policy](),
        ttl_s=tiers.ttl_s or inf,
        block_tokens=tiers.block_tokens,
        on=str(loaded.model.device),
    )


def statistics(histories: Histories) -> dict[str, Any] | None:
    """Of the store; None without one."""
    return histories.store.statistics.plain() if isinstance(histories, StoredHistories) else None
