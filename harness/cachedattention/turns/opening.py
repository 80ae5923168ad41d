"""The caches between turns that the settings `history` and `store` name, opened for a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.cachedattention.store.disk import named_in_settings
from harness.cachedattention.store.fingerprint import Fingerprint, content_digest
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.store.policies import POLICIES
from harness.cachedattention.turns.caches import CachesBetweenTurns, DevicePrefix, NewCache
from harness.cachedattention.turns.stored import StoredCaches
from harness.config.settings import BLOCK_TOKENS, IO_THREADS, WRITE_BUFFER, Settings, StoreSettings
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.models.base import LoadedModel
from harness.prompts.prompt import Tools
from harness.results.files import canonical
from kernels.temporary import TemporaryFolder
from methods.tiers import codecs
from methods.tiers.codec import PLAIN

ROTARY = ("rope_parameters", "partial_rotary_factor", "max_position_embeddings")


def fingerprint(attachment: Attachment, loaded: LoadedModel, **more: object) -> Fingerprint:
    """Return what must be the same before stored rows are read again. `more`: what else shapes them, as the protocol
    does."""
    config = loaded.model.config.to_dict()
    rotary = {name: config.get(name) for name in ROTARY}
    run = (attachment.method, attachment.budget, attachment.reuse_steps, attachment.placement)
    return Fingerprint(
        model=loaded.name,
        weights=f"{loaded.weights} {loaded.revision}",
        tokenizer=Tools(loaded.tokenizer, "template").fingerprint,
        rotary=f"{canonical(rotary)}, keys before rotation",
        dtype=str(loaded.model.dtype),
        codec=str(attachment.codec or "plain"),
        method=f"{run} {sorted(more.items())} prepared {content_digest(attachment.prepared)}",
    )


IN_MEMORY = {"device_prefix": DevicePrefix, "recompute": CachesBetweenTurns}


@contextmanager
def opened_caches(
    settings: Settings, attachment: Attachment, loaded: LoadedModel, run: str, read_buffer: int | None = None
) -> Iterator[CachesBetweenTurns]:
    """Open the caches that `settings.history` names; they are closed on leaving. `run` names the folder of the disk
    tier inside `store.folder`. `read_buffer`: layers that a store loads before a turn begins."""
    if settings.history in IN_MEMORY:
        made = in_memory(settings.history, attachment)
        yield made
        made.close()
        return
    whose = fingerprint(attachment, loaded, protocol=settings.protocol)
    with opened(settings.store, whose, attachment, run) as store:
        yield StoredCaches(_starting(attachment), attachment, store, read_buffer)


def in_memory(history: str, attachment: Attachment) -> CachesBetweenTurns:
    """Return the caches of `IN_MEMORY` that `history` names; caches that stay on the device stand in for a store."""
    return IN_MEMORY.get(history, DevicePrefix)(_starting(attachment))


def _starting(attachment: Attachment) -> NewCache:
    return lambda capacity: attachment.start(KVCache, capacity=capacity)


@contextmanager
def opened(settings: StoreSettings, whose: Fingerprint, attachment: Attachment, run: str) -> Iterator[HistoryStore]:
    """Open the store that `settings` describe, with whatever is in its folder."""
    codec = PLAIN if settings.codec is None else codecs.codec_of(settings.codec)
    sizes: dict[str, Any] = settings.capacities
    for spec in attachment.model_specs:
        codec.check(spec.head_dim)
    with TemporaryFolder("kv-history-") if sizes["disk"] and not settings.folder else nullcontext() as made:
        folder = made if made else Path(settings.folder) / run if settings.folder else None
        with named_in_settings():
            store = HistoryStore(
                whose if settings.codec is None else replace(whose, codec=settings.codec),
                **sizes,
                folder=folder,
                policy=POLICIES[settings.policy](),
                block_tokens=BLOCK_TOKENS,
                ttl_s=settings.seconds_to_live,
                on=str(attachment.model.device),
                codec=codec,
                dtype=attachment.model.dtype,
                share=settings.share,
                engine=attachment.engine,
                io_threads=IO_THREADS,
                write_buffer=WRITE_BUFFER,
            )
        with store:
            yield store
