"""From the lines of a run to its one row: `summary.json`, derived and never the source.

Times and rates have one definition for every method. TPOT: time per token after the second (the seal lies between token
1 and 2); mean and quantiles pool the single intervals of all sequences. Throughput: tokens over the machine's seconds.
Of a step that several sequences share, each is charged an equal part, so that seconds add up over examples. Decode
throughput counts what is behind the second token, end-to-end throughput everything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from evals import stats
from evals.base import Task
from harness.config import plugins
from harness.engine.step_parts import PARTS
from harness.results.alarms.run import warnings
from harness.results.compared import for_statistics, group_means, mean_score, paired
from harness.results.identity import model_name
from harness.results.likelihood import likelihood
from harness.results.measures import over_examples, over_known
from harness.results.records import HISTORY_S, PEAKS, FailedExample, Record, Reply
from methods.tiers.tier import TIERS, bytes_key

SCHEMA = 11


def summarise(
    records: Sequence[Record],
    *,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    full: Sequence[Record] | None,
    failed: Sequence[FailedExample] = (),
) -> dict[str, Any]:
    """Scores 0-1, seconds, bytes. `info` is run.json: names, status, stamps, and what the task says of itself.

    Means: score over groups, `attended` and `union` over examples (tokens, and share of what was sealed), traffic too;
    other bytes are the largest of any example. Times are null where the run is `simulated` or
    `traced`. An example that `failed` counts in `num_failed` alone.
    """
    simulated = bool(info.get("simulated", False))
    traced = config.get("trace") == "on"
    beside = against(records, full)
    return {
        "schema": SCHEMA,
        "status": info.get("status", "complete"),
        "method": info.get("method"),
        "task": info.get("task"),
        "model": model_name(config),
        "presets": info.get("presets"),
        "budget": _asked(config) | {what: _read(records, what) for what in ("attended", "union")},
        **{key: config.get(key) for key in ("protocol", "placement", "codec", "dtype", "device", "batch", "seed")},
        "num_examples": len(records),
        "num_failed": len(failed),
        "prompt_tokens": _lengths([record.prompt_tokens for record in records]),
        "score": _score(records, config.get("task")),
        "full": beside,
        "likelihood": likelihood(records, full),
        "prefills": sum(record.prefilled_by is None for record in records),
        "lost_turns": over_known(sum, [record.lost_turns for record in records]),
        "recomputed": sum(record.recomputed for record in records),
        "turns": _turns(records, timed=not (simulated or traced)),
        "turns_ago": _turns_ago(records),
        **_speed([] if simulated or traced else records, int(config.get("batch") or 1)),
        "prepare_s": info.get("prepare_s"),
        "memory": _memory(records),
        "fidelity": _fidelity(records),
        "trace": _trace(records),
        "simulated": simulated,
        "traced": traced,
        "host_is_cpu": bool(info.get("host_is_cpu", False)),
        "warnings": list(warnings(records, full, config=config, info=info, failed=failed)),
    }


def against(records: Sequence[Record], full: Sequence[Record] | None) -> dict[str, Any] | None:
    """Paired with Full over the examples that both ran on the same prompt; null where there are none."""
    pairs = paired(records, full or [])
    if not pairs:
        return None
    result = stats.paired(*for_statistics(pairs))
    mean = mean_score([their for _, their in pairs])
    return {"mean": mean, "diff": result.diff, "ci95": _ends(result.ci), "p": result.p}


def _lengths(tokens: Sequence[int]) -> dict[str, float] | None:
    return {"min": min(tokens), "median": median(tokens), "max": max(tokens)} if tokens else None


def _asked(config: Mapping[str, Any]) -> dict[str, Any]:
    """`layers` stands in place of `asked` where each layer has its own."""
    layers = list(config.get("layer_budgets") or []) or None
    asked = None if layers else config.get("budget")
    return {"asked": asked, "bytes": config.get("budget_bytes"), "layers": layers}


def _score(records: Sequence[Record], task: Any) -> dict[str, Any]:
    means = group_means(records)
    sizes = Counter(record.group for record in records)
    units = [record.independent for record in records]
    interval = stats.interval([r.score for r in records], [r.group for r in records], units=units)
    return {
        "mean": fmean(means.values()) if means else None,
        "ci95": _ends(interval),
        "groups": {group: {"mean": mean, "n": sizes[group]} for group, mean in means.items()},
        "averages": _averages(records, means, task),
    }


def _averages(records: Sequence[Record], groups: Mapping[str, float], task: Any) -> dict[str, float]:
    """Return what a task makes of its groups: category means, weighted averages, perplexity of the whole text ...
    `groups` are their means, `task` its configuration; empty where the task's class cannot be had here."""
    if not records or not isinstance(task, Mapping):
        return {}
    try:
        made: Task = plugins.build(task, "task")
    except ValueError:  # a run of another version, or of a plug-in that is not on this machine
        return {}
    details: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.details.items():
            if isinstance(value, (int, float)):
                details[name].append(value)
    return made.averages(groups, {name: fmean(values) for name, values in details.items()})


def _read(records: Sequence[Record], what: str) -> dict[str, float | None]:
    tokens, share = [r.measured.get(f"{what}_prompt") for r in records], [getattr(r, f"{what}_share") for r in records]
    return {"tokens": over_known(fmean, tokens), "share": over_known(fmean, share)}


def _fidelity(records: Sequence[Record]) -> dict[str, float | None] | None:
    """Means over examples of what harness/engine/fidelity.py measured; null where it was off."""
    found = [record.fidelity for record in records if record.fidelity]
    if not found:
        return None
    means = {name: over_known(fmean, [one.get(name) for one in found]) for name in ("recall", "mass", "error", "kl")}
    return means | {"same_as_full": fmean(float(one.get("first_difference") is None) for one in found)}


def _trace(records: Sequence[Record]) -> dict[str, float] | None:
    """Seconds of a decode step and of its parts, medians over examples (engine/trace.py); null where it was off."""
    found = [reply.trace for record in records for reply in record.replies if reply.trace]
    if not found:
        return None
    parts = {f"{part}_s": median(one["parts_s"][part] for one in found) for part in PARTS}
    return {"step_s": median(one["step_s"] for one in found)} | parts


def _speed(records: Sequence[Record], batch: int) -> dict[str, Any]:
    shares = batch == 1 or all(record.share_s is not None for record in records)  # older batches do not say
    first = [record.replies[0] for record in records if record.prefilled_by is None]
    return {
        "ttft_s": quantiles(reply.ttft_s for reply in first),
        "ttft_later_s": quantiles(reply.ttft_s for reply in _later(records)),
        "tt2t_s": quantiles(reply.tt2t_s for reply in first),
        "tpot_s": quantiles(interval for record in records for interval in record.intervals_s),
        "seal_s": quantiles(reply.seal_s for record in records for reply in record.replies),
        "throughput_tok_s": decode_throughput(records) if shares else None,
        "e2e_tok_s": total_throughput(records) if shares else None,
    }


def _later(records: Sequence[Record]) -> Iterator[Reply]:
    """Yield replies that began on an existing cache: further questions on a context and turns of a conversation."""
    for record in records:
        yield from record.replies[record.prefilled_by is None :]


def _turns(records: Sequence[Record], timed: bool) -> dict[str, dict[str, Any]] | None:
    """Return by turn the mean score with its interval, median seconds to the first token from the turn's own start,
    tokens when it was asked; where how many histories were found, mean tokens reused and computed, and median seconds
    waited for, hidden and to save; null where no example has several."""
    found: dict[str, list[tuple[str, Reply]]] = defaultdict(list)
    for record in records:
        for number, reply in enumerate(record.turns or (), 1):
            found[str(number)].append((record.independent, reply))
    return {number: _turn(replies, timed) for number, replies in found.items()} or None


def _turns_ago(records: Sequence[Record]) -> dict[str, dict[str, Any]] | None:
    """Return scores by the number of turns between a fact and the question about it; null where the task tells
    nothing."""
    found: dict[int, list[tuple[str, Reply]]] = defaultdict(list)
    for record in records:
        for reply in record.replies:
            if (ago := reply.data.get("turns_ago")) is not None:
                found[_class(ago)].append((record.independent, reply))
    return {_class_name(start): _scored(replies) for start, replies in sorted(found.items())} or None


def _class(turns: int) -> int:
    """The first of a class: 0 to 3 by themselves, then 4 to 7, 8 to 15 and so on."""
    return turns if turns < 4 else 1 << turns.bit_length() - 1


def _class_name(start: int) -> str:
    return str(start) if start < 4 else f"{start}-{2 * start - 1}"


def _turn(replies: Sequence[tuple[str, Reply]], timed: bool) -> dict[str, Any]:
    """replies: as in `_scored`"""
    own = [reply for _, reply in replies]
    clocked = own if timed else []
    return _scored(replies) | {
        "ttft_s": quantiles(reply.ttft_s for reply in clocked)["p50"],
        "tokens": fmean(reply.history_tokens + reply.prompt_tokens for reply in own),
        "lost_turns": over_known(sum, [reply.lost_turns for reply in own]),
        "hits": dict(sorted(Counter(reply.hit_tier for reply in own if reply.hit_tier).items())),
        **{name: over_known(fmean, [getattr(one, name) for one in own]) for name in ("reused_tokens", "new_tokens")},
        **{name: over_known(median, [getattr(one, name) for one in clocked]) for name in HISTORY_S},
    }


def _scored(replies: Sequence[tuple[str, Reply]]) -> dict[str, Any]:
    """replies: each with the unit that statistics count as one."""
    units, scores = [unit for unit, _ in replies], [reply.score for _, reply in replies]
    interval = stats.interval(scores, [""] * len(scores), units=units)
    return {"n": len(replies), "score": fmean(scores), "ci95": _ends(interval)}


def _memory(records: Sequence[Record]) -> dict[str, float | None]:
    largest = {bytes_key(tier): over_known(max, [record.kv.get(tier, 0) for record in records]) for tier in TIERS}
    peaks = ("device_peak_bytes", "host_peak_bytes")
    largest |= {name: over_known(max, [getattr(record, name) for record in records]) for name in peaks}
    largest |= {f"{name}_peak_bytes": over_known(max, [(r.peaks or {}).get(name) for r in records]) for name in PEAKS}
    return largest | over_examples("memory", [record.measured for record in records])


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
    """Tokens per second behind the second; null where no sequence came to a third."""
    longer = [reply for record in records for reply in record.replies if len(reply.token_s) > 2]
    seconds = sum(reply.decode_machine_s for reply in longer)
    return sum(len(reply.token_s) - 2 for reply in longer) / seconds if seconds else None


def total_throughput(records: Sequence[Record]) -> float | None:
    """Tokens per second with prefill, seal and question inside."""
    seconds = sum(record.machine_s for record in records)
    return sum(len(record.token_s) for record in records) / seconds if seconds else None
