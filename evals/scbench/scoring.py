"""Computes SCBench's scores, equal to the official functions to the last digit, also where those do
the unexpected.

All are pure functions of an output and a row's answer, as the file has it, that return a number
from 0 to 1."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from evals.metrics.answers import ASCII_PUNCTUATION, CHINESE_PUNCTUATION, f1
from evals.metrics.rouge import rouge_lsum

OPTIONS = "ABCD"
_PREFIXES = ("answer is:", "answer:", "answer is", "option is")


def contains(output: str, answer: str) -> float:
    """Score 1 if the answer stands in the output, letter for letter."""
    return float(answer in output)


def contains_any(output: str, answers: Sequence[str]) -> float:
    """Score 1 if one of the answers stands in the output, whatever its case. SCBench's code hands
    over many_shot's answer, a text, as the list of its characters, any of which will do.

    >>> contains_any("b", "(B)"), contains_any("(C)", "(B)"), contains_any("C", "(B)")
    (1.0, 1.0, 0.0)
    """
    return float(any(answer.upper() in output.upper() for answer in answers))


def share_contained(output: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that stand in the output, whatever their case, rounded to two
    places as SCBench's code does.

    >>> share_contained("A1, b2", ["A1", "B2", "C3"])
    0.67
    """
    return round(sum(answer.lower() in output.lower() for answer in answers) / len(answers), 2)


def first_number(output: str, answer: float) -> float:
    """Score 1 if the output's first number is the answer. For a whole answer, what follows the
    point does not count.

    >>> first_number("It is 7.9", 7), first_number("-7", -7)
    (1.0, 0.0)
    """
    match = re.search(r"\d+\.\d+|\d+", output)
    if match is None:
        return 0.0
    number = float(match[0])
    # thousands of digits make an infinite number
    whole = isinstance(answer, int) and isfinite(number)
    return float((int(number) if whole else number) == answer)


def characters_f1(output: str, answers: Sequence[str]) -> float:
    """Return the best F1 of the output's characters with those of an answer. SCBench's code hands
    over qa_chn's answer, a text, as the list of its characters, and so takes the best F1 with one
    of them."""
    return max((f1(_characters(output), _characters(answer)) for answer in answers), default=0.0)


def choice(output: str, answers: Sequence[str]) -> float:
    """Score a choice among four options; answers: the right option's text and letter. A first
    letter A to D is the choice, whatever follows. Else it is the whole output, or what follows the
    first of some phrases, or the first word in ABCD."""
    text = output.strip()
    if not text:
        return 0.0
    if text[0] in OPTIONS:
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" +", " ", re.sub(r"[\n\"'.,?!{}]", " ", text))
    for prefix in _PREFIXES:
        if (place := text.find(prefix)) >= 0:
            rest = text[place + len(prefix) + 1 :]
            return float(
                any(rest.startswith(answer) for answer in answers)
                and len(text) > place + len(prefix)
            )
    word = next((word for word in text.split() if word in OPTIONS), "")
    return float(word in answers)


def _characters(text: str) -> list[str]:
    return list("".join(text.lower().translate(ASCII_PUNCTUATION | CHINESE_PUNCTUATION).split()))


SCORERS: Mapping[str, Callable[[str, Any], float]] = {
    "scbench_kv": contains,
    "scbench_prefix_suffix": contains,
    "scbench_vt": share_contained,
    "scbench_qa_eng": lambda output, answer: contains_any(output, [answer]),
    "scbench_qa_chn": characters_f1,
    "scbench_choice_eng": choice,
    "scbench_many_shot": contains_any,
    "scbench_mf": first_number,
    "scbench_summary": rouge_lsum,
}
