"""From the lines of a run to its one row: `summary.json`, derived and never the source."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any

from evals import stats
from harness.engine.phases import PARTS
from harness.results import timing
from harness.results.averages import averages
from harness.results.records import Record
from harness.terminal.notices import SLOW_FP16

SCHEMA = 6
ALPHA = stats.ALPHA
TELLING = 100  # tokens of answers that are not fully right
FLOOR = 0.1  # a Full this close to guessing leaves no room to lose


def summarise(
    records: Sequence[Record],
    *,
    config: Mapping[str, Any],
    info: Mapping[str, Any],
    full: Sequence[Record] | None,
) -> dict[str, Any]:
    """Scores 0-1, seconds, bytes. `info` is run.json: names, status, stamps, and what the task says of itself.

    Means: score over groups, `attended` and `union` over examples (tokens, and share of what was sealed), traffic too;
    other bytes are the largest of any example. Times as in results/timing.py; null where the run is `simulated` or
    `traced`.
    """
    simulated = bool(info.get("simulated", False))
    traced = config.get("trace") == "on"
    chance = info.get("task_info", {}).get("chance", 0.0)
    beside = against(records, full)
    return {
        "schema": SCHEMA,
        "status": info.get("status", "complete"),
        "method": info.get("method"),
        "task": info.get("task"),
        "model": model_name(config),
        "presets": info.get("presets"),
        "budget": _asked(config) | {what: _read(records, what) for what in ("attended", "union")},
        **{key: config.get(key) for key in ("protocol", "placement", "dtype", "device", "batch", "seed")},
        "num_examples": len(records),
        "prompt_tokens": _lengths([record.prompt_tokens for record in records]),
        "score": _score(records, config.get("task")),
        "full": beside,
        **_speed([] if simulated or traced else records, int(config.get("batch") or 1)),
        "memory": _memory(records),
        "fidelity": _fidelity(records),
        "trace": _trace(records),
        "simulated": simulated,
        "traced": traced,
        "host_is_cpu": bool(info.get("host_is_cpu", False)),
        "warnings": [
            *_warnings(records, full, chance, info.get("method") == "full"),
            *([SLOW_FP16] if (config.get("device"), config.get("dtype")) == ("cpu", "fp16") else []),
            *_beside_full(records, full, beside),
        ],
    }


def against(records: Sequence[Record], full: Sequence[Record] | None) -> dict[str, Any] | None:
    """Paired with Full over the examples that both ran on the same prompt; null where there are none."""
    pairs = paired(records, full or [])
    if not pairs:
        return None
    ours, theirs, groups = _columns(pairs)
    result = stats.paired(ours, theirs, groups)
    mean = fmean(group_means([their for _, their in pairs]).values())
    return {"mean": mean, "diff": result.diff, "ci95": _ends(result.ci), "p": result.p}


def detectable(records: Sequence[Record], full: Sequence[Record], comparisons: int) -> float | None:
    """The loss against Full that these examples would show with 80 % power, as one of so many comparisons."""
    pairs = paired(records, full)
    return stats.detectable(*_columns(pairs), comparisons=comparisons) if pairs else None


def paired(records: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Examples of both runs with the same id and the same prompt."""
    known = {(other.id, other.prompt_sha256): other for other in others}
    return [(r, known[r.id, r.prompt_sha256]) for r in records if (r.id, r.prompt_sha256) in known]


def group_means(records: Sequence[Record]) -> dict[str, float]:
    return {group: fmean(scores) for group, scores in _by_group(records).items()}


def mean_score(records: Sequence[Record]) -> float:
    """Mean of group means."""
    return fmean(group_means(records).values())


def model_name(config: Mapping[str, Any]) -> str:
    """The hub's name or the folder, else the class, with the shape of random weights."""
    model = config.get("model")
    if isinstance(model, Mapping):
        kind = str(model.get("_target_", "unknown")).rpartition(".")[2]
        model = model.get("name") or " ".join(filter(None, (kind, model.get("shape"))))
    return str(model)


def _lengths(tokens: Sequence[int]) -> dict[str, float] | None:
    return {"min": min(tokens), "median": median(tokens), "max": max(tokens)} if tokens else None


def _asked(config: Mapping[str, Any]) -> dict[str, Any]:
    """`layers` stands in place of `asked` where each layer has its own."""
    layers = list(config.get("layer_budgets") or []) or None
    return {"asked": None if layers else config.get("budget"), "layers": layers}


def _score(records: Sequence[Record], task: Any) -> dict[str, Any]:
    means = group_means(records)
    sizes = Counter(record.group for record in records)
    interval = stats.interval([record.score for record in records], [record.group for record in records])
    return {
        "mean": fmean(means.values()) if means else None,
        "ci95": _ends(interval),
        "groups": {group: {"mean": mean, "n": sizes[group]} for group, mean in means.items()},
        "averages": averages(records, means, task),
    }


def _read(records: Sequence[Record], what: str) -> dict[str, float | None]:
    tokens, share = ([getattr(r, f"{what}_{name}") for r in records] for name in ("prompt", "share"))
    return {"tokens": _known(fmean, tokens), "share": _known(fmean, share)}


def _fidelity(records: Sequence[Record]) -> dict[str, float | None] | None:
    """Means over examples of what harness/engine/fidelity.py measured; null where it was off."""
    found = [record.fidelity for record in records if record.fidelity]
    if not found:
        return None
    means = {name: _known(fmean, [one.get(name) for one in found]) for name in ("recall", "mass", "error", "kl")}
    return means | {"same_as_full": fmean(float(one.get("first_difference") is None) for one in found)}


def _trace(records: Sequence[Record]) -> dict[str, float] | None:
    """Seconds of a decode step and of its parts, medians over examples (engine/trace.py); null where it was off."""
    found = [record.trace for record in records if record.trace]
    if not found:
        return None
    parts = {f"{part}_s": median(one["parts_s"][part] for one in found) for part in PARTS}
    return {"step_s": median(one["step_s"] for one in found)} | parts


def _speed(records: Sequence[Record], batch: int) -> dict[str, Any]:
    return {
        "ttft_s": timing.quantiles(record.ttft_s for record in records),
        "tt2t_s": timing.quantiles(record.tt2t_s for record in records),
        "tpot_s": timing.quantiles(interval for record in records for interval in record.intervals_s),
        "throughput_tok_s": timing.decode_throughput(records, batch),
        "e2e_tok_s": timing.total_throughput(records, batch),
    }


def _memory(records: Sequence[Record]) -> dict[str, float | None]:
    sizes = ("kv_device_bytes", "kv_host_bytes", "device_peak_bytes", "host_peak_bytes")
    largest = {name: _known(max, [getattr(record, name) for record in records]) for name in sizes}
    means = ("moved_bytes_per_step", "hit_rate")
    return largest | {name: _known(fmean, [getattr(record, name) for record in records]) for name in means}


def _warnings(
    records: Sequence[Record], full: Sequence[Record] | None, chance: float | None, is_full: bool
) -> Iterator[str]:
    """What a reader must know before believing the row."""
    if not records:
        yield "no example was run"
        return
    if chance is not None:
        yield from _floor(records if is_full else full or [], chance)
    n = len(records)
    for reason, count in Counter(r.fallback for r in records if r.fallback).items():
        yield f"the method fell back on {count} of {n} examples: {reason}"
    counts = {
        "ended before the cache was sealed: the method did nothing there": sum(not r.sealed for r in records),
        "have no TPOT: fewer than 3 tokens": sum(r.tpot_s is None for r in records),
        "ran into the token limit": sum(r.stop == "length" for r in records),
    }
    yield from (f"{count} of {n} examples {what}" for what, count in counts.items() if count)
    for warning, count in _alike([warning for r in records for warning in r.warnings]):
        yield f"{count} of {n} examples: {warning}"


def _alike(warnings: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Warnings that differ in their numbers alone as one, with the span of each number."""
    kinds: dict[tuple[str, ...], list[list[int]]] = defaultdict(list)
    for warning in warnings:
        words = tuple(re.split(r"\d+", warning))
        kinds[words].append([int(number) for number in re.findall(r"\d+", warning)])
    for words, numbers in kinds.items():
        spans = [" to ".join(map(str, sorted({min(column), max(column)}))) for column in zip(*numbers, strict=True)]
        yield "".join(chain.from_iterable(zip(words, [*spans, ""], strict=True))), len(numbers)


def _floor(full: Sequence[Record], chance: float) -> Iterator[str]:
    """Where Full itself fails, every method looks as good as Full."""
    means = group_means(full)
    low = [group for group, mean in means.items() if mean <= chance + FLOOR]
    if means and fmean(means.values()) <= chance + FLOOR:
        share = 100 * fmean(means.values())
        yield f"Full scores {share:.1f}, near the {100 * chance:.0f} of guessing: methods cannot be told apart here"
    elif low:
        yield f"Full is near guessing in {len(low)} of {len(means)} groups: {', '.join(low)}"


def _beside_full(
    records: Sequence[Record], full: Sequence[Record] | None, beside: Mapping[str, Any] | None
) -> Iterator[str]:
    if full is None:
        return
    pairs = paired(records, full)
    if len(pairs) < len(records):
        yield f"compared with Full on {len(pairs)} of {len(records)} examples: on the others Full has no same prompt"
    if beside and beside["diff"] > 0 and beside["p"] < ALPHA:
        yield f"scores above Full (p = {beside['p']:.2g}): look for a bug in either before you believe it"
    same = all(partial(ours) and ours.said == theirs.said for ours, theirs in pairs)
    if same and telling([ours for ours, _ in pairs]):
        yield f"all {len(pairs)} outputs are Full's though only a part was attended: check that the method really ran"


def telling(records: Sequence[Record]) -> bool:
    """Whether equal outputs are worth an alarm. Right answers are alike whoever gives them; wrong ones and free text
    part sooner or later."""
    return sum(len(record.tokens) for record in records if record.score < 1) >= TELLING


def partial(record: Record) -> bool:
    """Whether less than all sealed tokens was attended."""
    return record.attended_share is not None and record.attended_share < 1


def _columns(pairs: Sequence[tuple[Record, Record]]) -> tuple[list[float], list[float], list[str]]:
    return [a.score for a, _ in pairs], [b.score for _, b in pairs], [a.group for a, _ in pairs]


def _by_group(records: Sequence[Record]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record.score)
    return groups


def _ends(interval: stats.Interval | None) -> list[float] | None:
    return [interval.low, interval.high] if interval else None


def _known(reduce: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return reduce(known) if known else None
