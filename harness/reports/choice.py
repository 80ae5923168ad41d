"""Chooses what a table or a figure of a paper shows: which runs, in which order, under which names.
A yaml file holds the choice, so that the tables and figures of a paper show the same rows. The
file's sections `table` and `figure` hold what is only about one of the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar, get_type_hints

from harness.config.catalogue import CONF, ConfigError, Flat, bracketed, entries, flatten, load
from harness.config.plugins import fits, suggestion, wrong_type
from harness.config.settings import recorded_defaults
from harness.reports.compare import Comparison, ReportRow, asked
from harness.reports.labels import among_namesakes, budget, label_words, name
from harness.results.compared import FULL
from harness.results.identity import model_name
from harness.results.records import StoreError
from harness.results.run_folder import given
from harness.results.summary import ONE_TABLE, method_of

LAYOUTS = Path(__file__).parent / "layouts"  # that imitate the tables of papers

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Say what is shown. An empty list means all that was run.

    A method is named by its preset or its label in a report, with or without a budget (`snapkv`,
    `snapkv kernel=15`, `snapkv 20%`), a task and a model as on the command line or as in a report.
    """

    like: str | None = None  # a layout, over which this choice lies
    methods: Sequence[str] = ()
    budgets: Sequence[float | int | str] = ()
    tasks: Sequence[str] = ()
    models: Sequence[str] = ()
    # what is printed in place of a method, budget, task, group, model or measure
    names: dict[str, str] = field(default_factory=dict)
    table: dict[str, Any] = field(default_factory=dict)
    figure: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any]) -> Self:
        """Return the choice in a yaml file, or in the layout of that name, or with these keys."""
        known = {file.stem: file for file in LAYOUTS.glob("*.yaml")}
        where, values = "choice", source
        if not isinstance(source, Mapping):
            file = Path(source)
            if not file.is_file() and str(source) not in known:
                kind = "a folder" if file.is_dir() else "no file"
                raise ConfigError(
                    f"{source} is {kind}: name a yaml file, or a layout: {', '.join(sorted(known))}"
                )
            where, values = str(source), load(file if file.is_file() else known[str(source)]) or {}
        own = checked(cls, values, where)
        # yaml reads the name of a group, as 4096, as a number
        own = replace(own, names={str(word): str(text) for word, text in own.names.items()})
        if own.like is None:
            return own
        if own.like not in known:
            raise ConfigError(
                f"{where}: like: {own.like} is no layout{suggestion(own.like, known)}"
            )
        base = cls.read(own.like)
        given = {key: getattr(own, key) or getattr(base, key) for key in vars(own)}
        both = {key: getattr(base, key) | getattr(own, key) for key in ("names", "table", "figure")}
        return cls(**given | both)


def checked(section: type[Section], values: Any, where: str) -> Section:
    """Return the dataclass that holds these values of a yaml file. Raise `ConfigError` for a key
    that it does not have, or a value of another type. `where`: the file, and the section in it."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} holds no keys with values: write methods: [full, snapkv]")
    known = {one.name: get_type_hints(section)[one.name] for one in fields(section)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{where}: there is no key {key}{suggestion(str(key), known)}")
        if not fits(value, known[key]):
            said = wrong_type(key, value, known[key]).replace(f"{key}=", f"{key}: ")
            raise ConfigError(f"{where}: {said}")
    return section(**values)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A run that is shown, with the names that are printed for it: those of model, task and method
    and the budget together name one run."""

    model: str
    task: str
    method: str
    budget: str
    row: ReportRow
    table: Comparison
    # among the chosen models, tasks, methods and budgets: the first ones are 0
    places: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def is_full(self) -> bool:
        return method_of(self.row.run) == FULL


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A run that may be shown, and the words by which a choice may name its model, its task and its
    method, the most exact first."""

    shown: Chosen
    called: Mapping[str, Sequence[str]]

    def place(self, kind: str, wanted: Sequence[str]) -> int | None:
        """Return the place of the first of its names that is wanted; None if none is. If all are
        wanted (an empty list), all have the same place."""
        words = [word for word in self.called[kind] if word in wanted]
        return wanted.index(words[0]) if words else None if wanted else 0


def choose(
    tables: Sequence[Comparison], choice: Choice, config_dirs: Sequence[Path] = ()
) -> list[Chosen]:
    """Return the chosen runs by model, task, method and budget, each in the order of the choice, or
    else in that of the alphabet with Full first. Raise `StoreError` for a name or a budget that no
    run has. `config_dirs`: where yaml files of the user's own say how a method or a task is
    called."""
    candidates = _candidates(tables, choice.names, config_dirs)
    wanted = {kind: list(getattr(choice, kind)) for kind in ("models", "tasks", "methods")}
    for kind, words in wanted.items():
        known = {word for one in candidates for word in one.called[kind]}
        if unknown := [word for word in words if word not in known]:
            end = suggestion(unknown[0], sorted(known))
            raise StoreError(f"{kind}: {unknown[0]} is in no run{end}")
    sizes = list(choice.budgets)
    rows = sorted((one.shown.row for one in candidates), key=lambda row: asked(row.summary))
    for size in sizes:
        if not any(_is_of(row, size) for row in rows):
            there = list(dict.fromkeys(filter(None, (budget(row.summary) for row in rows))))
            raise StoreError(f"budgets: {size} is in no run; there is {', '.join(there) or 'none'}")
    placed = []
    for one in candidates:
        row = one.shown.row
        at = tuple(place for place, size in enumerate(sizes) if _is_of(row, size))
        places = [one.place(kind, words) for kind, words in wanted.items()]
        if None in places or (sizes and one.shown.budget and not at):
            continue
        # what is printed tells labels of one name apart
        names = [(one.called[kind][-1], getattr(one.shown, kind[:-1])) for kind in wanted]
        usual = [(words[0] != FULL, words) for words in names]
        sized = (at, asked(row.summary), one.shown.budget)
        placed.append(((*zip(places, usual, strict=True), sized), one.shown))
    if not placed:
        raise StoreError(
            "no run has one of these models, tasks, methods and budgets at once: leave one list out"
        )
    rising = [sorted(set(keys)) for keys in zip(*(keys for keys, _ in placed), strict=True)]
    found = []
    for keys, shown in placed:
        model, task, method, its_size = map(list.index, rising, keys)
        found.append(replace(shown, places=(model, task, method, its_size)))
    return sorted(found, key=lambda shown: shown.places)


def _is_of(row: ReportRow, size: float | int | str) -> bool:
    """Return True if the row's budget is `size`, as it was typed or as a report shows it. The share
    1.0 is not the token 1."""
    typed = row.run.config.get("budget")
    return (type(typed) is type(size) and typed == size) or budget(row.summary) == size


def _candidates(
    tables: Sequence[Comparison], names: Mapping[str, str], config_dirs: Sequence[Path]
) -> list[_Candidate]:
    """Return all runs with the names that are printed for them."""
    firsts = [table.entries[0].run for table in tables]
    full_names = [model_name(run.config) for run in firsts]
    shorts = [full.rstrip("/").rpartition("/")[2] for full in full_names]
    usual = recorded_defaults()
    settings = [{key: run.config.get(key, usual.get(key)) for key in ONE_TABLE} for run in firsts]
    # other weights or another adapter in one folder are another model
    revisions = [{"revision": given(run)["model_revision"]} for run in firsts]
    models = _labels(shorts, [[_of_model(own.pop("model")) for own in settings], revisions])
    tasks = _labels(
        [name(run, "task") for run in firsts],
        [list(map(flatten, settings)), list(map(given, firsts))],
        [" ".join(words) for words in models],
    )
    presets = [name(run, "model") for run in firsts]
    adapters = [short.rpartition(" with ")[2] for short in shorts]
    of_models = list(zip(full_names, presets, shorts, adapters, strict=True))
    printed_models = _printed(models, of_models, names)
    printed_tasks = _printed(tasks, [words[:1] for words in tasks], names, "task", config_dirs)
    rows = [(number, row) for number, table in enumerate(tables) for row in table.entries]
    methods = label_words([row.run for _, row in rows], [str(number) for number, _ in rows])
    printed = _printed(methods, [words[:1] for words in methods], names, "method", config_dirs)
    sizes = [(budget(row.summary), str(row.run.config.get("budget"))) for _, row in rows]
    alike = Counter(size for size, _ in set(sizes))
    found = []
    for (number, row), words, method, (size, typed) in zip(
        rows, methods, printed, sizes, strict=True
    ):
        label = " ".join(words)
        with_size = [f"{word} {size}" for word in (label, words[0]) if size]
        called = {
            "models": [" ".join(models[number]), *of_models[number]],
            "tasks": [" ".join(tasks[number]), tasks[number][0]],
            "methods": [*with_size, label, words[0]],
        }
        model, task = printed_models[number], printed_tasks[number]
        # 1536MiB and 1540MiB are both 1.50 GiB
        told_apart = typed if alike[size] > 1 else size
        printed_size = names.get(told_apart, told_apart)
        shown = Chosen(model, task, method, printed_size, row, tables[number])
        found.append(_Candidate(shown, called))
    return found


def _of_model(model: Any) -> Flat:
    """Return the settings of a model. model.rope stays one value, so that a rotation differs from
    none."""
    if not isinstance(model, Mapping):
        return {"model": model}
    return {f"model.{key}": value for key, value in model.items()}


def _labels(
    names: Sequence[str], settings: Sequence[Sequence[Flat]], tables: Sequence[str] | None = None
) -> list[list[str]]:
    """Return the words of a label for each name: the name itself, and the settings by which runs of
    that name in one table differ. `settings` holds several sets of settings; a set adds words only
    where labels are still the same."""
    labels = [[name] for name in names]
    for known in settings:
        together = [" ".join(words) for words in labels]
        more = among_namesakes(together, known, tables or [""] * len(names))
        labels = [[*words, *others] for words, others in zip(labels, more, strict=True)]
    return labels


def _printed(
    labels: Sequence[Sequence[str]],
    called: Sequence[Sequence[str]],
    names: Mapping[str, str],
    kind: str = "",
    config_dirs: Sequence[Path] = (),
) -> list[str]:
    """Return the name to print for each label, which is given as its words. It is the name that
    `names` has for the label, or else for its first word or for another by which it is `called`, or
    else the proper name of the yaml file of this `kind`; what sets the label apart follows in
    brackets. Different labels never have the same name."""
    known = entries(kind, (CONF, *config_dirs)) if kind else {}
    texts = {}
    for words, others in zip(labels, called, strict=True):
        label = " ".join(words)
        proper, changed = known[words[0]].called() if words[0] in known else (words[0], [])
        if own := next((names[word] for word in others if word in names), None):
            proper, changed = own, []
        texts[label] = names.get(label) or bracketed(proper, [*changed, *words[1:]])
    twice = Counter(texts.values())
    alone = {label: f"{text} [{label}]" for label, text in texts.items() if twice[text] > 1}
    return [(texts | alone)[" ".join(words)] for words in labels]
