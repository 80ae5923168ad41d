"""What a run is refused for before any weights are loaded; the machine is harness/jobs/planning/machine.py's, memory
capacity.py's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from evals.base import Task
from harness.cachedattention.store.history_store import has_rows
from harness.config import plugins
from harness.config.settings import Settings, SettingsError
from harness.jobs.planning.alignment import AlignedBudget, shapes
from harness.jobs.planning.capacity import size
from harness.jobs.planning.effective import codec_of
from harness.jobs.planning.examples import PreparedExample
from harness.models.base import DTYPE_BYTES, ModelInfo
from harness.prompts.calibration import MOST
from harness.results.files import unwritable
from methods.base import Budget, Method, check_layers
from methods.tiers import codecs
from methods.tiers.codec import Codec


def check_fit(settings: Settings, method: Method, info: ModelInfo) -> None:
    """Refuse what suits method or model ill, before any weights are loaded."""
    if method.uses_budget and not settings.says_budget:
        raise SettingsError(
            f"budget=null leaves {type(method).__name__} without a budget: set budget or budget_bytes; budget=1.0 is "
            "the whole prompt."
        )
    if method.calibration_tokens > MOST:
        raise SettingsError(
            f"method.calibration_tokens={method.calibration_tokens} is more than the {MOST} tokens of text to "
            f"calibrate on: set it to at most {MOST}."
        )
    with plugins.naming("method", plugins.describe(method)):
        method.check_model(shapes(info)[0])
    if method.encodes and (codec := codec_of(settings)) is not None:
        _check_codec(f"codec={settings.codec}", codec, info)
    if settings.history == "store":
        _check_stored_rows(settings, method, info)
    layers = info.num_whole_layers
    check_layers("dense_layers", settings.dense_layers, layers)


def _check_stored_rows(settings: Settings, method: Method, info: ModelInfo) -> None:
    """Refuse settings about single rows for a method that does not keep all of them as the model made them."""
    store = settings.store
    if store.folder is not None and (why := unwritable(Path(store.folder))):
        raise SettingsError(f"store.folder={store.folder} cannot be used: {why}; name another folder.")
    codec = None if store.codec is None else codecs.codec_of(store.codec)
    if codec is not None:
        _check_codec(f"store.codec={store.codec}", codec, info)
    rows = has_rows(method, settings.codec, settings.budget_generated)
    passing = codec is not None and method.encodes and codec == codec_of(settings)  # codes are stored as they are
    if codec is not None and not rows and not passing:
        raise SettingsError(
            f"store.codec={store.codec} is about the rows of methods that keep all of them as the model made them, and "
            f"{type(method).__name__} stores something else here: leave it out."
        )


def _check_codec(word: str, codec: Codec, info: ModelInfo) -> None:
    try:
        codec.check(info.head_dim)
    except ValueError as error:
        raise SettingsError(f"{word}: {error}") from error


def check_budget(items: Sequence[PreparedExample], method: Method, budget: Budget | None, settings: Settings) -> None:
    """Refuse, before any work, a budget that cannot hold the method's sinks and windows, and bytes that some prompt
    cannot be served with."""
    if budget is None:
        return
    if isinstance(budget, AlignedBudget):
        lengths = {item.prompt.split if settings.protocol == "context" else len(item.prompt.ids) for item in items}
        for length in sorted(lengths):
            budget.refuse(length)
    if 0 not in budget.dense_layers:
        method.check(budget, 0)


def check_turns(items: Sequence[PreparedExample], settings: Settings) -> None:
    """Refuse what is measured of single turns alone, where an example has several. `settings`: questions=shared only
    where some examples have the same context."""
    if not any(item.further for item in items):
        return
    if settings.questions == "shared" and settings.history != "device_prefix":
        raise SettingsError(
            f"questions=shared goes back to one cache, and history={settings.history} lets it go between turns: set "
            "questions=separate."
        )
    if settings.questions == "shared" and settings.overflow.window is not None:
        raise SettingsError(
            "questions=shared goes back to one cache, which overflow shortens: leave overflow.window out, or set "
            "questions=separate."
        )
    if settings.fidelity:
        raise SettingsError(
            f"fidelity={settings.fidelity} follows one turn, and this task's examples have several: set fidelity=0."
        )


def check_store(items: Sequence[PreparedExample], settings: Settings, method: Method, info: ModelInfo) -> None:
    """Refuse a tier that is too small for every conversation."""
    if settings.history != "store":
        return
    store, least = settings.store, _least_stored(items, settings, method, info)
    for tier, room in store.capacities.items():
        if 0 < room < least:
            raise SettingsError(
                f"store.{tier}={getattr(store, tier)} holds no conversation: the smallest takes {size(least)} here, "
                f"and a number without a unit is in bytes. Set store.{tier}=8GB, for example."
            )


def _least_stored(items: Sequence[PreparedExample], settings: Settings, method: Method, info: ModelInfo) -> int:
    """Return the bytes of a conversation after its first turn, at least. What a method keeps is its own affair."""
    shortest = min(len(item.prompt.ids) for item in items if item.further)
    tokens = shortest if has_rows(method, settings.codec, settings.budget_generated) else 1
    codec, dense = settings.store.codec or settings.codec, info.kv_bytes(settings.dtype, tokens)
    if codec is None:
        return dense
    plain = 2 * info.head_dim * DTYPE_BYTES[settings.dtype]
    return dense * codecs.codec_of(codec).layout(info.head_dim, torch.float32).token_bytes // plain


def check_overflow(items: Sequence[PreparedExample], task: Task, settings: Settings, limit: int) -> None:
    """Refuse a window that some turn does not fit, or the model has not, and none where `task` is about overflow.
    `limit`: tokens that the model takes."""
    window, turns = settings.overflow.window, [turn for item in items if item.further for turn in item.turns]
    if window is None and task.fills is not None:
        raise SettingsError(
            f"This task fills a window of {task.fills} tokens, and without overflow.window nothing overflows: set "
            f"overflow.window={task.fills}."
        )
    if window is None or not turns:
        return
    if task.fills is not None and window < task.fills:
        raise SettingsError(
            f"overflow.window={window} is less than the {task.fills} tokens that this task fills: set overflow.window="
            f"{task.fills}, or let the task fill {window}."
        )
    if window > limit:
        raise SettingsError(
            f"overflow.window={window} is more than the {limit} tokens that the model takes: set at most {limit}."
        )
    longest = max(turns, key=lambda turn: turn.tokens)
    if longest.tokens > window:
        raise SettingsError(
            f"overflow.window={window} is too small for {longest.example.id}, of {len(longest.prompt.ids)} prompt "
            f"tokens and {longest.new_tokens} new ones: set overflow.window={longest.tokens} or more."
        )
