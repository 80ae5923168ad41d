"""Composes jobs with Hydra: the words of a command line in, plain values out.

Hydra finds the yaml files, refuses keys that are not there and expands sweeps. Here its words are prepared, parameters
go to the plug-ins that have them, and what Hydra says of a wrong word becomes a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from harness.config import plugins
from harness.config.catalogue import (
    CONF,
    EXPERIMENT,
    GROUPS,
    Entry,
    commands,
    config_dirs,
    entries,
    experiments,
    plain,
)
from harness.config.errors import sentence
from harness.config.plugins import suggestion
from harness.config.settings import KEYS, Settings, SettingsError, settings_of, unknown_setting
from harness.terminal.arguments import typed

LAUNCHER, SWEEPER = "hydra/launcher", "hydra/sweeper"
SWEEP = ("-m", "--multirun")
# Hydra's flags that take the next word
VALUED = (
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--config-dir",
    "-cd",
)
FLAGS = (*SWEEP, *VALUED, "--info", "-i", "--resolve", "--run", "-r", "--hydra-help")
OF_A_LAUNCHER = f"{LAUNCHER}=NAME and hydra.launcher.KEY=VALUE"
HOW = "write key=value, a list as key=[1,2], text with commas, brackets or quotes as key='\"a, b\"'"
UNNAMED = "No {group} is named: write {group}=NAME, or with -m several, as {group}=NAME,NAME."
SET_BY_TUNE = {  # setting -> why a search has no choice of it
    "seed": "it chooses on examples that no table is about",
    "shared_prefill": "one prefill serves all values of a parameter",
    "wandb": "a search is shown nowhere else",
}


class Composed(NamedTuple):
    """Hold one job as plain values, so that any process can run it. `config`: the whole
    configuration; `presets`: the names of the yaml files of its method, task and model; `words`:
    its overrides."""

    config: dict[str, Any]
    presets: dict[str, str]
    words: list[str]


def words_of(words: Sequence[str]) -> dict[str, str]:
    """Return the overrides as {key: value}; of several for one key, the last."""
    return {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}


def composed(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the configuration of the one run that the words of a command line describe. Raise
    `SettingsError` for a wrong word."""
    return compose_one(words, config_dirs).config


def compose_one(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> Composed:
    """Return the one job that `python -m harness WORDS` would run. Raise `SettingsError` for a
    wrong word."""
    try:
        jobs = compose_all([*search_path(config_dirs), *for_hydra(words, config_dirs)])
    except HydraException as error:
        raise SettingsError(explain(error)) from error
    return with_own_parameters(jobs, config_dirs)[0]


def compose_all(words: Sequence[str], sweep: bool = False) -> list[Composed]:
    """Return the jobs that words in Hydra's form describe: one, or with `sweep` one for each combination of values,
    those of `hydra.sweeper.params` included. Raise `SettingsError` where there is none, or where a file sets what the
    command line alone may."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration(
            "config", [*words], RunMode.MULTIRUN if sweep else RunMode.RUN
        )
        _require_usual(config.hydra.runtime.choices)
        if not sweep:
            return [taken(config, config.hydra)]
        grid = [f"{key}={values}" for key, values in (config.hydra.sweeper.params or {}).items()]
        overrides = OverridesParser.create(loader).parse_overrides(
            [*grid, *config.hydra.overrides.task]
        )
        [points] = BasicSweeper.split_arguments(overrides, None)
        if not points:
            empty = [
                one.input_line
                for one in overrides
                if one.is_sweep_override() and not [*one.sweep_iterator()]
            ]
            raise SettingsError(
                f"{empty[0]} holds no value, so there is no job: name some, as in seed=1,2."
            )
        jobs = [loader.load_sweep_config(config, point) for point in points]
        return [taken(job, job.hydra) for job in jobs]


def _require_usual(choices: Mapping[str, str]) -> None:
    """Raise `SettingsError` if a yaml file chooses a launcher or a sweeper of Hydra's, which would run nothing.
    `choices`: the yaml file that is chosen in each group."""
    for group, remedy in (
        (LAUNCHER, "name it on the command line"),
        (SWEEPER, "write values as key=A,B"),
    ):
        if choices[group] != "basic":
            raise SettingsError(
                f"{group}={choices[group]} has no effect in a yaml file: leave it out, and {remedy}."
            )


def taken(config: Any, about: Any) -> Composed:
    """Return a job as plain values, which any process can run. `config`: the configuration that
    Hydra composed; `about`: Hydra's own part of it (`config.hydra`)."""
    chosen = {group: about.runtime.choices.get(group) for group in GROUPS}
    for group in [group for group, name in chosen.items() if name is None]:
        raise SettingsError(UNNAMED.format(group=group))
    own = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    try:
        plain: dict[str, Any] = OmegaConf.to_container(own, resolve=True)  # type: ignore[assignment]
    except InterpolationResolutionError as error:
        raise SettingsError(
            f"{error.full_key} names a value that is not there ({str(error).splitlines()[0]}): write it out."
        ) from error
    return Composed(plain, chosen, list(about.overrides.task))


def built(config: Mapping[str, Any]) -> tuple[Any, Any, Any, Settings]:
    """Build the method, the task, the model and the settings that a composed configuration
    describes."""
    settings = settings_of(config)
    return *(plugins.build(config[group], group) for group in GROUPS), settings


def search_path(config_dirs: Sequence[Path]) -> list[str]:
    """Return the override that makes Hydra look for yaml files in these folders as well; an empty
    list if there are none. Raise `SettingsError` for one that is not there."""
    for folder in config_dirs:
        if not folder.is_dir():
            raise SettingsError(
                f"--config-dir={folder} is not a folder: name the one that holds method/NAME.yaml."
            )
        if (folder / "config.yaml").is_file():
            raise SettingsError(
                f"{folder}/config.yaml has no effect: make it experiment/NAME.yaml there, and add +experiment=NAME."
            )
    folders = ",".join(f"'file://{folder.resolve()}'" for folder in config_dirs)
    return [f"hydra.searchpath=[{folders}]"] if folders else []


def read(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split the arguments of `python -m harness` into flags with their values, the overrides in the form that Hydra
    takes, and those that choose and configure a launcher. Raise `SettingsError` for a wrong word."""
    flags, words, rest = list[str](), list[str](), iter(arguments)
    for word in rest:
        if not word.startswith("-"):
            words.append(word)
            continue
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            value = value if equals else next(rest, "VALUE")
            raise SettingsError(
                f"{flag} is no flag: write settings without dashes, as in {flag.lstrip('-')}={value}."
            )
        flags += [word, *islice(rest, word in VALUED)]
    of_hydra = [word for word in words if re.match(r"[+~]*hydra[./@]", word)]
    launcher = [
        word
        for word in of_hydra
        if word.lstrip("+").startswith((f"{LAUNCHER}=", "hydra.launcher."))
    ]
    for word in of_hydra:
        if word not in launcher:
            raise SettingsError(
                f"{word} has no effect: of Hydra's own settings {OF_A_LAUNCHER} have one."
            )
    own = [word for word in words if word not in of_hydra]
    ready = for_hydra(
        own, config_dirs(arguments), sweep=any(flag in arguments for flag in SWEEP), runs=True
    )
    return flags, ready, [] if f"{LAUNCHER}=basic" in launcher else launcher


def for_hydra(
    words: Sequence[str],
    config_dirs: Sequence[Path] = (),
    *,
    sweep: bool = False,
    runs: bool = False,
) -> list[str]:
    """Return overrides in the form that Hydra takes: `~` becomes the home folder, `experiment` gets
    `+`, and parameters of plug-ins get `++`, because not every plug-in of a sweep has them.

    Raise `SettingsError` for an experiment that is a grid without `sweep` (-m), and, if `runs`, for
    an experiment that another command runs.
    """
    values = words_of(words)
    experiment = experiments((CONF, *config_dirs)).get(values.get(EXPERIMENT, ""))
    grid = experiment.grid if experiment else {}
    if "," in values.get(EXPERIMENT, ""):
        raise SettingsError(
            f"{EXPERIMENT}={values[EXPERIMENT]}: give one experiment per command, it may hold a grid."
        )
    if experiment and runs and "run" in experiment.facts:
        raise SettingsError(
            f"{EXPERIMENT}={experiment.name} is no run: use `{experiment.command}`."
        )
    if (
        experiment
        and not sweep
        and (swept := sorted({key.lstrip("+") for key in grid} - values.keys()))
    ):
        raise SettingsError(
            f"{EXPERIMENT}={experiment.name} is a grid over {', '.join(swept)}: add -m, or give one value of each."
        )
    ready = []
    for word in words:
        key, equals, value = word.partition("=")
        bare = key.lstrip("+")
        if bare == EXPERIMENT:
            key = f"+{bare}"
        elif bare in GROUPS and value in ("", "null"):
            raise SettingsError(UNNAMED.format(group=bare))
        elif bare.partition(".")[0] in GROUPS and ("." in bare or value.startswith("{")):
            key = bare if bare in grid else f"++{bare}"
        ready.append(
            f"{key}{equals}{_quoted(typed(value, f'{key}=') if value.startswith('~') else value)}"
        )
    return ready


def _quoted(value: object) -> str:
    """Return a value as Hydra's grammar takes it: in quotes if it has a letter like ä, or a sign like #, and nothing by
    which several values or a list are written."""
    text = str(value)
    return (
        f"'{text}'"
        if re.fullmatch(r"[^,()\[\]{}'\"]*([^ -~]|[!#&;<=>^`~])[^,()\[\]{}'\"]*", text)
        else text
    )


def with_own_parameters(
    jobs: Sequence[Composed], config_dirs: Sequence[Path] = ()
) -> list[Composed]:
    """Return the jobs without parameters that their own plug-in lacks but another one has: one
    typed for another job of the sweep, or one from a file written for another choice. A parameter
    that no plug-in has stays, so that building the plug-in refuses it."""
    for group in GROUPS:
        known = entries(group, (CONF, *config_dirs))
        used = {name for job in jobs for name in known[job.presets[group]].settable}
        for job in jobs:
            own = known[job.presets[group]].settable
            for name in [name for name in job.config[group] if name not in own]:
                is_typed = any(
                    word.lstrip("+").startswith(f"{group}.{name}=") for word in job.words
                )
                elsewhere = any(name in entry.settable for entry in known.values())
                if name in used or (not is_typed and elsewhere):
                    del job.config[group][name]
                elif is_typed and not elsewhere and name in KEYS:
                    value = plain(job.config[group][name])
                    raise SettingsError(
                        f"{group}.{name}: {name} is a setting of the run, so write {name}={value}."
                    )
    return list(jobs)


def explain(error: HydraException) -> str:
    """Return Hydra's error about an override as a sentence for the user, with the likely
    correction."""
    text = str(error)
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).partition("/")
        if group == "model" and ("/" in name or Path(name).is_dir()):
            return f"There is no preset {name}; for a model of the hub or a folder write model=hf model.name={name}."
        own = f"One of your own needs --config-dir=FOLDER, and its file FOLDER/{group}/{name}.yaml."
        # Hydra names no files of subfolders; those with an underscore are what experiments share
        named = {*(error.options or []), *entries(group)}
        known = [option for option in named if not Path(option).name.startswith("_")]
        return f"There is no {group} {name!r}{suggestion(name, known)} {own}"
    if isinstance(error, OverrideParseException):
        return _unread(error.override)
    if chosen := re.match(r"In '(.+)': Could not override '(hydra/\w+)@", text):
        return (
            f"{chosen[2]} has no effect in the yaml file of {chosen[1]}: leave it out, "
            "or name it on the command line."
        )
    if unknown := re.match(r"Could not override '([^']+)'", text):
        return unknown_setting(unknown[1])
    if several := re.match(r"Ambiguous value for argument '(.+)'", text):
        return (
            f"{several[1]} names several values: add -m to run them one after the other (a list is written in "
            "brackets, as in dense_layers=[0,1])."
        )
    return sentence(error)


def _unread(word: str) -> str:
    if word in commands():
        return (
            f"{word} is a command and no setting: put it first, as in `python -m harness {word}`."
        )
    if near := get_close_matches(word, commands(), n=1):
        return f"There is no command {word!r}; did you mean {near[0]}?"
    return f"Cannot read {word!r}: {HOW}."


# Commands that read several values of a key themselves: a search over parameters, and a server's combinations


class Word(NamedTuple):
    """Hold one value of a key: `text` as the override key=value, `value` as Python has it."""

    text: str
    value: Any


class Search(NamedTuple):
    """Holds the question to `harness.tune`: the overrides for one run (`words`), the values to try
    by parameter, and the yaml files of method, task and model (`chosen`, by group)."""

    words: list[str]
    values: Mapping[str, tuple[Any, ...]]
    chosen: Mapping[str, Entry]


def read_search(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> Search:
    """Read the command line of `harness.tune`. `method.kernel=3,7,15` names values to try; all
    other words are as for one run. Raise `SettingsError` for a setting that the search chooses
    itself, and for several values of anything but a parameter of the method."""
    others, values = [], dict[str, tuple[Any, ...]]()
    for key, choices in _by_key(words).items():
        group, _, parameter = key.partition(".")
        if group in SET_BY_TUNE:
            raise SettingsError(
                f"{key} changes nothing for harness.tune, since {SET_BY_TUNE[group]}: leave it out."
            )
        searched = group == "method" and parameter
        if searched and choices[0].value == "":
            raise SettingsError(f"{key} is empty: name the values to try, as in {key}=A,B.")
        if len(choices) == 1:
            others.append(choices[0].text)
        elif searched:
            values[parameter] = tuple(dict.fromkeys(choice.value for choice in choices))
        else:
            given = ",".join(plain(choice.value) for choice in choices)
            raise SettingsError(
                f"{key}={given} names several values: parameters of the method alone have a grid."
            )
    presets = compose_one(others, config_dirs).presets
    folders = (CONF, *config_dirs)
    chosen = {group: entries(group, folders)[presets[group]] for group in GROUPS}
    for name in values.keys() - chosen["method"].settable:
        near = suggestion(
            name, [f"method.{own}" for own in chosen["method"].settable - {plugins.TARGET}]
        )
        raise SettingsError(f"method={presets['method']} has no parameter {name}{near}")
    return Search(others, values, chosen)


def combinations(words: Sequence[str], slowest: str) -> Iterator[dict[str, Word]]:
    """Yield every combination of the values in `words`, as {key: value}. The value of the key
    `slowest` changes least often."""
    choices = _by_key(words)
    keys = sorted(choices, key=lambda key: key != slowest)
    for point in product(*(choices[key] for key in keys)):
        yield dict(zip(keys, point, strict=True))


def _by_key(words: Sequence[str]) -> dict[str, list[Word]]:
    """Return the values of each key in `words`; if two words have the same key, those of the
    last."""
    by_key: dict[str, list[Word]] = {}
    for word in words:
        try:
            key, equals, value = word.partition("=")
            override = OverridesParser.create().parse_override(f"{key}{equals}{_quoted(value)}")
        except HydraException as error:
            raise SettingsError(_unread(word)) from error
        by_key[override.key_or_group] = list(_values(override))
    return by_key


def _values(override: Override) -> Iterator[Word]:
    if not override.is_sweep_override():
        yield Word(str(override.input_line), _frozen(override.value()))
        return
    key = str(override.input_line).partition("=")[0]
    if not override.is_discrete_sweep():
        raise SettingsError(
            f"{override.input_line} has no steps: name the values, as in {key}=A,B."
        )
    for text, value in zip(
        override.sweep_string_iterator(), override.sweep_iterator(), strict=True
    ):
        yield Word(f"{key}={text}", _frozen(value))


def _frozen(value: Any) -> Any:
    """Return a value as a frozen dataclass holds it: lists become tuples, quoted text becomes
    text."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return value.text if isinstance(value, QuotedString) else value
