"""Why one answer is wrong: the first change that makes it as good as Full's.

What can be seen without the model's help comes first: an answer that was cut from the prompt, one that is there and was
not scored, one that more tokens would have brought, and one that Full does not give either. Where Full is better, what
the method's layers read is changed step by step towards Full, and the answer given anew each time:

    own      the method as it is
    exact    exact attention over the very tokens it read     -> approximation
    needle   the needle's tokens on top                       -> evicted, not_selected
    all      exact attention over its whole prompt            -> context
    Full     its own prefill as well                          -> prefill

The first change with which the answer is as good as Full's names the cause. So every wrong answer has one cause, and a
selector is blamed only where the needle's tokens alone would have helped.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.diagnosis.probe import Reads

ScoreUnder = Callable[[Reads], float]  # reads -> score of the answer


def cause(
    own: float, full: float, answer: ScoreUnder, *, evicts: bool, dense_prefill: bool
) -> tuple[str, dict[str, float]]:
    """The cause of a wrong answer, and the score on each rung that was climbed. `own` and `full`: the recorded scores
    (0-1) of the method and of Full, which is `all` of a dense prefill."""
    if full <= own:
        return "model", {}
    causes: dict[Reads, str] = {
        "own": "not_repeated",
        "exact": "approximation",
        "needle": "evicted" if evicts else "not_selected",
    }
    if not dense_prefill:
        causes["all"] = "context"
    scores: dict[str, float] = {}
    for reads, name in causes.items():
        scores[reads] = answer(reads)
        if scores[reads] >= full:
            return name, scores
    return ("context" if dense_prefill else "prefill"), scores
