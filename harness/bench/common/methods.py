"""Methods of a benchmark, by the names of their yaml files; hydra is not needed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.bench.common.measure import release, why
from harness.bench.common.output import Report, failed_row
from harness.config.catalogue import CONF, entries
from harness.config.plugins import build, suggestion
from methods.base import Method

MeasureMethod = Callable[[Method], dict[str, Any]]  # -> a row's numbers


def names() -> list[str]:
    """Return the names of all methods, without presets and without those that run another project's
    code."""
    return [entry.name for entry in entries("method") if entry.base is None and not entry.bridged]


def load(name: str, folders: Sequence[Path] = (), **changes: Any) -> Method:
    """Return the method that a yaml file describes. `folders`: further folders with
    method/NAME.yaml; `changes`: parameters that replace those of the file."""
    known = {entry.name: entry for entry in entries("method", (CONF, *folders))}
    if name not in known:
        raise ValueError(f"--methods {name} is unknown{suggestion(name, known)}")
    method: Method = build(known[name].values() | changes, "method")
    return method


def parsed(spec: str, folders: Sequence[Path]) -> Method:
    """Return the method that a text such as `quest` or `quest:select_per=kv_head,page_size=32` names."""
    name, _, rest = spec.partition(":")
    words = [word.partition("=") for word in rest.split(",") if word]
    if not all(equals for _, equals, _ in words):
        raise ValueError(f"--methods {spec} gives a parameter no value: write {name}:NAME=VALUE.")
    return load(name, folders, **{key: yaml.safe_load(value) for key, _, value in words})


def chosen(specs: Sequence[str], folders: Sequence[Path]) -> dict[str, Method]:
    """Return the methods that are named, by the text that names each; all methods if `specs` is
    empty."""
    if lacking := [folder for folder in folders if not folder.is_dir()]:
        raise ValueError(
            f"--config-dir {lacking[0]} is not a folder: name the one with method/NAME.yaml."
        )
    return {spec: parsed(spec, folders) for spec in specs or names()}


def measured(
    options: Namespace,
    report: Report,
    after: Callable[[int], MeasureMethod],
    told: Callable[[dict[str, Any]], str],
    **facts: Any,
) -> None:
    """Measure every method after a prompt of every length in the options, and add a row for each to
    `report`. `after(tokens)` returns the function that measures a method after such a prompt;
    `told` writes a row as one line; `facts` are further columns of each row.

    An error, as a lack of memory or too small a budget, becomes a row that says so, and the others
    go on. A `ValueError` of `after` itself is raised: the options are wrong for that length.
    """
    also = "".join(f", {name} {value}" for name, value in facts.items())
    for tokens in options.tokens:
        try:
            measure = after(tokens)
        except ValueError:
            raise
        except Exception as error:
            label = f"every method at {tokens}{also}"
            report.add(
                failed_row(label, why(error), tokens=tokens, **facts), f"{label}: {why(error)}"
            )
            continue
        for name, method in chosen(options.methods, options.config_dir).items():
            label, row = f"{name} at {tokens}{also}", {"method": name, "tokens": tokens, **facts}
            if report.out_of_time(label):
                continue
            try:
                row |= measure(method)
                line = told(row)
            except Exception as error:
                line = why(error)
                row = failed_row(label, line, **row)
            if "error" in row:
                release()
            report.add(row, f"{label}: {line}")
