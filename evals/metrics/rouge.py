"""Computes ROUGE-L as LongBench does: the F of PyPI's `rouge` 1.0.1 at summary level, and 0 where
that package fails;
and ROUGE-Lsum by Google's `rouge_score` without a stemmer, which is what `evaluate` calls.

The package `rouge` itself is not used, because it keeps one dictionary entry for every pair of words
(gigabytes for two long sentences without a full stop), and follows the common subsequence by
recursion, so that its score depends on how deep the caller's stack is. Here that depth is always
the one of LongBench's own script."""

from __future__ import annotations

from collections.abc import Sequence

from evals.metrics.answers import cut

# The recursive calls that Python's limit of 1000 frames leaves to the package below LongBench's eval.py. Measured: two
# equal sentences of 990 different words score 1, two of 991 raise RecursionError.
_CALLS = 991


def rouge_l(prediction: str, reference: str) -> float:
    """Return the F of distinct words in the union of the longest common subsequences of all pairs
    of sentences.

    >>> rouge_l("The cat sat", "the cat sat")
    0.6666666616666668
    """
    return _score(prediction, reference, _CALLS)


def rouge_zh(prediction: str, reference: str) -> float:
    """Return `rouge_l` over the words into which jieba splits Chinese text. LongBench calls the
    recursive package one frame deeper here, so one call fewer is left below Python's recursion
    limit, at which the score becomes 0."""
    return _score(" ".join(cut(prediction)), " ".join(cut(reference)), _CALLS - 1)


def _score(prediction: str, reference: str, calls: int) -> float:
    ours, theirs = _sentences(prediction), _sentences(reference)
    if not ours or not theirs:
        return 0.0  # here the package raises
    union: set[str] = set()
    for y in ours:
        for x in theirs:
            common = _common(x, y, calls)
            if common is None:
                return 0.0  # here the package runs into RecursionError
            union.update(x[i] for i, _ in common)
    precision = len(union) / len(set().union(*ours))
    recall = len(union) / len(set().union(*theirs))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[tuple[str, ...]]:
    """Split a text at full stops into sentences of words, leaving out repeated ones. A sentence of
    white space alone is one empty word, as in the package."""
    return list(dict.fromkeys(tuple(piece.split()) or ("",) for piece in text.split(".") if piece))


def _common(x: Sequence[str], y: Sequence[str], calls: int) -> list[tuple[int, int]] | None:
    """Return the positions in x and y of the words of a longest common subsequence, the last first: of
    several, the one that the package `rouge` finds, or None where its recursion would take more than
    `calls` calls, at which Python's limit ends it.

    The recursion starts at the ends of x and y. Where the words differ, it shortens x if that keeps
    a longer common subsequence than shortening y would: exactly where y's last word adds to it."""
    if min(len(x), len(y)) >= calls:
        return None  # one call shortens either side by one word at most
    flat = _flat_places(x, y)
    found = list[tuple[int, int]]()
    i, j = len(x), len(y)
    for _ in range(calls):
        if i == 0 or j == 0:
            return found
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.append((i, j))
        elif flat[i - 1] >> (j - 1) & 1:
            j -= 1
        else:
            i -= 1
    return None


def _flat_places(x: Sequence[str], y: Sequence[str]) -> list[int]:
    """Return a number for each word of x, where bit j of number i says that y[j] adds nothing to
    the longest common subsequence of x[: i + 1] and y[: j + 1]. One addition makes a whole row of the
    usual table (Hyyrö 2004)."""
    places: dict[str, int] = {}  # bit j of a word is set where it stands at position j of y
    for j, word in enumerate(y):
        places[word] = places.get(word, 0) | 1 << j
    whole = row = (1 << len(y)) - 1
    rows = []
    for word in x:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & whole
        rows.append(row)
    return rows


def rouge_lsum(prediction: str, reference: str) -> float:
    """Return the F1 of words in the union of longest common subsequences, where each line is a
    sentence. No word counts more often than either text has it.

    >>> rouge_lsum("The cat sat.", "A cat sat down")
    0.5714285714285715
    """
    from rouge_score.rouge_scorer import RougeScorer

    scores = RougeScorer(["rougeLsum"]).score(reference, prediction)
    return float(scores["rougeLsum"].fmeasure)
