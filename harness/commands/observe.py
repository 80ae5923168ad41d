"""`python -m harness.observe key_spectrum model=smollm2 task.lengths=[2048]`: what a model's keys and attention show.

No method runs: the task's first prompt goes through the model once, and every layer's keys and queries are looked at.
The figures go to results.root/observations/ as result.json, plot.png and plot.pdf.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from harness.config.compose import built, composed
from harness.config.errors import as_command
from harness.config.overrides import settings as known_settings
from harness.config.plugins import TARGET, build, suggestion
from harness.config.settings import SettingsError
from harness.terminal.arguments import typed
from harness.terminal.notices import say
from harness.terminal.tables import Column, text_table

OBSERVATIONS = {
    "key_spectrum": "harness.attention_statistics.keys.KeySpectrum",
    "chunk_cosines": "harness.attention_statistics.keys.ChunkCosines",
    "attention_mass": "harness.attention_statistics.weights.AttentionMass",
    "heavy_hitters": "harness.attention_statistics.weights.HeavyHitters",
}
READ = ("experiment", "task", "model", "chat", "dtype", "device", "seed", "data", "results")  # of a run's keys


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_intermixed_args(arguments)
    _observe(options.what, options.overrides, options.config_dir)


def _observe(what: str, words: Sequence[str], config_dirs: Sequence[Path]) -> None:
    if what not in OBSERVATIONS:
        raise SettingsError(f"There is no observation {what!r}{suggestion(what, OBSERVATIONS)}")
    observation, others = _observation(what, words)
    _refuse_unread(what, others)
    _, task, model, settings = built(composed(others, config_dirs))
    from harness.attention_statistics.record import observe, place, write

    task.require(settings.data.folder())
    result = observe(what, observation, task, model, settings)
    folder = place(Path(settings.results.root), result)
    write(folder, observation, result)
    say(f"{observation.title}: {result['model']['name']}, {result['prompt']['tokens']} tokens\n")
    say(text_table(_columns(observation.columns, result["layers"])))
    say(f"\nFigures and picture: {folder}")


def _observation(what: str, words: Sequence[str]) -> tuple[Any, list[str]]:
    """The observation with the options among `words`, and the other words."""
    module, _, name = OBSERVATIONS[what].rpartition(".")
    known = {field.name for field in fields(getattr(import_module(module), name))}
    own = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words) if key in known}
    others = [word for word in words if word.partition("=")[0] not in known]
    return build({TARGET: OBSERVATIONS[what], **own}, what), others


def _refuse_unread(what: str, words: Sequence[str]) -> None:
    for word in words:
        key = word.lstrip("+").partition("=")[0].partition(".")[0]
        if key == "method" or (key in known_settings() and key not in READ):
            raise SettingsError(f"{word} changes nothing for {what}: no method runs. It reads {', '.join(READ)}.")


def _columns(shown: Mapping[str, str], layers: Sequence[Mapping[str, Any]]) -> list[Column]:
    figures = [
        Column(label.replace(", ", "\n"), "", [_cell(one[key]) for one in layers]) for key, label in shown.items()
    ]
    return [Column("layer", "", [str(index) for index in range(len(layers))]), *figures]


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.observe", description=__doc__)
    parser.add_argument("what", metavar="WHAT", help=", ".join(OBSERVATIONS))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="task, model, ... and the observation's own")
    parser.add_argument("--config-dir", "-cd", type=typed, action="append", default=[], help="more yaml files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
