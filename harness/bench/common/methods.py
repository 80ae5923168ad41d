"""Methods of a benchmark, by the names of their yaml files; hydra is not needed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from harness.bench.common.measure import release, why
from harness.bench.common.output import Report, failed_row, timed_code
from harness.config.catalogue import CONF, entries
from harness.config.plugins import build, suggestion
from kernels import ops
from methods.abilities import asked, refuse
from methods.abilities.kept_codec import KeptCodec
from methods.base import Budget, Method
from methods.tiers.codec import Codec
from methods.tiers.codecs import codec_of

MeasureMethod = Callable[[Method], dict[str, Any]]  # -> a row's numbers


def names() -> list[str]:
    """Return the names of all methods, without presets and without those that run another project's
    code, or need a model that was trained for them."""
    own = [each for each in entries("method").values() if each.base is None and not each.bridged]
    return [each.name for each in own if not _is_trained(load(each.name))]


def _is_trained(method: Method) -> bool:
    """Return whether a method's choice is part of the model."""
    return type(method).trained_budget is not Method.trained_budget


def load(name: str, folders: Sequence[Path] = (), **changes: Any) -> Method:
    """Return the method that a yaml file describes. `folders`: further folders with
    method/NAME.yaml; `changes`: parameters that replace those of the file."""
    known = entries("method", (CONF, *folders))
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


def chosen(options: Namespace) -> dict[str, Method]:
    """Return the methods that --methods names, by the text that names each; without it all whose
    prefill is dense, since one of their own takes most of the time at long contexts."""
    given(options)  # raises what is wrong with them
    specs, folders = options.methods, options.config_dir
    if lacking := [folder for folder in folders if not folder.is_dir()]:
        raise ValueError(
            f"--config-dir {lacking[0]} is not a folder: name the one with method/NAME.yaml."
        )
    named = {spec: parsed(spec, folders) for spec in specs or names()}
    return {spec: method for spec, method in named.items() if specs or method.dense_prefill}


def given(options: Namespace) -> tuple[Budget, Codec | None]:
    """Return the budget, with its mass, and the codec that the options name."""
    codec = None if options.codec is None else codec_of(options.codec)
    return Budget(options.budget, mass=options.budget_mass), codec


def given_to(method: Method, options: Namespace) -> tuple[Budget | None, Codec | None]:
    """Return the budget and the codec of the options, None where `method` has no use for one."""
    budget, codec = given(options)
    takes_codec = KeptCodec.refusal(method) is None
    return budget if method.uses_budget else None, codec if takes_codec else None


def title(options: Namespace) -> str:
    """Return what every method is given, as "budget 2048, codec tq4"."""
    values = ((name, getattr(options, name)) for name in ("budget", "budget_mass", "codec"))
    return ", ".join(f"{name} {value}" for name, value in values if value is not None)


def measured(
    options: Namespace,
    report: Report,
    after: Callable[..., MeasureMethod],
    told: Callable[[dict[str, Any]], str],
) -> None:
    """Measure every method after a prompt of every length in the options, with every batch if they
    have batches, and add a row for each to `report`. `after(tokens)`, or `after(tokens, batch=...)`,
    returns the function that measures a method after such a prompt; `told` writes a row as one line.

    An error, as a lack of memory or too small a budget, becomes a row that says so, and the others
    go on; a method that cannot have the mass or the codec of the options becomes one such row for
    all lengths. A `ValueError` of `after` itself is raised: the options are wrong for that length.
    """
    able = dict[str, Method]()
    for name, method in chosen(options).items():
        try:
            refuse(method, asked(*given(options)))
            able[name] = method
        except ValueError as error:
            report.add(failed_row(name, str(error)), f"{name}: {error}")
    for batch, tokens in product(getattr(options, "batch", [None]), options.tokens):
        facts = {} if batch is None else {"batch": batch}
        also = "" if batch is None else f", batch {batch}"
        try:
            measure = after(tokens, **facts)
        except ValueError:
            raise
        except Exception as error:
            label = f"every method at {tokens}{also}"
            report.add(
                failed_row(label, why(error), tokens=tokens, **facts), f"{label}: {why(error)}"
            )
            continue
        for name, method in able.items():
            label, row = f"{name} at {tokens}{also}", {"method": name, "tokens": tokens, **facts}
            if report.skips(label):
                continue
            ops.forget_used()
            try:
                row |= measure(method)
                row["code"] = timed_code(type(method).__module__)
                line = told(row)
            except Exception as error:
                line = why(error)
                row = failed_row(label, line, **row)
            report.add(row, f"{label}: {line}")
            if "error" in row:
                release()
