"""What makes a run the run it is: the same identity is continued, another one opens another folder.

It holds the configuration without keys at their defaults (so that a new key orphans no result), the code of the
plug-ins by meaning (harness/results/meaning.py), the version of all other code, and what task, model and prompts are.
Commit, dirty flag and hash of all sources are information in run.json; nothing depends on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.config import plugins
from harness.config.catalogue import GROUPS
from harness.config.nested import flatten
from harness.config.settings import NESTED, WITHOUT_EFFECT, recorded_defaults
from harness.results.files import canonical
from harness.results.meaning import code_of

# Of the code that all runs share. Raise it when outputs change, or a default of `Settings`, and make the stored tokens
# again: python -m tests.stored_tokens
CORE_VERSION = 2
PARTS = {
    "core": "the shared code (CORE_VERSION)",
    "sources": "the form of the identity (a hash of all sources until now)",
    "task_version": "the task's version",
    "model_revision": "the model's revision",
    "prompts": "the prompts",
}
Values = Mapping[str, Any]


def identity(config: Values, named: Values, *, revision: str | None, prompts: Iterable[str]) -> dict[str, Any]:
    """Of the run that `config` resolves to. `named`: its method, task and model; `prompts`: their hashes."""
    return asked(config, named) | {
        "core": CORE_VERSION,
        "code": code_of(*named.values()),
        "task_version": named["task"].version,
        "model_revision": revision,
        "prompts": hashlib.sha256("".join(prompts).encode()).hexdigest(),
    }


def asked(config: Values, named: Values) -> dict[str, Any]:
    """`config` without what changes no result and without what is at its default."""
    usual = recorded_defaults() | {kind: plugins.defaults(plugin) for kind, plugin in named.items()}
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in NESTED or key in GROUPS:
            kept = [name for name in value if f"{key}.{name}" not in WITHOUT_EFFECT]
            value = {name: value[name] for name in kept if not _same(name, value, usual[key])}
        if key not in WITHOUT_EFFECT and value != {} and not _same(key, config, usual):
            found[key] = value
    return found


def not_continued(mine: Values, named: Values, others: Iterable[tuple[Path, Values]]) -> str | None:
    """Which of `others`, folders and their run.json, one would have expected to go on instead of a new run, and what
    differs there. A finished run of other settings is none of these: it is another point of a sweep."""
    found: list[tuple[bool, int, str]] = []
    for folder, info in others:
        keys = differences(mine, info.get("identity", {}), named)
        other_settings = any(key not in PARTS and not key.startswith("code.") for key in keys)
        if keys and (not other_settings or info.get("status") in ("failed", "interrupted")):
            sentence = f"{folder} is not continued; it differs in {', '.join(map(word, keys))}"
            found.append((other_settings, len(keys), sentence))
    return min(found)[2] if found else None


def differences(mine: Values, other: Values, named: Values) -> list[str]:
    """Keys, dotted, in which `other` is not as `mine`. An identity of the old form has keys at their defaults, and one
    hash in place of `core` and `code`."""
    old = "sources" in other
    here, there = flatten(mine), flatten(asked(other, named) if old else other)
    keys = [key for key in here | there if not _same(key, here, there)]
    return [key for key in keys if not (old and (key == "core" or key.startswith("code.")))]


def model_name(config: Mapping[str, Any]) -> str:
    """The hub's name or the folder, else the class, with the shape of random weights."""
    model = config.get("model")
    if isinstance(model, Mapping):
        kind = str(model.get("_target_", "unknown")).rpartition(".")[2]
        model = model.get("name") or " ".join(filter(None, (kind, model.get("shape"))))
    return str(model)


def word(key: str) -> str:
    """A part of an identity, in words; a setting is its own."""
    return f"the code of {key.removeprefix('code.')}" if key.startswith("code.") else PARTS.get(key, key)


def _same(key: str, one: Values, other: Values) -> bool:
    """As they are stored: a tuple is a list. 1 is not 1.0: a budget of one token is not the whole prompt."""
    if key in one and key in other:
        return canonical({key: one[key]}) == canonical({key: other[key]})
    return key not in one and key not in other
