"""Makes one observation of one prompt and writes it: result.json, which says how it was made, and a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from evals.base import Task
from harness.attention_statistics.observations import LOOK, Observation
from harness.config.plugins import describe
from harness.config.settings import Settings
from harness.engine.attach import observer
from harness.engine.hf import layer_specs
from harness.jobs.examples import prepare
from harness.jobs.model_check import check_against_generate
from harness.jobs.resolve import resolve
from harness.models.base import ModelError, ModelSource, load
from harness.reports.pictures import figures
from harness.results.files import digest, write_json
from harness.results.provenance import provenance
from methods.base.request import ROTATION
from methods.full import Full
from methods.layers.window import whole_layers

SCHEMA = 1


def observe(
    name: str, observation: Observation, task: Task, model: ModelSource, wanted: Settings
) -> dict[str, Any]:
    """Run the model on the task's first prompt with full attention, and return the numbers that
    `observation` computes for every layer, with what they were computed from (model, prompt,
    settings), as it is written to a file. `name`: that of the observation; `wanted`: the run's
    settings before defaults are filled in."""
    info = model.describe()
    settings = resolve(wanted, Full(), info).settings
    item = prepare(task, model, settings)[0]
    loaded = load(model, settings.dtype, settings.device)
    check_against_generate(loaded, item.prompt.ids)
    specs = layer_specs(loaded.model)
    if any(ROTATION in spec.unknown for spec in specs):
        raise ModelError(
            f"{info.name}: {ROTATION} could not be found out, and observations undo that: use another."
        )
    ids = torch.tensor([item.prompt.ids])
    inputs = observer(loaded.model, specs, ids)(ids.shape[1])
    layers = [
        observation.of_layer(x, spec) for spec, x in zip(whole_layers(specs), inputs, strict=True)
    ]
    return {
        "schema": SCHEMA,
        "what": name,
        "options": asdict(observation),  # type: ignore[call-overload]
        "model": {"name": info.name, "revision": info.revision, "weights": info.weights},
        "prompt": {
            "task": describe(task),
            "example": item.example.id,
            "tokens": ids.shape[1],
            "sha256": item.sha256,
        },
        "settings": {
            "dtype": settings.dtype,
            "device": settings.device,
            "chat": settings.chat,
            "seed": settings.seed,
        },
        "layers": layers,
        "provenance": provenance(settings.device),
    }


def place(root: Path, result: dict[str, Any]) -> Path:
    """Return the folder below `root` for the result of an observation; it is the same for the same
    model, prompt, settings and options."""
    own = {key: result[key] for key in ("what", "options", "model", "settings")} | {
        "sha256": result["prompt"]["sha256"]
    }
    return root / "observations" / f"{result['what']}-{digest(own)[:8]}"


def write(folder: Path, observation: Observation, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "result.json", result)
    prompt = result["prompt"]
    with figures.styled(LOOK):
        figure = observation.draw(result["layers"])
        figures.title(
            figure,
            observation.title,
            f"{result['model']['name']}, {prompt['tokens']} tokens of {prompt['example']}",
        )
    for suffix in (".png", ".pdf"):
        figures.save(figure, folder / f"plot{suffix}")
