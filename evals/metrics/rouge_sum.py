"""Computes ROUGE-Lsum as Google's package `rouge_score` 0.1.2 does without a stemmer, which is what
`evaluate` calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from evals.metrics.rouge import flat_places, places_of

Words = Sequence[str]


def rouge_lsum(prediction: str, reference: str) -> float:
    """Return the F1 of words in the union of longest common subsequences, where each line is a
    sentence. No word counts more often than either text has it.

    >>> rouge_lsum("The cat sat.", "A cat sat down")
    0.5714285714285715
    """
    ours, theirs = _sentences(prediction), _sentences(reference)
    lengths = sum(map(len, ours)), sum(map(len, theirs))
    if not all(lengths):
        return 0.0
    left = Counter(word for one in ours for word in one) & Counter(word for one in theirs for word in one)
    hits = 0
    for sentence in theirs:
        for place in sorted(set().union(*(_common(sentence, one) for one in ours))):
            if left[sentence[place]] > 0:
                left[sentence[place]] -= 1
                hits += 1
    precision, recall = (hits / length for length in lengths)
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def _sentences(text: str) -> list[list[str]]:
    return [re.findall(r"[a-z0-9]+", line.lower()) for line in text.split("\n")]


def _common(x: Words, y: Words) -> set[int]:
    """Return the places in `x` of a longest common subsequence; of several, the one that the
    package walks to."""
    flat = flat_places(y, x, places_of(x))
    found, i, j = set[int](), len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            found.add(i - 1)
            i, j = i - 1, j - 1
        elif flat[j - 1] >> (i - 1) & 1:  # x's last word adds nothing
            i -= 1
        else:
            j -= 1
    return found
