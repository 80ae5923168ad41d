"""Scores RULER (arXiv:2404.06654, section 4): by string match, with summaries over lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

THRESHOLD = 0.856  # the score of Llama-2-7B-chat at 4096 tokens


def clean(output: str) -> str:
    """Turn control characters into newlines.

    >>> clean(" 12\\t34 ")
    '12\\n34'
    """
    return re.sub(r"[\x00-\x1f]", "\n", output.strip()).strip()


def string_match_all(output: str, references: Sequence[str]) -> float:
    """Return the share of the references that occur, whatever their case and without regard to word
    boundaries.

    >>> string_match_all("It is 12345678.", ["1234567", "89"])
    0.5
    """
    text = clean(output).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(output: str, references: Sequence[str]) -> float:
    """Return 1 if any reference occurs, else 0.

    >>> string_match_part("in Paris", ["paris", "Paris, France"])
    1.0
    """
    text = clean(output).lower()
    return float(any(reference.lower() in text for reference in references))


def means(groups: Mapping[str, float], part: int) -> dict[str, float]:
    """Average the groups "task/length" that share a task (`part=0`) or a length (`part=1`), in
    order of appearance.

    >>> means({"vt/4096": 1.0, "cwe/4096": 0.5, "vt/8192": 0.25}, part=1)
    {'4096': 0.75, '8192': 0.25}
    """
    shared: dict[str, list[float]] = {}
    for group, score in groups.items():
        shared.setdefault(group.split("/")[part], []).append(score)
    return {name: sum(scores) / len(scores) for name, scores in shared.items()}


def effective_length(by_length: Mapping[int, float], threshold: float = THRESHOLD) -> int:
    """Return the largest length whose score exceeds the threshold, 0 if none does.

    >>> effective_length({4096: 0.95, 8192: 0.86, 16384: 0.7})
    8192
    """
    return max((length for length, score in by_length.items() if score > threshold), default=0)


def weighted_averages(by_length: Mapping[int, float]) -> tuple[float, float]:
    """Average over lengths with weights 1, 2, ... from the shortest to the longest, and the other
    way round.

    >>> weighted_averages({4096: 0.75, 8192: 0.0})
    (0.25, 0.5)
    """
    scores = [by_length[length] for length in sorted(by_length)]
    weights = range(1, len(scores) + 1)
    rising = sum(weight * score for weight, score in zip(weights, scores, strict=True)) / sum(weights)
    falling = sum(weight * score for weight, score in zip(weights, reversed(scores), strict=True)) / sum(weights)
    return rising, falling
