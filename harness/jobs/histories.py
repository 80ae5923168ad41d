"""Finds the part of the harness that keeps the caches of a run's conversations between their turns.

CachedAttention (harness/cachedattention/) keeps them. It is found by its name, as methods and tasks
are, so nothing here depends on how it works. Its `Histories` (turns/opening.py) begin a
conversation with `talk`, which returns a `Conversation` (turns/conversation.py). Each turn calls
`ask`, then `begin` with a filled cache or `resume` and `compute`, decodes, and then calls
`answered` and `save`. An example of one turn is a conversation as well."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from harness.config.settings import Settings
from harness.engine.attach import Attachment
from harness.models.base import LoadedModel

# the module whose `opened` and `in_memory` make `Histories`
KEEPER = "harness.cachedattention.turns.opening"
Histories = Any


def opened(
    settings: Settings, attachment: Attachment, loaded: LoadedModel, run: str
) -> AbstractContextManager[Histories]:
    """Return the histories of the run whose folder is called `run`, to be opened and closed."""
    return import_module(KEEPER).opened(settings, attachment, loaded, run)


def in_memory(settings: Settings, attachment: Attachment) -> Histories:
    """Return histories that need no store, for a warm-up."""
    return import_module(KEEPER).in_memory(settings, attachment)
