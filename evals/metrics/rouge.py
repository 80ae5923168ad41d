"""ROUGE-L as LongBench computes it: the F of PyPI's `rouge` 1.0.1 at summary level, 0 where that package fails.

Written anew because the package keeps one dictionary entry for every pair of words (gigabytes for two long sentences
without a full stop) and follows the common subsequence by recursion, so that its score hangs on the depth of the
caller's stack. Here that depth is always the one of LongBench's own script.
"""

from __future__ import annotations

from collections.abc import Sequence

from evals.metrics.chinese import cut

# Recursive calls that Python's limit of 1000 frames leaves to the package below LongBench's eval.py. Measured: two
# equal sentences of 990 different words score 1, two of 991 raise RecursionError.
_CALLS = 991


def rouge_l(prediction: str, reference: str) -> float:
    """F of distinct words in the union of longest common subsequences of all pairs of sentences.

    >>> rouge_l("The cat sat", "the cat sat")
    0.6666666616666668
    """
    return _score(prediction, reference, _CALLS)


def rouge_zh(prediction: str, reference: str) -> float:
    """The same over jieba's words; the official function stands one call deeper."""
    return _score(" ".join(cut(prediction)), " ".join(cut(reference)), _CALLS - 1)


def _score(prediction: str, reference: str, calls: int) -> float:
    ours, theirs = _sentences(prediction), _sentences(reference)
    if not ours or not theirs:
        return 0.0  # the package raises
    union: set[str] = set()
    for y in ours:
        places = places_of(y)
        for x in theirs:
            common = _common_words(x, y, places, calls)
            if common is None:
                return 0.0  # RecursionError
            union |= common
    precision = len(union) / len(set().union(*ours))
    recall = len(union) / len(set().union(*theirs))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[tuple[str, ...]]:
    """Words between full stops, repeated sentences once; white space alone is one empty word, as in the package."""
    return list(dict.fromkeys(tuple(piece.split()) or ("",) for piece in text.split(".") if piece))


def places_of(sentence: Sequence[str]) -> dict[str, int]:
    """Bit j of a word's number is set where the sentence has it at position j."""
    places: dict[str, int] = {}
    for j, word in enumerate(sentence):
        places[word] = places.get(word, 0) | 1 << j
    return places


def _common_words(x: tuple[str, ...], y: tuple[str, ...], places: dict[str, int], calls: int) -> set[str] | None:
    """Words of the common subsequence that the package's walk finds; None where it takes more than `calls` calls.

    The walk starts at the ends of x and y. Where the words differ it shortens x if that keeps a longer common
    subsequence than to shorten y: exactly where y's last word adds to it.
    """
    if min(len(x), len(y)) >= calls:
        return None  # a call shortens either side by one word at most
    flat = flat_places(x, y, places)
    found: set[str] = set()
    i, j = len(x), len(y)
    for _ in range(calls):
        if i == 0 or j == 0:
            return found
        if x[i - 1] == y[j - 1]:
            found.add(x[i - 1])
            i, j = i - 1, j - 1
        elif flat[i - 1] >> (j - 1) & 1:
            j -= 1
        else:
            i -= 1
    return None


def flat_places(x: Sequence[str], y: Sequence[str], places: dict[str, int]) -> list[int]:
    """Bit j of number i: y[j] adds nothing to the longest common subsequence of x[: i + 1] and y[: j + 1].

    places: of y. A whole row of the usual table in one addition (Hyyrö 2004).
    """
    whole = row = (1 << len(y)) - 1
    rows = []
    for word in x:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & whole
        rows.append(row)
    return rows
