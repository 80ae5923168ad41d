"""What `history` and `store` name, opened for a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.config.settings import Settings, StoreSettings
from harness.conversations.fingerprint import fingerprint
from harness.conversations.histories import DevicePrefix, Histories, Recompute
from harness.conversations.stored import StoredHistories
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.history.fingerprint import Fingerprint
from harness.history.policies import POLICIES
from harness.history.store import HistoryStore
from harness.models.base import LoadedModel

IN_MEMORY = {"device_prefix": DevicePrefix, "recompute": Recompute}


@contextmanager
def histories(
    settings: Settings, attachment: Attachment, loaded: LoadedModel, run: str, read_buffer: int | None = None
) -> Iterator[Histories]:
    """Closed on leaving. `run` names the folder of the disk tier inside `store.folder`. `read_buffer`: of a store."""

    def start(capacity: int) -> KVCache:
        return attachment.start(KVCache, capacity=capacity)

    if settings.history in IN_MEMORY:
        made: Histories = IN_MEMORY[settings.history](start)
        yield made
        made.close()
        return
    whose = fingerprint(attachment, loaded, protocol=settings.protocol)
    with opened(settings.store, whose, str(attachment.model.device), run) as store:
        yield StoredHistories(start, attachment, store, read_buffer)


@contextmanager
def opened(settings: StoreSettings, whose: Fingerprint, device: str, run: str) -> Iterator[HistoryStore]:
    """The store alone."""
    sizes = settings.capacities
    with TemporaryDirectory(prefix="kv-history-") if sizes["disk"] and not settings.folder else nullcontext() as made:
        folder = Path(made) if made else Path(settings.folder).expanduser() / run if settings.folder else None
        with HistoryStore(
            whose,
            device=sizes["device"],
            host=sizes["host"],
            disk=sizes["disk"],
            folder=folder,
            policy=POLICIES[settings.policy](),
            block_tokens=settings.block_tokens,
            ttl_s=settings.seconds_to_live,
            durable=settings.durable,
            on=device,
            io_threads=settings.io_threads,
            write_buffer=settings.write_bytes,
        ) as store:
            yield store
