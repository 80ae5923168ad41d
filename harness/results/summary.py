"""Makes the one row of a run from its records, and finds the run of Full that it is compared with.
`summary.json` is a copy of the row for other programs; reports compute it anew.

Times and rates are defined the same for every method. TPOT is the time per token after the second
(the seal lies between tokens 1 and 2); its mean and quantiles pool the intervals of all sequences.
Throughput is tokens per second of the machine: a step that several sequences share is charged to
each in equal parts, so that the seconds of examples add up. Decode throughput counts what comes
after the second token, end-to-end throughput everything.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from evals import stats
from harness.config.plugins import TARGET
from harness.config.settings import ALIGNED, ENTRIES, SERVER, bytes_of, recorded_defaults
from harness.engine.step_parts import PARTS
from harness.results import files
from harness.results.alarms import warnings
from harness.results.compared import FULL, for_statistics, group_means, mean_score, paired
from harness.results.fact import mean
from harness.results.facts import in_section, of_turn
from harness.results.identity import model_name, word
from harness.results.records import LeftOut, Record, Reply, StoreError
from harness.results.run_folder import INFO, SUMMARY, StoredRun, given, load
from harness.terminal.tables import percent
from methods.tiers.tier import DEVICE

SCHEMA = 11
LIKELIHOOD = "answer_nll"  # of a record's measured numbers: nats per token
MIN_WINDOWS = 24  # windows of a text below which nothing is said of how sure their difference is
OFF_BUDGET = 0.1  # of the budget: what steps read may differ from it by so much
_SETTINGS = [key for key, entry in ENTRIES.items() if entry.one_table]
# the seed comes last in titles
ONE_TABLE = ("task", "model", *sorted(_SETTINGS, key="seed".__eq__))
# settings in a summary
CONDITIONS = ("protocol", "placement", "codec", "dtype", "device", "batch", "seed")
# a model behind a server, and the source of the same checkpoint for our engine
SERVED, FILES = "harness.endpoint.source.Endpoint", "harness.models.hub.HuggingFace"
SAME_NUMBERS = ("dtype", "device")  # a Full that differs here differs by rounding alone


def summarise(
    records: Sequence[Record],
    *,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    full: Sequence[Record] | None,
    failed: Sequence[LeftOut] = (),
    skipped: Sequence[LeftOut] = (),
) -> dict[str, Any]:
    """Return the row of a run as nested values: scores from 0 to 1, seconds, bytes. `info` is
    run.json; `full`: the records of the run of Full that it is compared with.

    Scores are means over groups; `attended`, `union` (tokens, and shares of the sealed prompt; in
    `attended` also quantiles over layers, where a method reads as many as it needs), `total_tokens`
    (of prompt and answer) and traffic are means over examples; other bytes are the largest of any
    example. Times are None if the run is `simulated` or `traced`. A `failed` example counts only in
    `num_failed`, a `skipped` one in `num_skipped`.
    """
    simulated = bool(info.get("simulated", False))
    traced = config.get("trace") == "on"
    has_times = not (simulated or traced)
    return {
        "schema": SCHEMA,
        "status": info.get("status", "complete"),
        "method": info.get("method"),
        "task": info.get("task"),
        "model": model_name(config),
        "presets": info.get("presets"),
        "budget": _budget(records, config, info),
        **{key: config.get(key) for key in CONDITIONS},
        "num_examples": len(records),
        "num_failed": len(failed),
        "num_skipped": len(skipped),
        **in_section("examples", records),
        "prompt_tokens": _prompt_tokens(records),
        "score": _score(records, info),
        "full": against(records, full),
        "likelihood": likelihood(records, full),
        **dict(reversed(in_section("answers", records).items())),
        "turns": _turns(records, has_times),
        "turns_ago": _turns_ago(records),
        **_speed(records if has_times else [], int(config.get("batch") or 1)),
        "prepare_s": info.get("prepare_s"),
        "memory": in_section("held", records) | in_section("memory", records),
        "fidelity": _fidelity(records),
        "trace": _trace(records),
        "simulated": simulated,
        "traced": traced,
        "host_is_cpu": bool(info.get("host_is_cpu", False)),
        "warnings": list(warnings(records, full, info=info, failed=failed, skipped=skipped)),
    }


def _budget(
    records: Sequence[Record], config: Mapping[str, Any], info: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the budget that was asked for, as `asked` or as `bytes`, and what was read. `layers`
    is null, because no setting gives each layer a budget; it stays because files and tables of
    results have the key."""
    use, asked = info.get("budget_use") or {}, config.get("budget")
    in_bytes = bytes_of(asked)
    return {
        "asked": None if in_bytes else asked,
        "bytes": in_bytes,
        "layers": None,
        "attended": _read(records, "attended_prompt") | _over_layers(records),
        "union": _read(records, "union_prompt"),
        "capped_share": mean([record["capped_share"] for record in records]),
        "counts": use.get("counts", "prompt"),
        "extra_rows": use.get("extra_rows", 0),
        "total_tokens": mean([record["attended_total"] for record in records]),
        "not_kept": _not_kept(records, config, info),
    }


def _prompt_tokens(records: Sequence[Record]) -> dict[str, float] | None:
    tokens = [record.prompt_tokens for record in records]
    if not tokens:
        return None
    return {"min": min(tokens), "median": median(tokens), "max": max(tokens)}


def against(records: Sequence[Record], full: Sequence[Record] | None) -> dict[str, Any] | None:
    """Return the paired comparison of scores with Full's (dense attention), over the examples with
    the same prompt in both runs: mean of Full, difference, interval, p. None if there is no such
    example."""
    pairs = paired(records, full or [])
    if not pairs:
        return None
    result = stats.paired(*for_statistics(pairs))
    mean = mean_score([their for _, their in pairs])
    return {"mean": mean, "diff": result.diff, "ci95": _ends(result.ci), "p": result.p}


def _score(records: Sequence[Record], info: Mapping[str, Any]) -> dict[str, Any]:
    means = group_means(records)
    sizes = Counter(record.group for record in records)
    units = [record.independent for record in records]
    scores = [record.score for record in records]
    interval = stats.interval(scores, [record.group for record in records], units=units)
    return {
        "mean": fmean(means.values()) if means else None,
        "ci95": _ends(interval),
        "groups": {group: {"mean": mean, "n": sizes[group]} for group, mean in means.items()},
        "averages": info.get("averages") or {},
    }


def _read(records: Sequence[Record], measure: str) -> dict[str, float | None]:
    tokens = mean([record[measure] for record in records])
    return {"tokens": tokens, "share": mean([record.share(measure) for record in records])}


def _not_kept(
    records: Sequence[Record], config: Mapping[str, Any], info: Mapping[str, Any]
) -> str | None:
    """Return in words what was read instead, and why, where a run did not keep its budget: if the
    mean differs much from it, or if a prompt was read whole. Where heads read as many tokens as
    they need, the budget is an upper limit. None if it was kept, or is no share or number of the
    prompt's tokens."""
    asked, rule = config.get("budget"), config.get("budget_rule", "read")
    counts_answer = (info.get("budget_use") or {}).get("counts", "prompt") != "prompt"
    if not asked or isinstance(asked, str) or counts_answer or rule in ALIGNED:
        return None
    is_share = isinstance(asked, float)
    tokens, share = _read(records, "attended_prompt").values()
    usual = rule == "read" and not config.get("dense_layers")
    read_in_all = share if is_share else tokens
    excess = 0.0 if tokens is None or share is None or read_in_all is None else read_in_all - asked
    # which may be more than was read
    limit = not is_share or _over_layers(records)["p50"] is not None
    whole = []
    if is_share and asked < 1:
        whole = [record for record in records if (record.share("attended_prompt") or 0) >= 1]
    if usual and (excess if limit else abs(excess)) > OFF_BUDGET * asked:
        shares = f"{percent(share)} % of the prompt, not {percent(asked)} %"
        read = shares if is_share else f"{tokens:.0f} tokens of the prompt, not {asked}"
        read += (
            f" ({len(whole)} of {len(records)} prompts whole)"
            if 0 < len(whole) < len(records)
            else ""
        )
    elif whole:
        read = f"{len(whole)} of {len(records)} prompts whole, not {percent(asked)} %"
    else:
        return None
    reasons = [record["fallback"] for record in [*whole, *records]]
    dense = (config.get("method") or {}).get("dense_layers")
    usual_why = f"method.dense_layers={dense} read everything" if dense else None
    why = next(filter(None, reasons), usual_why)
    return f"read {read}: {why}" if why else f"read {read}"


def _over_layers(records: Sequence[Record]) -> dict[str, float | None]:
    """Return quantiles over layers of the share of the sealed prompt that a head read per step, as
    means over examples; None for a method that reads equally many in every step."""
    return {
        name: mean([record.share(f"attended_{name}") for record in records])
        for name in ("p10", "p50", "p90")
    }


def _fidelity(records: Sequence[Record]) -> dict[str, float | None] | None:
    """Return how close the method's steps came to exact attention, as means over examples: `recall`
    of the tokens with the largest weights, `mass` (the share of attention weight that was read),
    `error` of the output, `kl` to the next-token distributions of Full (dense attention), and the
    share of answers that are Full's. None if fidelity=0."""
    measured = [record["fidelity"] for record in records if record["fidelity"]]
    if not measured:
        return None
    means = {
        name: mean([m.get(name) for m in measured]) for name in ("recall", "mass", "error", "kl")
    }
    return means | {
        "same_as_full": fmean(float(m.get("first_difference") is None) for m in measured)
    }


def _trace(records: Sequence[Record]) -> dict[str, float] | None:
    """Return the seconds of a decode step and of its parts (engine/trace.py), medians over
    examples; None for a run without trace=on."""
    traces = [reply["trace"] for record in records for reply in record.replies if reply["trace"]]
    if not traces:
        return None
    parts = {f"{part}_s": median(trace["parts_s"][part] for trace in traces) for part in PARTS}
    return {"step_s": median(trace["step_s"] for trace in traces)} | parts


def _speed(records: Sequence[Record], batch: int) -> dict[str, Any]:
    # older batches do not say
    shares = batch == 1 or all(record["share_s"] is not None for record in records)
    first = [record.replies[0] for record in records if record["prefilled_by"] is None]
    # further questions on a context, and turns of a conversation, begin on an existing cache
    later = [
        reply for record in records for reply in record.replies[record["prefilled_by"] is None :]
    ]
    return {
        "ttft_s": quantiles(reply.ttft_s for reply in first),
        "ttft_later_s": quantiles(reply.ttft_s for reply in later),
        "tt2t_s": quantiles(reply.tt2t_s for reply in first),
        "tpot_s": quantiles(interval for record in records for interval in record.intervals_s),
        "seal_s": quantiles(reply["seal_s"] for record in records for reply in record.replies),
        "throughput_tok_s": decode_throughput(records) if shares else None,
        "e2e_tok_s": total_throughput(records) if shares else None,
    }


def _turns(records: Sequence[Record], timed: bool) -> dict[str, dict[str, Any]] | None:
    """Return what is known of each turn of the conversations, by its number from "1" on (`_turn`):
    score, times, tokens, how many histories were found in the store. None if no example has several
    turns."""
    by_turn: dict[str, list[tuple[str, Reply]]] = defaultdict(list)
    for record in records:
        for number, reply in enumerate(record.turns or (), 1):
            by_turn[str(number)].append((record.independent, reply))
    return {number: _turn(replies, timed) for number, replies in by_turn.items()} or None


def _turns_ago(records: Sequence[Record]) -> dict[str, dict[str, Any]] | None:
    """Return mean scores by how many turns before the question the fact was told (0 to 3, then 4-7,
    8-15 and so on); None if the task does not say."""
    by_start: dict[int, list[tuple[str, Reply]]] = defaultdict(list)
    for record in records:
        for reply in record.replies:
            if (ago := reply.data.get("turns_ago")) is not None:
                # 0 to 3, then 4 to 7, 8 to 15 and so on
                start = ago if ago < 4 else 1 << ago.bit_length() - 1
                by_start[start].append((record.independent, reply))
    names = {
        start: str(start) if start < 4 else f"{start}-{2 * start - 1}" for start in sorted(by_start)
    }
    return {name: _scored(by_start[start]) for start, name in names.items()} or None


def _turn(replies: Sequence[tuple[str, Reply]], timed: bool) -> dict[str, Any]:
    """Return the numbers of one turn over all conversations. `replies`: (unit, reply), as in
    `_scored`."""
    own = [reply for _, reply in replies]
    clocked = own if timed else []
    return _scored(replies) | {
        "ttft_s": quantiles(reply.ttft_s for reply in clocked)["p50"],
        "tokens": fmean(reply.history_tokens + reply.prompt_tokens for reply in own),
        **of_turn(own, clocked),
    }


def _scored(replies: Sequence[tuple[str, Reply]]) -> dict[str, Any]:
    """Return count, mean score and interval of replies. Each is given with its unit, the id of the
    text or example that statistics count as one."""
    units, scores = [unit for unit, _ in replies], [reply.score for _, reply in replies]
    interval = stats.interval(scores, [""] * len(scores), units=units)
    return {"n": len(replies), "score": fmean(scores), "ci95": _ends(interval)}


def _ends(interval: stats.Interval | None) -> list[float] | None:
    return [interval.low, interval.high] if interval else None


Quantiles = dict[str, float | None]


def quantiles(values: Iterable[float | None]) -> Quantiles:
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "p50": None, "p90": None}
    p50, p90 = np.quantile(known, [0.5, 0.9])
    return {"mean": float(np.mean(known)), "p50": float(p50), "p90": float(p90)}


def decode_throughput(records: Sequence[Record]) -> float | None:
    """Return the tokens per second of the machine after each answer's second token; None if no
    answer has a third. Old records do not say their share of shared steps; they ran alone."""
    longer = [reply for record in records for reply in record.replies if len(reply.token_s) > 2]
    alone = [reply.token_s[-1] - reply.token_s[1] for reply in longer]
    shares = [reply["decode_share_s"] for reply in longer]
    seconds = sum(own if share is None else share for own, share in zip(alone, shares, strict=True))
    return sum(len(reply.token_s) - 2 for reply in longer) / seconds if seconds else None


def total_throughput(records: Sequence[Record]) -> float | None:
    """Return the tokens per second of the machine, with the time of prefill, seal and question
    included."""
    seconds = sum(
        record.token_s[-1] if record["share_s"] is None else record["share_s"] for record in records
    )
    return sum(len(record.token_s) for record in records) / seconds if seconds else None


def likelihood(records: Sequence[Record], full: Sequence[Record] | None) -> dict[str, Any] | None:
    """Return how likely a run makes the right answers, as mean negative log-likelihoods (costs) in
    nats per token; None if no example has one. `n`: the examples that have one; `mean`: the mean
    over groups of the means in `groups`; `full`: the paired comparison with Full.

    In `full`, `diff`, `ci95` and `p` come from the signed-rank test (evals/stats.py); `mean_diff`
    is the mean difference. Below `MIN_WINDOWS` windows of a text, interval and p are None.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if (cost := cost_of(record)) is not None:
            groups[record.group].append(cost)
    if not groups:
        return None
    by_group = {group: {"mean": fmean(costs), "n": len(costs)} for group, costs in groups.items()}
    return {
        "n": sum(map(len, groups.values())),
        "mean": fmean(group["mean"] for group in by_group.values()),
        "groups": by_group,
        "full": _likelihood_beside(records, full or []),
    }


def cost_of(record: Record) -> float | None:
    """Return the negative log-likelihood of the right answer in nats per token. If the text was fed
    by force in place of an answer, the example's own details hold it."""
    return record.details.get("nll") if record.stop == "forced" else record[LIKELIHOOD]


def _likelihood_beside(records: Sequence[Record], full: Sequence[Record]) -> dict[str, Any] | None:
    """Return the paired comparison of likelihoods over the examples for which both runs have one;
    None if there are none."""
    both = [
        (cost, fulls, record.independent)
        for record, other in paired(records, full)
        if (cost := cost_of(record)) is not None and (fulls := cost_of(other)) is not None
    ]
    if not both:
        return None
    shift = stats.shift(*zip(*both, strict=True))
    enough = shift.n >= MIN_WINDOWS or records[0].stop != "forced"
    return {
        "n": shift.n,
        "mean_diff": shift.mean,
        "diff": shift.diff,
        "ci95": _ends(shift.ci) if enough else None,
        "p": shift.p if enough else None,
    }


class Neighbours:
    """Finds the runs of Full (dense attention, the baseline) of the same task and settings as a
    run, among those that are `known` or in the same results folder. Each folder is read once."""

    def __init__(self, known: Sequence[StoredRun] = ()) -> None:
        self._read = {run.folder.resolve(): run for run in known}
        self._known = _fulls(known)
        self._beside: dict[Path, dict[str, list[StoredRun]]] = {}  # by results folder

    def known(self, run: StoredRun) -> list[StoredRun]:
        """Return the known runs of Full that have the task and settings of `run`."""
        return self._known.get(_settings(run), [])

    def beside(self, run: StoredRun) -> list[StoredRun]:
        """Return the readable runs of Full in the results folder of `run` that have its task and
        settings."""
        root = run.folder.resolve().parent
        if root not in self._beside:
            folders = sorted(path.parent for path in root.glob(f"*-{FULL}-*/{INFO}"))
            for folder in folders:
                with suppress(StoreError):
                    self._read[folder] = self._read.get(folder) or load(folder)
            self._beside[root] = _fulls(
                [self._read[folder] for folder in folders if folder in self._read]
            )
        return self._beside[root].get(_settings(run), [])


def _fulls(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return the runs of Full, the baseline, that have examples, by their task and settings. Of
    copies of one run, the first stands for all."""
    first: dict[str, StoredRun] = {}
    for run in runs:
        if method_of(run) == FULL and run.records:
            prompts = [(record.id, record.prompt_sha256) for record in run.records]
            same = {
                "config": run.config,
                "given": given(run),
                "code": _code(run),
                "prompts": prompts,
            }
            first.setdefault(files.canonical(same), run)
    fulls = defaultdict[str, list[StoredRun]](list)
    for run in first.values():
        fulls[_settings(run)].append(run)
    return fulls


def summary_of(run: StoredRun, full: StoredRun | None) -> dict[str, Any]:
    """Return the summary of `run`, compared with the run of Full in `full`, if any."""
    records, info = full.records if full else None, run.info | {"status": run.status}
    summary = summarise(
        run.records,
        config=run.config,
        info=info,
        full=records,
        failed=run.failed,
        skipped=run.skipped,
    )
    if full and summary["full"]:
        summary["full"] |= {
            "folder": full.folder.name,
            "identity_sha256": full.info.get("identity_sha256"),
        }
    return summary


def write_summary(run: StoredRun, summary: Mapping[str, Any]) -> None:
    """Write summary.json if it has changed. It is a copy for other programs; nothing here reads it
    back."""
    copy = json.loads(json.dumps(summary))
    with suppress(StoreError):
        if files.read_json(run.folder / SUMMARY) == copy:
            return
    files.write_json(run.folder / SUMMARY, copy)


def reference(run: StoredRun, fulls: Sequence[StoredRun]) -> StoredRun | None:
    """Return the run of Full (dense attention, the baseline) that `run` is compared with, or None.
    `fulls`: those of the same task and settings. It must have the same model, prompts, right
    answers, dtype and device. Of several, the one with the same code is taken, then the one with
    most settings in common, then the one with most examples in common."""

    def nearness(full: StoredRun) -> tuple[bool, int, int]:
        ours, theirs = _code(run), _code(full)
        same_code = all(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())
        shared = sum(run.config.get(name) == full.config.get(name) for name in run.config)
        return same_code, shared, len(paired(run.records, full.records))

    fit = [full for full in fulls if method_of(run) != FULL and not unlike(run, full)]
    return max(fit, key=nearness, default=None)


def _code(run: StoredRun) -> dict[str, Any]:
    """Return the versions of the code of a run by module, and that of the shared core."""
    identity = run.info.get("identity") or {}
    return {"core": identity.get("core")} | (identity.get("code") or {})


def not_held(run: StoredRun, fulls: Sequence[StoredRun]) -> str | None:
    """Return the reason why `reference` finds no run of Full, the baseline, for `run` among
    `fulls`, which have its task and settings; None if there are none, or `run` is a Full."""
    reasons = [(unlike(run, full), full) for full in fulls if method_of(run) != FULL]
    if not reasons:
        return None
    differences, full = min(reasons, key=lambda pair: len(pair[0]))
    return f"{full.folder.name} differs in {' and '.join(differences)}"


def unlike(run: StoredRun, full: StoredRun) -> list[str]:
    """Return, in words, the reasons why a run cannot be compared with a run of Full example by
    example; empty if it can. A Full with its keys and values elsewhere than on the device is no
    baseline for times."""
    ours, theirs = given(run), given(full)
    reasons = [
        word(key) + " (an older run does not say)" * (None in (ours[key], theirs[key]))
        for key in ours
        if ours[key] != theirs[key]
    ]
    differing = [key for key in SAME_NUMBERS if run.config.get(key) != full.config.get(key)]
    # nobody knows those of a server
    others = [] if run.config.get("device") == SERVER else differing
    reasons += [f"{key} ({full.config.get(key)})" for key in others]
    if (placement := full.config.get("placement", DEVICE)) != DEVICE:
        reasons.append(f"placement ({placement})")
    if not reasons and run.records and not paired(run.records, full.records):
        reasons.append("every example")
    return reasons


def combination(run: StoredRun) -> str:
    """Return a key that is the same for runs that may stand in one table: settings, model, prompts
    and right answers."""
    return _settings(run) + files.canonical(given(run))


def _settings(run: StoredRun) -> str:
    usual = recorded_defaults()
    known = {name: run.config.get(name, usual.get(name)) for name in ONE_TABLE}
    # one model, whether our engine or a server runs it
    model = known["model"]
    if isinstance(model, Mapping):
        served = {TARGET: FILES, "name": model_name(run.config)}
        own = {key: value for key, value in model.items() if value not in (None, False)}
        known["model"] = served if model.get(TARGET) == SERVED else own
    # older runs lack keys
    return files.canonical(known | {"generation": usual["generation"] | known["generation"]})


def method_of(run: StoredRun) -> str:
    return str(run.info.get("method"))
