"""What a run is refused for before any weights are loaded; memory is harness/jobs/capacity.py's."""

from __future__ import annotations

import os
from collections.abc import Sequence

from harness.config.settings import Settings, SettingsError
from harness.jobs.alignment import AlignedBudget, shapes
from harness.jobs.items import Item
from harness.models.base import ModelInfo
from harness.prompts.calibration import MOST
from methods.base import Budget, Method, check_layers


def check_fit(settings: Settings, method: Method, info: ModelInfo) -> None:
    """Refuse what suits the model or the machine ill, before any weights are loaded."""
    cpus = os.cpu_count() or 1
    if settings.threads is not None and settings.threads > cpus:
        raise SettingsError(
            f"threads={settings.threads} is too many: this machine has {cpus} CPUs, choose at most {cpus}."
        )
    if method.calibration_tokens > MOST:
        raise SettingsError(
            f"method.calibration_tokens={method.calibration_tokens} is more than the {MOST} tokens of text to "
            f"calibrate on: set it to at most {MOST}."
        )
    method.check_model(shapes(info)[0])
    check_layers("dense_layers", settings.dense_layers, info.num_layers)
    if settings.layer_budgets and len(settings.layer_budgets) != info.num_layers:
        raise SettingsError(
            f"layer_budgets names {len(settings.layer_budgets)} layers and {info.name} has {info.num_layers}: give "
            "one each."
        )


def check_budget(items: Sequence[Item], method: Method, budget: Budget | None, settings: Settings, layers: int) -> None:
    """Refuse a budget that some example cannot be served with, before any work."""
    if budget is None:
        return
    lengths = {item.prompt.split if settings.protocol == "context" else len(item.prompt.ids) for item in items}
    for length in sorted(lengths):
        if isinstance(budget, AlignedBudget):
            budget.refuse(length)
        for layer in range(layers) if budget.per_layer else (0,):
            if layer not in budget.dense_layers:
                method.check(budget, length, layer)


def check_batches(items: Sequence[Item], settings: Settings) -> None:
    """Refuse examples that would run together and differ in a length, before any work."""
    for start in range(0, len(items) if settings.batch > 1 else 0, settings.batch):
        check_alike(items[start : start + settings.batch], settings)


def check_alike(batch: Sequence[Item], settings: Settings) -> None:
    """Raise where the examples of one batch differ in a length; the message says which and by how much."""
    lengths = {
        "prompt tokens": [len(item.prompt.ids) for item in batch],
        "new tokens at most": [item.new_tokens for item in batch],
        "new tokens at least": [item.example.min_new_tokens for item in batch],
    }
    if settings.protocol == "context":
        lengths["tokens before the question"] = [item.prompt.split or 0 for item in batch]
    for what, counts in lengths.items():
        if len(set(counts)) > 1:
            other = next(place for place, count in enumerate(counts) if count != counts[0])
            raise SettingsError(
                f"batch={settings.batch} runs examples of equal length together, and {batch[0].example.id} has "
                f"{counts[0]} {what} where {batch[other].example.id} has {counts[other]}: use batch=1."
            )
