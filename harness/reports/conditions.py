"""The lines below a table on the conditions of its rows: prompts, dtype, device, machine, versions,
commit, settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from harness.config.catalogue import flatten, plain
from harness.config.settings import SERVER, recorded_defaults
from harness.reports.compare import Comparison, ReportRow
from harness.reports.labels import NOT_NAMED, name, spelled_out
from harness.results.files import canonical
from harness.results.records import Record
from harness.results.run_folder import StoredRun

SUBJECTS = (("dtype", "device", "machine"), ("torch", "commit"))  # a line each
SHOWN_APART = ("dtype", "device", "threads", "protocol")


def conditions(table: Comparison) -> Iterator[str]:
    """Yield one line per subject. If the rows differ in it, the line says which row has which
    value."""
    entries = table.entries
    records = [record for entry in entries for record in entry.run.records]
    yield "prompts: " + "; ".join(_prompts(records))
    checks = [entry.run.info.get("model_check") for entry in entries]
    yield from dict.fromkeys(
        f"model: checked against generate on {check['tokens']} tokens and {check['new_tokens']} new ones; its logits "
        f"differ by {check['difference']:.1e} of their spread"
        for check in checks
        if check
    )
    models = [entry.run.config.get("model") for entry in entries]
    ropes = [model["rope"] for model in models if isinstance(model, Mapping) and model.get("rope")]
    yield from dict.fromkeys(
        f"model: rotated by model.rope={plain(rope)}, not by its own config" for rope in ropes
    )
    revisions = [(entry.run.info.get("identity") or {}).get("model_revision") for entry in entries]
    adapters = [str(revision).partition("+adapter-")[2] for revision in revisions]
    yield from dict.fromkeys(
        f"model: a LoRA adapter is merged into its weights ({adapter})"
        for adapter in filter(None, adapters)
    )
    for subjects in SUBJECTS:
        yield "; ".join(_per_row(subject, entries) for subject in subjects)
    if common := _common_settings([entry.run for entry in entries]):
        yield f"settings: {common}"


def origin(run: StoredRun) -> dict[str, Any]:
    """Return the entries of run.json about the machine and the code as flat values; None if
    unknown."""
    machine, git = run.provenance("machine"), run.provenance("git")
    return {
        **{key: git.get(key) for key in ("commit", "dirty")},
        "sources": (run.info.get("provenance") or {}).get("sources"),
        "torch": run.provenance("versions").get("torch"),
        **{key: machine.get(key) for key in ("cpu", "device_name", "threads")},
        "load_average": (machine.get("load_average") or [None])[0],
        "load_average_ended": (run.info.get("load_average_ended") or [None])[0],
    }


def _prompts(records: Sequence[Record]) -> Iterator[str]:
    """Yield the real lengths of the prompts in words, for each length that the task was asked
    for."""
    lengths: dict[Any, dict[str, int]] = defaultdict(dict)
    for record in records:
        lengths[record.data.get("length")][record.prompt_sha256] = record.prompt_tokens
    for asked, tokens in sorted(lengths.items(), key=lambda pair: pair[0] or 0):
        low, high = min(tokens.values()), max(tokens.values())
        middle = f" to {high} tokens, median {median(tokens.values()):.0f}"
        start = "" if asked is None else f"length={asked}: "
        yield f"{start}{low}{' tokens' if low == high else middle}"
    if not lengths:
        yield "none was run"


def _per_row(subject: str, entries: Sequence[ReportRow]) -> str:
    rows: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        rows[_facts(entry.run)[subject]].append(entry.title)
    most = max(rows, key=lambda fact: len(rows[fact]))
    others = [f"{fact} ({', '.join(titles)})" for fact, titles in rows.items() if fact != most]
    return f"{subject}: {most}{', but ' * bool(others)}{', '.join(others)}"


def machine_of(run: StoredRun) -> str:
    """Return dtype, machine and threads of a run as text, with the scheme by which its weights are
    quantised, if they are."""
    if run.config.get("device") == SERVER:
        return "behind a server"
    scheme = str(run.info.get("quantised") or "").partition(",")[0]
    return f"{run.config.get('dtype')}{f' ({scheme} weights)' * bool(scheme)} on {_facts(run)['machine']}"


def _facts(run: StoredRun) -> dict[str, str]:
    known = origin(run)
    threads = f"{known['threads']} thread{'s' * (known['threads'] > 1)}" if known["threads"] else ""
    names = dict.fromkeys(filter(None, (known["device_name"], known["cpu"], threads)))
    quantised = run.info.get("quantised")
    if run.config.get("device") == SERVER:
        notes = (run.config.get("model") or {}).get("notes")
        said = f"the server's ({notes})" if notes else "the server's"
        ours = {"dtype": said, **dict.fromkeys(("device", "machine", "torch"), "the server's")}
    else:
        ours = {}
    return {
        "dtype": str(run.config.get("dtype")) + f" (weights: {quantised})" * bool(quantised),
        "device": str(run.config.get("device")),
        "machine": ", ".join(names) or "unknown",
        "torch": known["torch"] or "unknown",
        "commit": (known["commit"] or "unknown")[:7] + " (dirty)" * bool(known["dirty"]),
    } | ours


def _common_settings(runs: Sequence[StoredRun]) -> str:
    """Return, as text, the settings that all rows share and that are not at their defaults.
    Settings in which rows differ are in their labels."""
    defaults = recorded_defaults(str(runs[0].config.get("device")))
    usual = flatten(defaults)
    first, *others = [
        flatten({key: value for key, value in run.config.items() if key in defaults})
        for run in runs
    ]
    shared = [
        key
        for key, value in first.items()
        if key.partition(".")[0] not in (*NOT_NAMED, *SHOWN_APART)
        and value != usual.get(key, value)
        and all(own.get(key) == value for own in others)
    ]
    return ", ".join(spelled_out(first, shared))


def code_versions(entries: Sequence[ReportRow]) -> Iterator[str]:
    """Yield a note for each method with the same settings in several rows whose code differs."""
    alike: dict[str, list[ReportRow]] = defaultdict(list)
    for entry in entries:
        same = canonical({"method": name(entry.run, "method"), "config": entry.run.config})
        alike[same].append(entry)
    for rows in alike.values():
        identities = [row.run.info.get("identity") or {} for row in rows]
        codes = [
            (identity.get("code") or {}) | {"shared code": identity.get("core")}
            for identity in identities
        ]
        modules = dict.fromkeys(chain.from_iterable(codes))
        differing = [module for module in modules if len({code.get(module) for code in codes}) > 1]
        if differing:
            began = ", ".join(
                f"{row.title} began {str(row.run.info.get('started'))[:16]}" for row in rows
            )
            yield f"{name(rows[0].run, 'method')}: versions of its code ({', '.join(differing)}): {began}"
