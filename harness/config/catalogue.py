"""Lists what can be named: the yaml files of conf/ and of `--config-dir`, and commands.

Imports neither a plug-in nor hydra.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from harness.terminal.arguments import typed

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS, EXPERIMENT = ("method", "task", "model"), "experiment"
# lines of an experiment's card
FACTS = ("paper", "model", "data", "grid", "cost", "published", "run", "small")
_PACKAGE, _GRID = "# @package _global_", "hydra.sweeper.params."
# The lines of a method's card, in this order: what a reader must know before comparing it with another. They stand in
# the comment at the head of its yaml, where `{name}` is the value of a parameter.
CARD = (
    "name",  # in papers; of a yaml that does not write it, what stands before the colon in its first line
    "prefill",  # dense or sparse
    "rule",  # evicts or selects, and by what
    "unit",  # what is chosen: token, chunk, page, block
    "group_rule",  # how the query heads of a group come to one choice
    "dense_layers",  # layers that read everything
    "sinks",  # first tokens that are always read
    "window",  # last tokens of the prompt that are always read
    "on_device",
    "on_host",  # with placement=host
    "index_cost",  # what choosing costs: bytes per token of K (2D of 16 bit each), work at the seal
    "budget",  # what counts towards the budget
    "deviations",  # differences from the paper and its released code
    "later_turns",  # what a further turn finds changed from its own prompt; left out: nothing
)

Flat = dict[str, Any]  # dotted key -> value
SENTENCE_END = re.compile(r"(?<=[.?]) (?=[A-Z])")


class ConfigError(ValueError):
    """Report that the yaml files cannot be used as they are; the message names file and line."""


class NameTaken(ConfigError):
    """Report that two folders have a yaml file of the same name in the same group (method, task,
    model, experiment)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Describe a yaml file that defines a method, a task or a model."""

    name: str
    file: Path

    @property
    def headline(self) -> str:
        """The first sentence of the comment that the file begins with."""
        return first_sentence(leading_comment(self.file))

    def called(self) -> tuple[str, list[str]]:
        """Return the name that papers print, such as SnapKV, and `key=value` of the parameters that
        tell a preset from the yaml file with just that name. The name is that of a line `name` of
        the card, or else the words before the colon of the first sentence, or else the file's name.
        A preset without a line `name` has the name of its base."""
        if written := facts_in(leading_comment(self.file), ("name",)):
            return written["name"], []
        if self.base is None:
            words, colon, _ = self.headline.partition(":")
            return words if colon else self.name, []
        name, changed = self.base.called()
        usual = flatten(self.base.values())
        mine = flatten(self.values())
        differing = [key for key in mine if mine[key] != usual.get(key)]
        return name, changed + [f"{key}={plain(mine[key])}" for key in differing]

    @property
    def base(self) -> Entry | None:
        """The yaml file that this one changes, if this one is a preset: the file that its
        `defaults` name, in the same folder or in conf/. None for a file that is no preset."""
        named = [
            name
            for name in self._own().get("defaults", [])
            if isinstance(name, str) and name != "_self_"
        ]
        places = [
            folder / f"{name}.yaml"
            for name in named
            for folder in (self.file.parent, CONF / self._group)
        ]
        return next((Entry(place.stem, place) for place in places if place.is_file()), None)

    def values(self) -> dict[str, Any]:
        """Return `_target_` and all parameters with their values; a preset's override its
        base's."""
        own = {key: value for key, value in self._own().items() if key != "defaults"}
        return own if self.base is None else self.base.values() | own

    def parameters(self) -> list[tuple[str, Any, str]]:
        """Return name, default and comment of each parameter, in the order of the file. A preset
        takes a comment from its base where it has none."""
        inherited = self.base.parameters() if self.base else []
        comments = {name: comment for name, _, comment in inherited}
        for line in self.file.read_text(encoding="utf-8").splitlines():
            if line[:1].isidentifier() and (comment := _comment(line)):
                comments[line.partition(":")[0]] = comment
        values = {key: value for key, value in self.values().items() if key != "_target_"}
        return [(key, value, comments.get(key, "")) for key, value in values.items()]

    @property
    def target(self) -> str | None:
        target: str | None = self.values().get("_target_")
        return target

    @property
    def settable(self) -> frozenset[str]:
        """The names of parameters that the command line can set: keys of the yaml, and fields that
        the plug-in's class declares itself."""
        own = [
            node
            for node in self._annotated()
            if not ast.unparse(node.annotation).startswith("ClassVar")
        ]
        declared = [name for node in own if not (name := ast.unparse(node.target)).startswith("_")]
        return frozenset(self.values()).union(declared)

    @property
    def bridged(self) -> bool:
        """True if the plug-in runs code of another project, which must be installed."""
        return str(self.target).startswith("harness.bridges.")

    def card(self) -> str:
        """Return the docstring of the module that defines the plug-in, read without importing
        it."""
        return ast.get_docstring(self._module()) or ""

    def facts(self) -> dict[str, str]:
        """Return the lines of the card at the head of the yaml file (`CARD`), by name, with the
        values of parameters filled in."""
        values = {key: plain(value) for key, value, _ in self.parameters()}
        written = self._written_facts()
        name = {"name": bracketed(*self.called())} if written else {}
        return {key: text.format_map(values) for key, text in (name | written | name).items()}

    def _written_facts(self) -> dict[str, str]:
        inherited = self.base._written_facts() if self.base else {}
        return inherited | facts_in(leading_comment(self.file), CARD)

    @property
    def _group(self) -> str:
        return self.file.parent.name

    def _own(self) -> dict[str, Any]:
        own = load(self.file)
        if not isinstance(own, dict):
            raise ConfigError(f"{self.file} must hold keys and values, among them _target_.")
        return own

    def _annotated(self) -> list[ast.AnnAssign]:
        name = str(self.target).rpartition(".")[2]
        classes = [
            node
            for node in self._module().body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        return [node for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)]

    def _module(self) -> ast.Module:
        try:
            spec = find_spec(str(self.target).rpartition(".")[0]) if self.target else None
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{self.file}: _target_={self.target} cannot be found ({error}); is its folder on PYTHONPATH?"
            ) from error
        if not spec or not spec.origin:
            return ast.parse("")
        file = Path(spec.origin)
        return _syntax(file, *_stamp(file))


def bracketed(name: str, words: Sequence[str]) -> str:
    """Return a name with what sets it apart in brackets: SnapKV (kernel=15)."""
    return f"{name} ({', '.join(dict.fromkeys(words))})" if words else name


def leading_comment(file: Path) -> list[str]:
    """Return the lines of the comment at the head of a yaml file, without the `#`."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return [line[1:].removeprefix(" ").rstrip() for line in comment]


def first_sentence(comment: Iterable[str]) -> str:
    """Return the first sentence of a comment, given as its lines."""
    text = ""
    for line in comment:
        text = f"{text} {line}".strip()
        if text.endswith((".", "?")) or (text and not line):
            break
    return SENTENCE_END.split(text, maxsplit=1)[0]


def facts_in(comment: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Return the lines `name: text` of a comment whose names are in `names`. Indented lines below
    one belong to its text."""
    facts: dict[str, str] = {}
    for line in comment:
        name, colon, text = line.partition(":")
        if colon and name in names:
            facts[name] = text.strip()
        elif facts and line.startswith("  "):
            facts[[*facts][-1]] += f" {line.strip()}"
    return facts


def load(file: Path) -> Any:
    """Return the content of a yaml file. It is cached until the file changes, so callers must not
    modify it."""
    try:
        return _content(file, *_stamp(file))
    except yaml.MarkedYAMLError as error:
        raise ConfigError(not_yaml(error)) from error


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


@cache
def _content(file: Path, *stamp: int) -> Any:
    with open(file, encoding="utf-8") as opened:  # open, so that errors name it
        return yaml.safe_load(opened)


@cache
def _syntax(file: Path, *stamp: int) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def not_yaml(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark
    where = f"{mark.name}, line {mark.line + 1}" if mark else "A file of the configuration"
    return f"{where}: this is not YAML ({error.problem})."


def entries(group: str, folders: Sequence[Path] = (CONF,)) -> dict[str, Entry]:
    """Return the yaml files of a group (method, task, model) by name, sorted. Raise `NameTaken` if
    two folders hold a file of the same name, because Hydra would silently take the first. A file in
    a subfolder has that in its name, as in small/pqcache_fig9b."""
    by_name: dict[str, Entry] = {}
    for file in (file for folder in folders for file in sorted((folder / group).rglob("*.yaml"))):
        name = file.as_posix().rpartition(f"/{group}/")[2].removesuffix(".yaml")
        first = by_name.setdefault(name, Entry(name, file))
        if first.file != file and first.file.resolve() != file.resolve():
            raise NameTaken(
                f"{file} has the name of {'the built-in ' if CONF in first.file.parents else ''}{first.file}, which "
                f"would run in its place: rename yours, and use {group}=NEWNAME."
            )
    return dict(sorted(by_name.items()))


@cache
def commands() -> frozenset[str]:
    """Return the names of all commands, as in `python -m harness NAME`: the files of
    harness/commands and the folders of harness with a `__main__.py`."""
    harness = CONF.parent / "harness"
    files = {file.stem for file in (harness / "commands").glob("*.py")} - {"__init__", "run"}
    return frozenset(files | {file.parent.name for file in harness.glob("*/__main__.py")})


def config_dirs(arguments: Sequence[str]) -> list[Path]:
    """Return the folders that --config-dir names on a command line, in any of argparse's
    spellings."""
    folders = []
    for place, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config-dir", "-cd"):
            folders.append(typed(value if equals else [*arguments, ""][place + 1], f"{flag}="))
    return folders


def plain(value: object) -> str:
    """Return a value as text, as it is written on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(plain, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {plain(inner)}' for name, inner in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value).replace("\n", "\\n")


IN_ONE = ("template_kwargs",)  # settings whose value is a mapping of the user's own


def flatten(nested: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return nested values with dotted keys, as {"a.b": 1} for {"a": {"b": 1}}. Lists and the
    settings of IN_ONE stay as they are."""
    flat: Flat = {}
    for key, value in nested.items():
        parts = isinstance(value, Mapping) and key not in IN_ONE
        flat |= flatten(value, f"{prefix}{key}.") if parts else {f"{prefix}{key}": value}
    return flat


def _comment(line: str) -> str:
    return line.partition(" #")[2].strip()


@dataclass(frozen=True)
class Experiment:
    """A yaml file of conf/experiment/: a named command line, with a card at its head that says what
    it reproduces. Hydra composes it; this class only reads it, to list and describe it.

    A small variant names another experiment in its `defaults` and changes what makes that one slow.
    A file whose name begins with `_` holds what several experiments share. `folders`: where the
    experiments that it builds on are searched.
    """

    name: str
    file: Path
    folders: tuple[Path, ...] = (CONF,)

    @cached_property
    def bases(self) -> list[Experiment]:
        """Return the experiments that its `defaults` name. As in Hydra, a later one overrides an
        earlier one."""
        named = [
            line
            for line in self._content.get("defaults", [])
            if isinstance(line, str) and line != "_self_"
        ]
        known = _files(self.folders)
        for name in named:
            if name.removeprefix(f"/{EXPERIMENT}/") not in known:
                raise ConfigError(
                    f"{self.file}: there is no experiment {name}; its `defaults` may name those of conf/."
                )
        return [known[name.removeprefix(f"/{EXPERIMENT}/")] for name in named]

    @property
    def grid(self) -> dict[str, str]:
        """The values of each key that the experiment sweeps over (hydra.sweeper.params), with those
        of the experiments that it builds on."""
        grid = {key: values for base in self.bases for key, values in base.grid.items()}
        for key, values in flatten({"hydra": self._content.get("hydra", {})}).items():
            if not key.startswith(_GRID) or values in (None, ""):
                raise ConfigError(
                    f"{self.file}: `hydra` may hold sweeper.params alone, with values for each key as in budget: "
                    f"'0.1,0.2', so leave {key} out; a launcher and its settings stand on the command line."
                )
            grid[key.removeprefix(_GRID)] = str(values)
        return grid

    @property
    def headline(self) -> str:
        """The first sentence of the experiment's card, the comment at the head of its file."""
        return first_sentence(line for line in self._comment if line)

    @property
    def facts(self) -> dict[str, str]:
        """The lines of the card by name (`FACTS`); lines of this file override those of its
        bases."""
        merged = {name: text for base in self.bases for name, text in base.facts.items()}
        merged |= facts_in(self._comment, FACTS)
        return {name: merged[name] for name in FACTS if name in merged}

    @property
    def command(self) -> str:
        """The command line that runs the experiment."""
        sweep = "-m " if self.grid else ""
        return f"{self.facts.get('run') or 'python -m harness'} {sweep}+{EXPERIMENT}={self.name}"

    @cached_property
    def _content(self) -> dict[str, Any]:
        content = load(self.file) or {}
        if not isinstance(content, dict) or not self.file.read_text(encoding="utf-8").startswith(
            _PACKAGE
        ):
            raise ConfigError(
                f"{self.file} must begin with the line `{_PACKAGE}` and hold keys with values."
            )
        return content

    @property
    def _comment(self) -> list[str]:
        """The lines of its card, which stands below the line `# @package _global_`."""
        return leading_comment(self.file)[1:]


def experiments(folders: Sequence[Path] = (CONF,)) -> dict[str, Experiment]:
    """Return all experiments by name, without files that only hold shared parts. Raise `NameTaken`
    if two folders have one of the same name."""
    return {
        name: file
        for name, file in _files(folders).items()
        if not name.rpartition("/")[2].startswith("_")
    }


def _files(folders: Sequence[Path]) -> dict[str, Experiment]:
    """Return all yaml files of experiments by name, with those whose name begins with `_`, which
    hold what several experiments share."""
    return {
        entry.name: Experiment(entry.name, entry.file, tuple(folders))
        for entry in entries(EXPERIMENT, folders).values()
    }
