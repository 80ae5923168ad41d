"""Whose rows a store holds: of which model, what it was run under, and what the method had prepared."""

from __future__ import annotations

from harness.cachedattention.store.fingerprint import Fingerprint, content_digest
from harness.engine.attach import Attachment
from harness.models.base import LoadedModel
from harness.prompts.prompt import Tools
from harness.results.files import canonical

ROTARY = ("rope_parameters", "partial_rotary_factor", "max_position_embeddings")


def fingerprint(attachment: Attachment, loaded: LoadedModel, **more: object) -> Fingerprint:
    """`more`: what else shapes the rows, as the protocol does."""
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
