"""`python -m harness.observe key_spectrum model=smollm2 task.lengths=[2048]`: what a model's keys and attention show.

No method runs: the task's first prompt goes through the model once, and every layer's keys and queries are looked at.
The figures go to results.root/observations/ as result.json, plot.png and plot.pdf.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import yaml

from harness.config.compose import built, composed
from harness.config.entry import OBSERVE
from harness.config.errors import as_command
from harness.config.plugins import TARGET, build, suggestion
from harness.config.settings import ENTRIES, KEYS, SettingsError
from harness.terminal.arguments import Parser
from harness.terminal.notices import say
from harness.terminal.tables import Column, text_table

OBSERVATIONS = {
    "key_spectrum": "harness.attention_statistics.observations.KeySpectrum",
    "chunk_cosines": "harness.attention_statistics.observations.ChunkCosines",
    "attention_mass": "harness.attention_statistics.observations.AttentionMass",
    "heavy_hitters": "harness.attention_statistics.observations.HeavyHitters",
}
_SETTINGS = [key for key, entry in ENTRIES.items() if OBSERVE in entry.read_by]
READ = ("experiment", "task", "model", *_SETTINGS)  # the keys of a run that are read here


@as_command()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser("observe", __doc__)
    parser.add_argument("what", metavar="WHAT", help=", ".join(OBSERVATIONS))
    parser.overrides("task, model, ... and the observation's own")
    parser.config_dirs()
    given = parser.parse_intermixed_args(arguments)
    what, words = given.what, given.overrides
    if what not in OBSERVATIONS:
        raise SettingsError(f"There is no observation {what!r}{suggestion(what, OBSERVATIONS)}")
    module, _, name = OBSERVATIONS[what].rpartition(".")
    own = {field.name for field in fields(getattr(import_module(module), name))}
    options = {
        key: yaml.safe_load(value)
        for key, _, value in (word.partition("=") for word in words)
        if key in own
    }
    observation = build({TARGET: OBSERVATIONS[what], **options}, what)
    others = [word for word in words if word.partition("=")[0] not in own]
    for word in others:
        key = word.lstrip("+").partition("=")[0].partition(".")[0]
        if key == "method" or (key in KEYS and key not in READ):
            raise SettingsError(
                f"{word} changes nothing for {what}: no method runs. It reads {', '.join(READ)}."
            )
    _, task, model, settings = built(composed(others, given.config_dir))
    from harness.attention_statistics.record import observe, place, write

    task.require(settings.data.folder())
    result = observe(what, observation, task, model, settings)
    folder = place(Path(settings.results.root), result)
    write(folder, observation, result)
    say(f"{observation.title}: {result['model']['name']}, {result['prompt']['tokens']} tokens\n")
    columns = [Column("layer", "", [str(index) for index in range(len(result["layers"]))])]
    for key, label in observation.columns.items():
        values = [layer[key] for layer in result["layers"]]
        cells = [str(value) if isinstance(value, int) else f"{value:.3f}" for value in values]
        columns.append(Column(label.replace(", ", "\n"), "", cells))
    say(text_table(columns))
    say(f"\nFigures and picture: {folder}")


if __name__ == "__main__":
    sys.exit(main())
