"""Names runs in a report: by the preset that the user typed and the settings in which they
differ."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from os.path import commonpath, relpath
from typing import Any

from harness.config.catalogue import Flat, entries, flatten, plain
from harness.config.plugins import TARGET
from harness.config.settings import ENTRIES, NEUTRAL, recorded_defaults
from harness.results.identity import model_name
from harness.results.run_folder import StoredRun, given
from harness.terminal.tables import BYTES, with_unit

NOT_NAMED = [
    key for key, entry in ENTRIES.items() if entry.named == "never" or not entry.identifies
]
# if no namesake differs
SAID_BY_TABLE = [key for key, entry in ENTRIES.items() if entry.named == "among_namesakes"]
ALWAYS_NAMED = [key for key, entry in ENTRIES.items() if entry.named == "always"]
COUNTS_ANSWER = "prompt and answer"  # in a summary, of a budget that is all rows of a KV head
# keys that their last word does not explain: store.disk, overflow.by
WHOLE = ("store.", "overflow.")
LONGEST = 40  # characters of a value; a longer one, such as a template, is named by its hash


def name(run: StoredRun, kind: str) -> str:
    """Return the method, task or model (`kind`) of a run as the user typed it, else the plug-in's
    module."""
    return str((run.info.get("presets") or {}).get(kind) or run.info.get(kind))


def titles(runs: Sequence[StoredRun], keys: Sequence[str]) -> list[str]:
    """Return a title for each table; `runs` holds one run of each. A title has task, model and
    protocol, and says if the model thinks or is rotated by model.rope. If two tables share these,
    it also has the settings among `keys` in which they differ, or else what their runs were given
    (prompts, answers, revision of the model)."""
    names = [f"{name(run, 'task')}, {model_name(run.config)}{_read_as(run)}" for run in runs]
    usual = recorded_defaults()
    settings = [flatten({key: run.config.get(key, usual.get(key)) for key in keys}) for run in runs]
    for known in (settings, [given(run) for run in runs]):
        more = among_namesakes(names, known, [""] * len(runs))
        names = [" ".join([title, *words]) for title, words in zip(names, more, strict=True)]
    return names


def _read_as(run: StoredRun) -> str:
    """Return the words of a title on the protocol, on thoughts and on another rotation."""
    model, thinking = run.config.get("model"), run.config.get("thinking", "off")
    rope = model.get("rope") if isinstance(model, Mapping) else None
    words = f" thinking={thinking}" * (thinking != "off") + (
        f" model.rope={spelled(rope)}" if rope else ""
    )
    return f", protocol={run.config.get('protocol')}{words}"


def labels(runs: Sequence[StoredRun]) -> list[str]:
    """Return a label for each row of a table, without its budget: the method's name, the settings
    in which rows of that name differ, parameters that are not the preset's, and settings of the run
    that are not at their defaults and differ among the rows. No two rows have the same label and
    budget."""
    return [" ".join(words) for words in label_words(runs, [""] * len(runs))]


def label_words(runs: Sequence[StoredRun], tables: Sequence[str]) -> list[list[str]]:
    """Return the words of a label for each row of several tables, the method's name first. A method
    has the same label in all tables, so settings in which only tables differ are not named.
    `tables`: the table that each run stands in."""
    names = [name(run, "method") for run in runs]
    settings = [_settings(run) for run in runs]
    parts = zip(
        among_namesakes(names, settings, tables),
        _changed(runs, settings),
        _unusual(runs, settings, tables),
        strict=True,
    )
    labels = [
        list(dict.fromkeys([name, *chain(*words)]))
        for name, words in zip(names, parts, strict=True)
    ]
    rows = [
        (table, " ".join(words), str(run.config.get("budget")))
        for table, words, run in zip(tables, labels, runs, strict=True)
    ]
    alike, marks = Counter(rows), _marks(runs)
    return [
        [*words, *[mark] * (alike[row] > 1)]
        for words, row, mark in zip(labels, rows, marks, strict=True)
    ]


def _settings(run: StoredRun) -> Flat:
    """Return the settings that a label may name; those of the store only for a run with a store."""
    without_use = () if run.config.get("history") == "store" else "store."
    flat = flatten({key: value for key, value in run.config.items() if key not in NOT_NAMED})
    return {
        key: value
        for key, value in flat.items()
        if key not in NOT_NAMED and not key.startswith(without_use)
    }


def _marks(runs: Sequence[StoredRun]) -> list[str]:
    """Return a mark for each run by which to tell it from runs with the same settings: the start of
    its hash, and its folder if that hash occurs twice."""
    twins = Counter(run.folder.name for run in runs)
    places = [run.folder.resolve().parent for run in runs]
    top = commonpath(places)
    return [
        f"#{run.folder.name.rpartition('-')[2][:4]}"
        + f" {relpath(place, top)}" * (twins[run.folder.name] > 1)
        for run, place in zip(runs, places, strict=True)
    ]


def budget(summary: Mapping[str, Any]) -> str:
    """Return the budget as text, as it was asked for: tokens, bytes, or percent, with "in all" if it
    counts the answer too, behind the rows of a buffer on top ("+128"); empty without a budget."""
    asked = summary["budget"]
    if asked.get("bytes"):
        return with_unit(asked["bytes"], BYTES)
    buffer = f"+{asked['extra_rows']}" if asked.get("extra_rows") else ""
    size = asked["asked"]
    in_all = f"{buffer} in all" if size and asked.get("counts") == COUNTS_ANSWER else ""
    return (f"{100 * size:g}%" if isinstance(size, float) else str(size or "")) + in_all


def among_namesakes(
    names: Sequence[str], settings: Sequence[Flat], tables: Sequence[str]
) -> Iterator[list[str]]:
    """Yield, for each row, `key=value` of the settings in which rows of its name differ within a
    table."""
    rivals: dict[str, tuple[list[Flat], list[str]]] = defaultdict(lambda: ([], []))
    for name, mine, table in zip(names, settings, tables, strict=True):
        some, places = rivals[name]
        some.append(mine)
        places.append(table)
    differing = {name: _differing(*some) for name, some in rivals.items()}
    yield from (
        spelled_out(mine, differing[name]) for name, mine in zip(names, settings, strict=True)
    )


def _changed(runs: Sequence[StoredRun], settings: Sequence[Flat]) -> Iterator[list[str]]:
    """Yield, for each row, `key=value` of the method's parameters that differ from the preset that
    was typed."""
    typed = [str((run.info.get("presets") or {}).get("method")) for run in runs]
    known = entries("method")
    for name, mine in zip(typed, settings, strict=True):
        usual: Flat = {}
        if name in known:
            usual = {
                key: None for key in mine if key.startswith("method.") and key.count(".") > 1
            }  # a press in a press
            usual |= flatten(known[name].values(), "method.")
        changed = [key for key, value in usual.items() if str(mine.get(key, value)) != str(value)]
        yield spelled_out(mine, changed)


def _unusual(
    runs: Sequence[StoredRun], settings: Sequence[Flat], tables: Sequence[str]
) -> Iterator[list[str]]:
    """Yield, for each row, `key=value` of the run's settings that are not at the default of its
    device, if the rows of a table differ in them. A setting for which a row's method has no use
    is ignored there.

    What stands above every table anyway (harness/reports/conditions.py) is left out.
    """
    usual, own = [_defaults(str(run.config.get("device"))) for run in runs], []
    for mine, known in zip(settings, usual, strict=True):
        own.append(
            {
                key: mine.get(key, value)  # older runs lack some
                for key, value in known.items()
                if (key in mine or not key.startswith("store."))
                # of no use to the method
                and not (key in mine and mine[key] == NEUTRAL[key] != value)
            }
        )
    differing = [*_differing(own, tables), *ALWAYS_NAMED]
    for mine, values, known in zip(settings, own, usual, strict=True):
        unusual = [key for key in differing if values.get(key, known[key]) != known[key]]
        yield spelled_out(mine, unusual)


def _defaults(device: str) -> Flat:
    """Return the settings of a run on `device` that may be named with a row, at their defaults."""
    known = flatten(recorded_defaults(device))
    known |= {"overlap": "off"} if device.startswith("cuda") else {}
    return {key: value for key, value in known.items() if key not in SAID_BY_TABLE}


def _differing(settings: Sequence[Flat], tables: Sequence[str]) -> list[str]:
    """Return the keys in which these settings differ within a table. A run that is older than a key
    does not count."""
    values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for own, table in zip(settings, tables, strict=True):
        for key, value in own.items():
            values[key][table].add(str(value))
    return [key for key, by_table in values.items() if any(len(v) > 1 for v in by_table.values())]


def spelled_out(mine: Flat, keys: Sequence[str]) -> list[str]:
    """Return each of these settings whose value is not None as `word=value`, where `word` is the last part of its key
    if no other key that is set ends in it."""
    lasts = Counter(key.rpartition(".")[2] for key, value in mine.items() if value is not None)
    words = []
    for key in keys:
        if (value := mine.get(key)) is None:
            continue
        last = key.rpartition(".")[2]
        word = last if lasts[last] == 1 and not key.startswith(WHOLE) else key
        words.append(
            str(value).rpartition(".")[2] if last == TARGET else f"{word}={spelled(value)}"
        )
    return words


def spelled(value: Any) -> str:
    """Return a value as on the command line; a long one is replaced by a hash."""
    words = plain(value) if isinstance(value, bool | Mapping) else str(value)
    text = words.replace(", ", ",")
    return text if len(text) <= LONGEST else f"#{hashlib.sha256(text.encode()).hexdigest()[:6]}"
