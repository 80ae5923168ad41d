"""Builds an engine from the words of `--model_args`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.config.catalogue import plain
from harness.config.compose import built, composed
from harness.config.settings import SettingsError
from harness.config.values import orders
from harness.engine.engine import Engine
from harness.engine.graph import CudaGraphs
from harness.jobs.job import attach
from harness.jobs.machine import check_machine
from harness.jobs.resolve import resolve
from harness.models.base import LoadedModel, load
from harness.terminal.notices import say_once
from kernels import ops

READ = (
    "model",
    "method",
    "budget",
    "budget_rule",
    "comm",
    "windows",
    "dense_layers",
    "budget_generated",
    "placement",
    "codec",
    "overlap",
    "dtype",
    "device",
    "prefill_chunk",
    "threads",
    "graphs",
    "backends",
)  # fmt: skip; the keys of a run that are read here


class Ready(NamedTuple):
    """Hold the loaded model and the engine that answers requests."""

    loaded: LoadedModel
    engine: Engine


def ready(words: Mapping[str, Any], config_dir: str | None = None) -> Ready:
    """Return the model with its method attached, configured by `words` as
    `python -m harness KEY=VALUE ...` is. `config_dir`: a folder with method/NAME.yaml and model/NAME.yaml of a user's
    own, as for `--config-dir`. Raises `SettingsError` for a key that has no effect here."""
    for key in words:
        if key.partition(".")[0] not in READ:
            raise SettingsError(f"{key} is not a key of lm-eval's model: use one of {', '.join(READ)}.")
    folders = [] if config_dir is None else [Path(config_dir)]
    try:
        given, _, source, wanted = built(composed([f"{key}={plain(value)}" for key, value in words.items()], folders))
    except SettingsError as error:  # the advice names an option of our own command
        raise SettingsError(str(error).replace("--config-dir", "config_dir", 1)) from error
    check_machine(wanted)
    resolved = resolve(wanted, given, source.describe())
    for note in resolved.notes:
        say_once(note)
    settings = resolved.settings
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    ops.prefer(orders(settings.backends))
    loaded = load(source, settings.dtype, settings.device)
    attachment = attach(loaded, resolved.method, resolved.budget, settings)
    graphs = CudaGraphs(loaded.model.device) if settings.graphs == "on" else None
    return Ready(loaded, Engine(attachment, prefill_chunk=settings.prefill_chunk, graphs=graphs))
