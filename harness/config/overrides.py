"""Checks the words of a command line against conf/ before Hydra composes: each must set something that exists.

Hydra alone lets `+` add a key that nothing reads and `~` remove one. The last of two words for one key wins, as scripts
that end in "$@" expect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override

from harness.config.catalogue import CONF, GROUPS, REMOVED_KEYS, Entry, config_dirs, entries, load
from harness.config.experiments import GROUP, Experiment, experiments
from harness.config.plugins import suggestion
from harness.config.settings import SettingsError
from harness.config.words import SWEEP, VALUED, parse, refuse_flags

LAUNCHER = "hydra/launcher"
OF_HYDRA = ("hydra.verbose",)  # what of Hydra's own may be set
COUNTS = ("samples", "rounds", "conversations")  # how tasks name how many examples they have
Chosen = Mapping[str, Sequence[Entry]]  # by group, all that a sweep names
Partial = Mapping[str, frozenset[str]]  # parameters, by group, that only some of the chosen have
Known = Mapping[str, Mapping[str, Entry]]  # by group and name, all there are


@dataclass(frozen=True)
class Overrides:
    """`words` for Hydra, `launcher` those that are about its launcher; `jobs` of the sweep; `partial`: parameters, by
    group, that only some of the chosen have; `chosen`: the yaml files, by group; `experiment`: the one named."""

    words: list[str]
    jobs: int
    partial: Partial
    launcher: list[str]
    chosen: Chosen
    experiment: Experiment | None = None


def read(arguments: Sequence[str]) -> Overrides:
    """Check the words after `python -m harness`: flags may stand anywhere, Hydra gets them first."""
    flags = [place for place, word in enumerate(arguments) if word.startswith("-")]
    behind = [place + 1 for place in flags if arguments[place] in VALUED]
    first = sorted({*flags, *behind} & set(range(len(arguments))))
    refuse_flags(arguments, flags)
    overrides = [word for place, word in enumerate(arguments) if place not in first]
    found = checked(overrides, config_dirs(arguments), any(flag in arguments for flag in SWEEP))
    if found.experiment and "run" in found.experiment.facts:
        raise SettingsError(f"{GROUP}={found.experiment.name} is no run: use `{found.experiment.command}`.")
    return replace(found, words=[*(arguments[place] for place in first), *found.words])


def checked(overrides: Sequence[str], config_dirs: Sequence[Path] = (), sweep: bool = False) -> Overrides:
    """Check `overrides` in their order; raise `SettingsError` where one would set nothing."""
    parsed, launcher = _without_launcher(list(parse(overrides)), sweep)
    _refuse_folders(config_dirs)
    folders = (CONF, *config_dirs)
    groups = {group: {entry.name: entry for entry in entries(group, folders)} for group in GROUPS}
    experiment, typed = _experiment(parsed, folders)
    if not sweep:
        _refuse_sweeps(typed, experiment)
    files = list(_checked_files(experiment, groups)) if experiment else []
    grid = {key.lstrip("+"): key for key in experiment.grid} if experiment else {}
    said = [*files, *typed]
    _refuse_two_budgets(said, typed)
    chosen = {group: _chosen(group, said, known) for group, known in groups.items()}
    words = [_checked(override, chosen, groups, folders, grid) for override in typed]
    if experiment:
        words.append(f"+{GROUP}={experiment.name}")
        _refuse_partial_grid(experiment, chosen)
    swept = {(word.key_or_group, bool(_dicts(word))): _points(word, groups) for word in said}
    partial = {group: _partial(group, said, chosen) for group in GROUPS}
    return Overrides(words, prod(swept.values()), partial, launcher, chosen, experiment)


def _refuse_two_budgets(said: Sequence[Override], typed: Sequence[Override]) -> None:
    """Raise `SettingsError` where `budget` would be ignored beside `budget_bytes`, also at its default. `said`: the
    words of an experiment and those `typed`; the last of two for one key counts."""
    last = {override.key_or_group.lstrip("+"): override for override in said}
    pair = [last[key] for key in ("budget", "budget_bytes") if key in last]
    if len(pair) == 2 and all(set(_values(override, [])) != {""} for override in pair):
        way_out = "leave one of them out" if pair[0] in typed else "set budget=null as well"
        raise SettingsError(f"{pair[0].input_line} would be ignored beside {pair[1].input_line}: {way_out}.")


def _without_launcher(parsed: Sequence[Override], sweep: bool) -> tuple[list[Override], list[str]]:
    """Return the words without those that choose one of Hydra's launchers and set it up, and those; there are none
    where jobs run in this process."""
    mine = [word for word in parsed if word.key_or_group == LAUNCHER or word.key_or_group.startswith("hydra.launcher.")]
    names = [str(word.value()) for word in mine if word.key_or_group == LAUNCHER]
    if mine and (not names or names[-1] == "basic") and len(mine) > len(names):
        word = next(word.input_line for word in mine if word.key_or_group != LAUNCHER)
        raise SettingsError(f"{word} sets up a launcher: name it, as in {LAUNCHER}=joblib.")
    if names and not sweep:
        raise SettingsError(f"{LAUNCHER}={names[-1]} starts the workers of a sweep: add -m.")
    others = [word for word in parsed if word not in mine]
    return others, [] if names[-1:] == ["basic"] else [str(word.input_line) for word in mine]


def _refuse_folders(config_dirs: Sequence[Path]) -> None:
    for folder in config_dirs:
        if not folder.is_dir():
            raise SettingsError(
                f"--config-dir {folder} is not a folder: give the one that holds method/, task/ or model/."
            )
        if (folder / "config.yaml").is_file() and folder.resolve() != CONF:
            raise SettingsError(f"{folder / 'config.yaml'} would be ignored: move its settings to the command line.")


def _experiment(parsed: Sequence[Override], folders: Sequence[Path]) -> tuple[Experiment | None, list[Override]]:
    """Return the experiment that is asked for, the last if there are several words, and all other words."""
    asked = [override for override in parsed if override.key_or_group == GROUP]
    others = [override for override in parsed if override.key_or_group != GROUP]
    if not asked:
        return None, others
    name, known = asked[-1].value(), experiments(folders)
    if not isinstance(name, str):
        raise SettingsError(f"{asked[-1].input_line}: give one experiment per command, it may hold a grid of its own.")
    if name not in known:
        raise SettingsError(f"There is no {GROUP} {name!r}{suggestion(name, known)}")
    return known[name], others


def _checked_files(experiment: Experiment, groups: Known) -> Iterator[Override]:
    """Yield the words of its files. A parameter must be one of what its own file chose; where another choice was made
    later, it does not apply."""
    for base in experiment.bases:
        yield from _checked_files(base, groups)
    words = list(experiment.words())
    try:
        chosen = {group: _chosen(group, [word for _, word in words], known) for group, known in groups.items()}
        for file, word in words:
            if file == experiment.file:
                _require(word, chosen, groups)
    except SettingsError as error:
        raise SettingsError(f"{experiment.file}: {error}") from error
    yield from (word for file, word in words if file == experiment.file)


def _refuse_partial_grid(experiment: Experiment, chosen: Chosen) -> None:
    """Raise where a swept parameter that some of the chosen lack has no ++, which Hydra wants."""
    for key in experiment.grid:
        group, _, name = key.partition(".")
        if group in GROUPS and name and not all(name in entry.settable for entry in chosen[group]):
            raise SettingsError(f"{experiment.file}: not every {group} of its grid has {key}: write ++{key}.")


def _refuse_sweeps(typed: Sequence[Override], experiment: Experiment | None) -> None:
    for override in typed:
        if override.is_sweep_override():
            raise SettingsError(
                f"{override.input_line} names several values: add -m to run them one after the other (a list is "
                "written in brackets, as in dense_layers=[0,1])."
            )
    swept = {key.lstrip("+") for key in experiment.grid} if experiment else set()
    if open_keys := sorted(swept - {override.key_or_group for override in typed}):
        assert experiment is not None
        raise SettingsError(
            f"{GROUP}={experiment.name} is a grid over {', '.join(open_keys)}: add -m, or give one value of each."
        )


def _chosen(group: str, said: Sequence[Override], known: Mapping[str, Entry]) -> list[Entry]:
    asked = [override for override in said if override.key_or_group == group and not _dicts(override)]
    names = _values(asked[-1], list(known)) if asked else [_defaults()[group]]
    if not names:
        raise SettingsError(f"{asked[-1].input_line} names no {group}: there is {', '.join(sorted(known))}.")
    for name in names:
        if name not in known:
            raise SettingsError(f"There is no {group} {name!r}{_elsewhere(group, name, known)}")
    return [known[name] for name in names]


def _elsewhere(group: str, name: str, known: Mapping[str, Entry]) -> str:
    """Return the end of an error about a name that no yaml file has: the nearest name, or how to use what it may be."""
    if group == "model" and ("/" in name or Path(name).is_dir()):
        return f" among the presets; for a model of the hub or a local folder write model=hf model.name={name}."
    own = f"One of your own needs --config-dir=FOLDER, and its file FOLDER/{group}/{name}.yaml."
    return f"{suggestion(name, known)} {own}"


def _dicts(override: Override) -> list[dict[str, Any]]:
    """Return parameters that are set together, as in method={m:1,b:12},{m:2,b:6}."""
    chosen = override.is_choice_sweep() and not isinstance(override.value(), Glob)
    values = list(override.sweep_iterator()) if chosen else [override.value()]
    return [{str(key): value for key, value in item.items()} for item in values if isinstance(item, dict)]


def _values(override: Override, known: list[str]) -> list[str]:
    value: Any = override.value()
    if isinstance(value, Glob):
        return list(value.filter(known))
    if override.is_choice_sweep():
        return [str(item) for item in override.sweep_iterator()]
    return ["" if value is None else str(value)]


def _points(override: Override, groups: Known) -> int:
    """Return how many jobs one word stands for."""
    if not override.is_sweep_override():
        return 1
    value: Any = override.value()
    if isinstance(value, Glob):
        return len(value.filter(list(groups.get(override.key_or_group, ()))))
    if not override.is_discrete_sweep():
        raise SettingsError(f"{override.input_line} has no steps: name the values, as in {override.key_or_group}=A,B.")
    return len(list(override.sweep_iterator()))


def _checked(
    override: Override, chosen: Chosen, groups: Known, folders: Sequence[Path], grid: Mapping[str, str]
) -> str:
    """Return the override as Hydra takes it; parameters with `++`, for not every one of the chosen may have them.
    `grid`: how an experiment spells its swept keys, for Hydra knows two spellings as two keys."""
    key, line = override.key_or_group, str(override.input_line)
    if key.startswith("hydra.sweep."):
        raise SettingsError(f"{key} would set nothing: what launchers print lies in results.root/sweeps.")
    if override.is_hydra_override() or key.partition(".")[0] == "hydra":
        if key not in OF_HYDRA:
            raise SettingsError(f"{line} is Hydra's own and would change nothing of a run: leave it out.")
        return line
    if override.is_delete():
        raise SettingsError(f"{line} would remove a setting: set it instead, as in {key}=VALUE.")
    if key not in (*GROUPS, *settings()) and any((folder / key).is_dir() for folder in folders):
        return line  # a group of the user's own
    _require(override, chosen, groups)
    bare = line.lstrip("+")
    if key in grid:
        return f"{grid[key]}{bare.removeprefix(key)}"
    return f"++{bare}" if key.partition(".")[0] in GROUPS and ("." in key or _dicts(override)) else bare


def _require(override: Override, chosen: Chosen, groups: Known) -> None:
    """Raise where nothing reads what `override` sets."""
    key = override.key_or_group.lstrip("+")
    group, _, name = key.partition(".")
    if group in GROUPS:
        for parameter in [name.partition(".")[0]] if name else {key for one in _dicts(override) for key in one}:
            _require_parameter(group, parameter, chosen[group], groups[group])
        return
    if key in settings():
        return
    if key in REMOVED_KEYS:
        raise SettingsError(f"There is no setting {key} any more: {REMOVED_KEYS[key]}. See CHANGELOG.md.")
    owners = [f"{kind}.{key}" for kind in GROUPS if any(key in entry.settable for entry in groups[kind].values())]
    near = owners or get_close_matches(key, [*settings(), *GROUPS, GROUP], n=1, cutoff=0.5)
    end = f"did you mean {near[0]}?" if near else "`python -m harness --help` shows them all."
    raise SettingsError(f"There is no setting {key}; {end}")


def _require_parameter(group: str, name: str, chosen: Sequence[Entry], known: Mapping[str, Entry]) -> None:
    if any(name in entry.settable for entry in chosen):
        return
    if name in settings():
        raise SettingsError(f"{group} has no parameter {name}, which is a setting of its own: write {name}=VALUE.")
    names = ",".join(entry.name for entry in chosen)
    subject = f"{group}={names} has no parameter {name}" if len(chosen) == 1 else f"None of {names} has {group}.{name}"
    others = [entry.name for entry in known.values() if name in entry.settable]
    elsewhere = f" ({', '.join(others)} {'has' if len(others) == 1 else 'have'} it)" if others else ""
    own = sorted({key for entry in chosen for key in entry.settable if key != "_target_"})
    raise SettingsError(f"{subject}{elsewhere}{_instead(name, own, others).replace('mean ', f'mean {group}.')}")


def _instead(name: str, own: Sequence[str], others: Sequence[str]) -> str:
    """Return how an error goes on about a parameter that is not there. A name that others have is no slip of the keys:
    what is spelled like it means something else."""
    if name in COUNTS and (count := next((word for word in COUNTS if word in own), None)):
        return f"; did you mean {count}?"
    return f"; there is {', '.join(own) or 'none'}." if others else suggestion(name, own)


def _partial(group: str, said: Sequence[Override], chosen: Chosen) -> frozenset[str]:
    words = [override for override in said if override.key_or_group.startswith(group)]
    named = {word.key_or_group.split(".")[1] for word in words if word.key_or_group.startswith(f"{group}.")}
    named |= {name for word in words if word.key_or_group == group for one in _dicts(word) for name in one}
    return frozenset(name for name in named if not all(name in entry.settable for entry in chosen[group]))


@cache
def settings() -> tuple[str, ...]:
    """Return every setting but method, task and model, dotted, and the groups they stand in."""
    config = load(CONF / "config.yaml")
    own = {key: value for key, value in config.items() if key not in ("defaults", "hydra")}
    nested = [f"{key}.{name}" for key, value in own.items() if isinstance(value, dict) for name in value]
    return (*own, *nested)


def _defaults() -> dict[str, str]:
    """Return the method, task and model of conf/config.yaml."""
    listed = load(CONF / "config.yaml")["defaults"]
    return {group: str(line[group]) for line in listed if isinstance(line, dict) for group in GROUPS if group in line}
