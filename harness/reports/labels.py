"""What a run is called beside others: by the preset the user typed, and by the settings in which it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
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
# what a run on a GPU writes of these where its method has no use for them (harness/jobs/planning/effective.py)
UNUSED: Flat = {"prefill_chunk": None, "overlap": "auto"}
WHOLE = ("store.", "overflow.")  # keys that their last word does not explain: store.disk, overflow.by
LONGEST = 40  # characters of a value; a longer one, such as a template, is named by its hash


def name(run: StoredRun, kind: str) -> str:
    """The preset as typed (`method=snapkv_kernel15`), else the plug-in's module."""
    return str((run.info.get("presets") or {}).get(kind) or run.info.get(kind))


def titles(runs: Sequence[StoredRun], keys: Sequence[str]) -> list[str]:
    """Return one title per table, each given by one of its runs: task, model, protocol, and where two tables share
    these, what tells them apart among the settings `keys`, or else in what their runs were given."""
    found = [f"{name(run, 'task')}, {model_name(run.config)}, protocol={run.config.get('protocol')}" for run in runs]
    settings = [flatten({key: run.config.get(key) for key in keys}) for run in runs]
    for told in (settings, [given(run) for run in runs]):
        found = [" ".join([title, *more]) for title, more in zip(found, _among_namesakes(found, told), strict=True)]
    return found


def labels(runs: Sequence[StoredRun]) -> list[str]:
    """Return one label for each row, without its budget: the method's name; where others share it, every setting in
    which they differ; parameters that are not the preset's; and settings that are not the default, where the table's
    rows differ in them. No two rows share both label and budget."""
    names = [name(run, "method") for run in runs]
    settings = [_settings(run) for run in runs]
    told = zip(_among_namesakes(names, settings), map(_changed, runs, settings), _unusual(runs, settings), strict=True)
    full = [" ".join(dict.fromkeys([name, *chain(*parts)])) for name, parts in zip(names, told, strict=True)]
    seen = [(label, asked(run)) for label, run in zip(full, runs, strict=True)]
    twins = [seen.count(one) > 1 for one in seen]
    marks = [f" {_mark(run, runs)}" if twin else "" for twin, run in zip(twins, runs, strict=True)]
    return [label + mark for label, mark in zip(full, marks, strict=True)]


def _settings(run: StoredRun) -> Flat:
    """Return the settings that a label may name; those of the store only where a run has one."""
    flat = flatten({key: value for key, value in run.config.items() if key not in NOT_NAMED})
    has_store = run.config.get("history") == "store"
    return {key: value for key, value in flat.items() if key not in NOT_NAMED and (has_store or not _of_store(key))}


def _of_store(key: str) -> bool:
    return key.startswith("store.")


def _mark(run: StoredRun, runs: Sequence[StoredRun]) -> str:
    """Return a mark for a run that no setting tells from another: its hash, or its folder where it is the same run
    twice."""
    mark = f"#{run.folder.name.rpartition('-')[2][:4]}"
    if sum(other.folder.name == run.folder.name for other in runs) == 1:
        return mark
    places = [other.folder.resolve().parent for other in runs]
    return f"{mark} {relpath(run.folder.resolve().parent, commonpath(places))}"


def asked(run: StoredRun) -> str:
    """The budget of a run, word for word."""
    return str(run.config.get("layer_budgets") or run.config.get("budget_bytes") or run.config.get("budget"))


def budget(summary: Mapping[str, Any]) -> str:
    """Write the budget as it was asked for: tokens, bytes, or a share in percent; from least to most where layers
    differ; empty where the method has none."""
    layers, in_bytes = summary["budget"]["layers"], summary["budget"].get("bytes")
    if in_bytes:
        return with_unit(in_bytes, BYTES)
    if not layers:
        return _budget(summary["budget"]["asked"])
    if len({type(one) for one in layers}) > 1:
        return "by layer"
    ends = dict.fromkeys(_budget(end) for end in (min(layers), max(layers)))
    return f"{'-'.join(ends)} by layer"


def _budget(one: float | None) -> str:
    return f"{100 * one:g}%" if isinstance(one, float) else "" if one is None else str(one)


def _among_namesakes(names: Sequence[str], settings: Sequence[Flat]) -> Iterator[list[str]]:
    """Yield, for each row, `key=value` of the settings in which rows of the same name differ."""
    for name, mine in zip(names, settings, strict=True):
        rivals = [theirs for other, theirs in zip(names, settings, strict=True) if other == name]
        yield spelled_out(mine, _differing(rivals))


def _changed(run: StoredRun, settings: Flat) -> list[str]:
    """`key=value` of the method's parameters that are not those of the preset it was typed as."""
    typed = (run.info.get("presets") or {}).get("method")
    preset = next((entry for entry in entries("method") if entry.name == typed), None)
    if preset is None:
        return []
    usual = flatten(preset.values(), "method.")
    nested = tuple(f"method.{key}." for key, value in preset.values().items() if isinstance(value, Mapping))
    more = {key: None for key in settings if key.startswith(nested) and key not in usual} if nested else {}
    return spelled_out(
        settings, [key for key, value in (usual | more).items() if str(settings.get(key, value)) != str(value)]
    )


def _unusual(runs: Sequence[StoredRun], settings: Sequence[Flat]) -> Iterator[list[str]]:
    """Yield, for each row, `key=value` of the run's settings that rows do not share and that are no default on the
    run's device. A row whose method has no use for a setting tells nothing of it, so that the others do not name it.

    What every table says by itself (harness/reports/conditions.py) is left out.
    """
    usual = [_defaults(run) for run in runs]
    own = [  # older runs lack some
        {
            key: mine.get(key, value)
            for key, value in defaults.items()
            if (key in mine or not _of_store(key)) and not _unused(key, mine, value)
        }
        for mine, defaults in zip(settings, usual, strict=True)
    ]
    differing = [*_differing(own), *ALWAYS_NAMED]
    for mine, values, defaults in zip(settings, own, usual, strict=True):
        yield spelled_out(mine, [key for key in differing if values.get(key, defaults[key]) != defaults[key]])


def _defaults(run: StoredRun) -> Flat:
    """The settings of a run on that device that nobody set, where its method has a use for them."""
    device = str(run.config.get("device"))
    usual = flatten(recorded_defaults(device)) | ({"overlap": "on"} if device.startswith("cuda") else {})
    return {key: value for key, value in usual.items() if key not in SAID_BY_TABLE}


def _unused(key: str, mine: Flat, usual: Any) -> bool:
    """Return whether a run noted that its method has no use for a setting."""
    return key in UNUSED and key in mine and mine[key] == UNUSED[key] != usual


def _differing(settings: Sequence[Flat]) -> list[str]:
    """Keys in which these differ; a run older than a setting says nothing of it."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({str(one[key]) for one in settings if key in one}) > 1]


def spelled_out(mine: Flat, keys: Sequence[str]) -> list[str]:
    """`key=value` of each. Null is nothing that anybody asked for: the others' values tell."""
    return [_told(key, mine) for key in keys if mine.get(key) is not None]


def _told(key: str, mine: Flat) -> str:
    if key.endswith(TARGET):
        return str(mine[key]).rpartition(".")[2]
    return f"{_short(key, mine)}={spelled(mine[key])}"


def _short(key: str, keys: Flat) -> str:
    """The last word of a dotted key, where no other key that is set ends in it."""
    if key.startswith(WHOLE):
        return key
    last = key.rpartition(".")[2]
    rivals = [other for other, value in keys.items() if other.rpartition(".")[2] == last and value is not None]
    return last if len(rivals) == 1 else key


def spelled(value: Any) -> str:
    """Write a value as on the command line, but short: [0.1,0.1,0.4] is [2x0.1,0.4], a long value is its hash, a long
    list its first entry, the number of others and the hash."""
    if isinstance(value, bool):
        return str(value).lower()
    first, text = "", str(value)
    if isinstance(value, list):
        runs = [(spelled(one), len(list(same))) for one, same in groupby(value)]
        told = [text if count == 1 else f"{count}x{text}" for text, count in runs]
        text = f"[{','.join(told)}]"
        if len(told) > 1 and len(told[0]) <= LONGEST // 2:
            first = f"[{told[0]},+{len(told) - 1}]"
    return text if len(text) <= LONGEST else f"{first}#{hashlib.sha256(text.encode()).hexdigest()[:6]}"
