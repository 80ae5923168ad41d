"""Resolves the settings of a run whose model a server runs, and refuses what the server decides itself."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from harness.config.settings import ENTRIES, NESTED, SERVER, Settings, SettingsError
from harness.jobs.resolve import Resolved
from methods.base import Method
from methods.full import Full

# settings, and groups of them, that mean the same whoever runs the model
KEPT = (
    "chat", "template_kwargs", "thinking", "too_long", "batch", "seed", "baseline", "warmup", "likelihood", "dry_run",
    "generation", "data", "results", "wandb",
)  # fmt: skip


def resolve_remote(wanted: Settings, method: Method) -> Resolved:
    """Return the settings that apply to a model behind a server, with Full as the method. Raise
    `SettingsError` for another method, and for settings that only an engine of ours could obey."""
    remedy = "leave it out, and let model.notes say what the server does"
    if method != Full():
        raise SettingsError(
            f"{type(method).__name__} cannot run behind an endpoint, whose server decides what its cache keeps: "
            f"{remedy}."
        )
    usual = Settings()
    for key in ENTRIES:
        if key.partition(".")[0] not in KEPT and key not in NESTED:
            value = attrgetter(key)(wanted)
            if value != attrgetter(key)(usual):
                raise SettingsError(f"{key}={value} is the server's to decide: {remedy}.")
    settings = replace(wanted, device=SERVER, budget=None, graphs="off")
    return Resolved(Full(), settings, None, [])
