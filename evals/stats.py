"""Statistics of scores: intervals, exact paired tests, Holm's correction, what difference could be seen at all.

The statistic is always the mean of group means, as in the summary; examples are resampled within their group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

RESAMPLES = 10_000
EXACT_FLIPS = 16  # up to 2^16 sign patterns are enumerated, beyond them as many as RESAMPLES are drawn
_CHUNK = 1 << 20  # draws held at a time


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float
    kind: Literal["wilson", "bootstrap", "adjusted_wald"]


@dataclass(frozen=True, slots=True)
class Paired:
    """A method against a baseline on the same examples."""

    diff: float  # method - baseline
    ci: Interval | None  # None where a group is too small to tell
    p: float
    test: Literal["mcnemar_exact", "sign_flip_exact", "sign_flip_monte_carlo"]
    detectable: float | None  # difference that such a comparison finds with 80 % power


def interval(scores: Sequence[float], groups: Sequence[str], *, level: float = 0.95, seed: int = 0) -> Interval | None:
    """Of the mean of group means: Wilson where all scores are 0 or 1, else a percentile bootstrap.

    None where there is no score, or a group with one score that is neither 0 nor 1.

    >>> interval([1, 1, 1, 0], ["a"] * 4)
    Interval(low=0.30064184258240184, high=0.9544127391902995, kind='wilson')
    """
    parts = _split(scores, groups)
    if not parts:
        return None
    if _are_binary(parts):
        return _wilson(_mean(parts), _effective_n(parts), level)
    return _bootstrap(parts, level, seed)


def paired(scores: Sequence[float], baseline: Sequence[float], groups: Sequence[str], *, seed: int = 0) -> Paired:
    """Two-sided test that method and baseline are exchangeable on each example, with the difference's 95 % interval.

    McNemar's exact test, on all pairs together, where all scores are 0 or 1; else sign flips of the differences.
    """
    ours, theirs = _split(scores, groups), _split(baseline, groups)
    if not ours:
        raise ValueError("a paired comparison needs at least one example that both runs scored")
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    p, test = _test(ours, theirs, differences, seed)
    binary = test == "mcnemar_exact"
    ci = _adjusted_wald(differences, 0.95) if binary else _bootstrap(differences, 0.95, seed)
    return Paired(_mean(differences), ci, p, test, _detectable(differences, power=0.8, alpha=0.05))


def p_value(scores: Sequence[float], baseline: Sequence[float], *, seed: int = 0) -> float:
    """`paired`'s p for one group, without its interval."""
    ours, theirs = (_split(values, [""] * len(values)) for values in (scores, baseline))
    return _test(ours, theirs, [a - b for a, b in zip(ours, theirs, strict=True)], seed)[0]


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that control the family-wise error (Holm 1979), in the given order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        floor = max(floor, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = floor
    return adjusted


def smallest_detectable(
    differences: Sequence[float], groups: Sequence[str], *, power: float = 0.8, alpha: float = 0.05
) -> float | None:
    """Smallest true mean difference that a two-sided paired test finds with probability `power` (normal theory).

    None where the spread is unknown: a group of one, or no difference at all.
    """
    return _detectable(_split(differences, groups), power, alpha)


def _split(scores: Sequence[float], groups: Sequence[str]) -> list[Floats]:
    """One array a group, groups in the order of their first example."""
    if len(scores) != len(groups):
        raise ValueError(f"{len(scores)} scores for {len(groups)} groups: give each example one of both")
    parts: dict[str, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        parts.setdefault(group, []).append(float(score))
    arrays = [np.array(part) for part in parts.values()]
    if not all(np.isfinite(part).all() for part in arrays):
        raise ValueError("a score is not finite: statistics need finite scores")
    return arrays


def _mean(parts: Sequence[Floats]) -> float:
    return float(np.mean([part.mean() for part in parts]))


def _detectable(differences: Sequence[Floats], power: float, alpha: float) -> float | None:
    if not differences or min(map(len, differences)) < 2:
        return None
    variance = sum(float(part.var(ddof=1)) / len(part) for part in differences) / len(differences) ** 2
    factor = float(stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(power))
    return factor * math.sqrt(variance) if variance > 0 else None


def _are_binary(parts: Sequence[Floats]) -> bool:
    return all(bool(((part == 0) | (part == 1)).all()) for part in parts)


def _effective_n(parts: Sequence[Floats]) -> float:
    """Independent examples worth the mean of group means: all of them where groups are equally large."""
    return len(parts) ** 2 / sum(1 / len(part) for part in parts)


def _wilson(share: float, n: float, level: float) -> Interval:
    z = float(stats.norm.ppf((1 + level) / 2))
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Interval(max(0.0, centre - half), min(1.0, centre + half), "wilson")


def _bootstrap(parts: Sequence[Floats], level: float, seed: int) -> Interval | None:
    if min(map(len, parts)) < 2:
        return None
    rng = np.random.default_rng(seed)
    means = np.mean([_resampled_means(part, rng) for part in parts], axis=0)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), "bootstrap")


def _resampled_means(part: Floats, rng: np.random.Generator) -> Floats:
    step = max(1, _CHUNK // len(part))
    counts = [min(step, RESAMPLES - start) for start in range(0, RESAMPLES, step)]
    return np.concatenate([part[rng.integers(len(part), size=(count, len(part)))].mean(axis=1) for count in counts])


def _adjusted_wald(differences: Sequence[Floats], level: float) -> Interval:
    """Of a difference of paired shares, one pair added to either kind of discordance (Bonett and Price 2012)."""
    n = _effective_n(differences) + 2
    better = (_mean([(part > 0).astype(float) for part in differences]) * (n - 2) + 1) / n
    worse = (_mean([(part < 0).astype(float) for part in differences]) * (n - 2) + 1) / n
    half = float(stats.norm.ppf((1 + level) / 2)) * math.sqrt((better + worse - (better - worse) ** 2) / n)
    return Interval(max(-1.0, better - worse - half), min(1.0, better - worse + half), "adjusted_wald")


def _test(
    ours: Sequence[Floats], theirs: Sequence[Floats], differences: Sequence[Floats], seed: int
) -> tuple[float, Literal["mcnemar_exact", "sign_flip_exact", "sign_flip_monte_carlo"]]:
    return _mcnemar(differences) if _are_binary([*ours, *theirs]) else _sign_flip(differences, seed)


def _mcnemar(differences: Sequence[Floats]) -> tuple[float, Literal["mcnemar_exact"]]:
    better = sum(int((part > 0).sum()) for part in differences)
    worse = sum(int((part < 0).sum()) for part in differences)
    test: Any = stats.binomtest(better, better + worse) if better + worse else None
    return (float(test.pvalue) if test else 1.0), "mcnemar_exact"


def _sign_flip(
    differences: Sequence[Floats], seed: int
) -> tuple[float, Literal["sign_flip_exact", "sign_flip_monte_carlo"]]:
    """Share of sign patterns whose mean of group means is at least as far from 0 as the one seen."""
    terms = np.concatenate([part / len(part) for part in differences])
    terms = terms[terms != 0]  # a flip of a zero changes nothing
    seen = abs(terms.sum()) * (1 - 1e-12) - 1e-15  # ties count, whatever the order of summation
    if len(terms) <= EXACT_FLIPS:
        patterns = (np.arange(1 << len(terms))[:, None] >> np.arange(len(terms))) & 1
        return float((abs((1 - 2 * patterns) @ terms) >= seen).mean()), "sign_flip_exact"
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(terms))
    hits = 0
    for start in range(0, RESAMPLES, rows):
        signs = 1 - 2 * rng.integers(2, size=(min(rows, RESAMPLES - start), len(terms)))
        hits += int((abs(signs @ terms) >= seen).sum())
    return (hits + 1) / (RESAMPLES + 1), "sign_flip_monte_carlo"
