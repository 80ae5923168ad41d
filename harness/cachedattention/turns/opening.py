"""Opens for a run what keeps KV caches between the turns of conversations, as the settings
`history` and `store` say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import inf
from pathlib import Path

from harness.cachedattention.store.disk import HistoryError
from harness.cachedattention.store.fingerprint import Fingerprint, content_digest
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.store.placement import POLICIES
from harness.cachedattention.turns.caches import CachesBetweenTurns, DevicePrefix, NewCache
from harness.cachedattention.turns.conversation import Conversation, Overflow
from harness.cachedattention.turns.stored import StoredCaches
from harness.config.settings import BLOCK_TOKENS, IO_THREADS, WRITE_BUFFER, Settings, SettingsError
from harness.engine.attach import Attachment
from harness.engine.cache import KVCache
from harness.models.base import LoadedModel
from harness.prompts.prompt import Tools
from harness.results.files import canonical
from kernels.temporary import TemporaryFolder
from methods.tiers.tier import DISK, HOST

ROTARY = ("rope_parameters", "partial_rotary_factor", "max_position_embeddings")


def fingerprint(attachment: Attachment, loaded: LoadedModel, **more: object) -> Fingerprint:
    """Return what must be the same before stored keys and values are used again: model, tokenizer,
    rotation, dtype, codec and method. `more`: what else shapes them, such as the protocol."""
    config = loaded.model.config.to_dict()
    rotary = {name: config.get(name) for name in ROTARY}
    options = attachment.options
    run = (attachment.method, attachment.budget, options.reuse_steps, options.placement)
    return Fingerprint(
        model=loaded.name,
        weights=f"{loaded.weights} {loaded.revision} {attachment.weights}",
        tokenizer=Tools(loaded.tokenizer, "template").fingerprint,
        rotary=f"{canonical(rotary)}, keys before rotation",
        dtype=str(loaded.model.dtype),
        codec=str(options.codec or "plain"),
        method=f"{run} {sorted(more.items())} prepared {content_digest(attachment.prepared)}",
    )


@dataclass(frozen=True, slots=True)
class Histories:
    """The caches of a run's conversations between their turns, and the rule by which old tokens
    leave them; None where none do. Runs know it by harness/jobs/histories.py."""

    caches: CachesBetweenTurns
    overflow: Overflow | None

    def talk(self, session: str, capacity: int, turns: int, *, by_token: bool) -> Conversation:
        """Begin the conversation `session`."""
        return Conversation(
            self.caches, session, capacity, turns, overflow=self.overflow, by_token=by_token
        )

    def expect(self, size: int) -> None:
        self.caches.expect(size)

    def forget(self, session: str) -> None:
        self.caches.forget(session)


@contextmanager
def opened(
    settings: Settings, attachment: Attachment, loaded: LoadedModel, run: str
) -> Iterator[Histories]:
    """Yield the object that keeps KV caches between the turns of conversations, as
    `settings.history` asks, and close it on leaving. `run` names the folder of the disk tier inside
    `store.folder`."""
    if settings.history != "store":
        kept = in_memory(settings, attachment)
        yield kept
        kept.caches.close()
        return
    wanted = settings.store
    whose = fingerprint(attachment, loaded, protocol=settings.protocol)
    is_temporary = wanted.capacities[DISK] and not wanted.folder
    with TemporaryFolder("kv-history-") if is_temporary else nullcontext() as temporary:
        try:
            store = HistoryStore(
                whose,
                host=wanted.capacities[HOST],
                disk=wanted.capacities[DISK],
                folder=temporary or (Path(wanted.folder) / run if wanted.folder else None),
                policy=POLICIES[wanted.policy],
                block_tokens=BLOCK_TOKENS,
                ttl_s=inf if wanted.ttl_s is None else wanted.ttl_s,
                on=str(attachment.model.device),
                engine=attachment.engine,
                threads=IO_THREADS,
                write_buffer=WRITE_BUFFER,
            )
        except HistoryError as error:
            raise SettingsError(f"store.folder: {error}.") from error
        with store:
            yield Histories(
                StoredCaches(_starting(attachment), attachment, store), _overflow(settings)
            )


def in_memory(settings: Settings, attachment: Attachment) -> Histories:
    """Return an object for KV caches between turns that needs no store: one that keeps nothing for
    history=recompute, else one that leaves them on the device, which stands in for a store too."""
    caches = CachesBetweenTurns if settings.history == "recompute" else DevicePrefix
    return Histories(caches(_starting(attachment)), _overflow(settings))


def _overflow(settings: Settings) -> Overflow | None:
    return Overflow(settings.overflow) if settings.overflow.window is not None else None


def _starting(attachment: Attachment) -> NewCache:
    return lambda capacity: attachment.start(KVCache, capacity=capacity)
