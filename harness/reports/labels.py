"""What a run is called among others: by the preset the user typed, and by the settings in which it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from os.path import commonpath, relpath
from typing import Any

from harness.config.catalogue import Flat, entries, flatten
from harness.config.plugins import TARGET
from harness.config.settings import WITHOUT_EFFECT, recorded_defaults
from harness.results.compared import given
from harness.results.identity import model_name
from harness.results.run_folder import StoredRun
from harness.terminal.tables import BYTES, with_unit

NOT_NAMED = ("budget", "budget_bytes", "warmup", *WITHOUT_EFFECT)  # no part of a label
SAID_BY_TABLE = ("dtype", "device", "threads", "placement", "shared_prefill")  # in a line above it, a column, a stamp
# where they are no default: such rows mean something else by a token, or read another
ALWAYS_NAMED = ("budget_rule", "codec")
# what a run on a GPU writes of these where its method has no use for them (harness/jobs/resolve.py)
UNUSED: Flat = {"prefill_chunk": None, "overlap": "auto"}
WHOLE = ("store.", "overflow.")  # keys that their last word does not explain: store.disk, overflow.by
LONGEST = 40  # characters of a value; a longer one, such as a template, is named by its hash


def name(run: StoredRun, kind: str) -> str:
    """Return the preset as typed (`method=snapkv_kernel15`), else the plug-in's module."""
    return str((run.info.get("presets") or {}).get(kind) or run.info.get(kind))


def titles(runs: Sequence[StoredRun], keys: Sequence[str]) -> list[str]:
    """Return one title per table, each given by one of its runs: task, model, protocol, and where two tables share
    these, what tells them apart among the settings `keys`, or else in what their runs were given."""
    names = [f"{name(run, 'task')}, {model_name(run.config)}, protocol={run.config.get('protocol')}" for run in runs]
    settings = [flatten({key: run.config.get(key) for key in keys}) for run in runs]
    for known in (settings, [given(run) for run in runs]):
        names = [" ".join([title, *more]) for title, more in zip(names, _among_namesakes(names, known), strict=True)]
    return names


def labels(runs: Sequence[StoredRun]) -> list[str]:
    """Return one label for each row, without its budget: the method's name; where others share it, every setting in
    which they differ; parameters that are not the preset's; and settings that are not the default, where the table's
    rows differ in them. No two rows share both label and budget."""
    names = [name(run, "method") for run in runs]
    settings = [_settings(run) for run in runs]
    parts = zip(_among_namesakes(names, settings), map(_changed, runs, settings), _unusual(runs, settings), strict=True)
    full = [" ".join(dict.fromkeys([name, *chain(*words)])) for name, words in zip(names, parts, strict=True)]
    rows = [
        (label, str(run.config.get("budget_bytes") or run.config.get("budget")))
        for label, run in zip(full, runs, strict=True)
    ]
    return [
        label + (f" {_mark(run, runs)}" if rows.count(row) > 1 else "")
        for label, row, run in zip(full, rows, runs, strict=True)
    ]


def _settings(run: StoredRun) -> Flat:
    """Return the settings that a label may name; those of the store only where a run has one."""
    flat = flatten({key: value for key, value in run.config.items() if key not in NOT_NAMED})
    has_store = run.config.get("history") == "store"
    return {k: v for k, v in flat.items() if k not in NOT_NAMED and (has_store or not k.startswith("store."))}


def _mark(run: StoredRun, runs: Sequence[StoredRun]) -> str:
    """Return a mark for a run that no setting tells from another: its hash, and its folder where it is there twice."""
    mark = f"#{run.folder.name.rpartition('-')[2][:4]}"
    if sum(other.folder.name == run.folder.name for other in runs) == 1:
        return mark
    places = [other.folder.resolve().parent for other in runs]
    return f"{mark} {relpath(run.folder.resolve().parent, commonpath(places))}"


def budget(summary: Mapping[str, Any]) -> str:
    """Write the budget as it was asked for: tokens, bytes, or a share in percent; empty where the method has none."""
    asked = summary["budget"]
    if asked.get("bytes"):
        return with_unit(asked["bytes"], BYTES)
    if asked["layers"]:
        return "by layer"
    return f"{100 * asked['asked']:g}%" if isinstance(asked["asked"], float) else str(asked["asked"] or "")


def _among_namesakes(names: Sequence[str], settings: Sequence[Flat]) -> Iterator[list[str]]:
    """Yield, for each row, `key=value` of the settings in which rows of the same name differ."""
    for name, mine in zip(names, settings, strict=True):
        rivals = [theirs for other, theirs in zip(names, settings, strict=True) if other == name]
        yield spelled_out(mine, _differing(rivals))


def _changed(run: StoredRun, settings: Flat) -> list[str]:
    """Return `key=value` of the method's parameters that are not those of the preset it was typed as."""
    typed = (run.info.get("presets") or {}).get("method")
    preset = next((entry for entry in entries("method") if entry.name == typed), None)
    if preset is None:
        return []
    nested = {key: None for key in settings if key.startswith("method.") and key.count(".") > 1}  # a press in a press
    usual = nested | flatten(preset.values(), "method.")
    return spelled_out(settings, [key for key, value in usual.items() if str(settings.get(key, value)) != str(value)])


def _unusual(runs: Sequence[StoredRun], settings: Sequence[Flat]) -> Iterator[list[str]]:
    """Yield, for each row, `key=value` of the run's settings that rows do not share and that are no default on the
    run's device. A row whose method has no use for a setting tells nothing of it, so that the others do not name it.

    What every table says by itself (harness/reports/conditions.py) is left out.
    """
    usual, own = [], []
    for run, mine in zip(runs, settings, strict=True):
        device = str(run.config.get("device"))
        defaults = flatten(recorded_defaults(device)) | ({"overlap": "on"} if device.startswith("cuda") else {})
        usual.append({key: value for key, value in defaults.items() if key not in SAID_BY_TABLE})
        own.append(
            {
                key: mine.get(key, value)  # older runs lack some
                for key, value in usual[-1].items()
                if (key in mine or not key.startswith("store."))
                and not (key in UNUSED and key in mine and mine[key] == UNUSED[key] != value)
            }
        )
    differing = [*_differing(own), *ALWAYS_NAMED]
    for mine, values, defaults in zip(settings, own, usual, strict=True):
        yield spelled_out(mine, [key for key in differing if values.get(key, defaults[key]) != defaults[key]])


def _differing(settings: Sequence[Flat]) -> list[str]:
    """Return the keys in which these differ; a run older than a setting says nothing of it."""
    keys = dict.fromkeys(key for own in settings for key in own)
    return [key for key in keys if len({str(own[key]) for own in settings if key in own}) > 1]


def spelled_out(mine: Flat, keys: Sequence[str]) -> list[str]:
    """Return `key=value` of each key. Null is nothing that anybody asked for: the others' values tell."""
    return [_assigned(key, mine) for key in keys if mine.get(key) is not None]


def _assigned(key: str, settings: Flat) -> str:
    """Write a setting by the last word of its key, where no other key that is set ends in it."""
    value, last = settings[key], key.rpartition(".")[2]
    if last == TARGET:
        return str(value).rpartition(".")[2]
    rivals = [other for other, known in settings.items() if other.rpartition(".")[2] == last and known is not None]
    return f"{last if len(rivals) == 1 and not key.startswith(WHOLE) else key}={spelled(value)}"


def spelled(value: Any) -> str:
    """Write a value as on the command line, a long one by its hash."""
    text = str(value).lower() if isinstance(value, bool) else str(value).replace(", ", ",")
    return text if len(text) <= LONGEST else f"#{hashlib.sha256(text.encode()).hexdigest()[:6]}"
