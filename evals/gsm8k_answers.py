"""Takes GSM8K's final number from an output and compares it, in the four ways of the papers.

A reader returns the number as text, or None where it finds none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_CUT = "\nQuestion: "


class Reader(NamedTuple):
    """Extract an answer from an output, and say whether it equals the solution's."""

    extract: Callable[[str], str | None]
    equal: Callable[[str, str], bool]  # takes the extracted answer and the solution's final number


def strict(output: str) -> str | None:
    """Take the first number after `The answer is ` and the one character, whatever it is, that must
    follow (lm-eval gsm8k_cot, strict-match).

    >>> strict("The answer is 18."), strict("The answer is 18")
    ('18', '1')
    """
    match = re.search(r"The answer is (-?[0-9.,]+).", output)
    return match[1] if match else None


def flexible(output: str) -> str | None:
    """Take the last thing that looks like a number, full stop included (lm-eval, flexible-extract).

    >>> flexible("The answer is $1,234.")
    '$1,234.'
    """
    numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", output)
    return numbers[-1] if numbers else None


def pqcache(output: str) -> str | None:
    """Take the last number before the model asks itself a new question; commas go first, and signs
    are not seen (PQCache).

    >>> pqcache("It is -1,000.5\\nQuestion: 7?")
    '1000.5'
    """
    numbers = re.findall(r"\d*\.?\d+", output.split(_CUT)[0].replace(",", ""))
    return numbers[-1] if numbers else None


def openai(output: str) -> str | None:
    """Take the first number after `#### ` (OpenAI's own reading).

    >>> openai("#### 1,234")
    '1234'
    """
    match = re.search(r"#### (-?[0-9.,]+)", output)
    return match[1].replace(",", "") if match else None


def final_number(solution: str) -> str:
    """Return the number after `####` in a solution of the data set."""
    return solution.rpartition("####")[2].strip()


def _same_text(answer: str, final: str) -> bool:
    """Compare as lm-eval's exact match does: without commas, dollar signs, what precedes `#### `,
    and one full stop at the end."""
    return _bare(answer) == _bare(final)


def _bare(text: str) -> str:
    return text.replace(",", "").replace("$", "").rpartition("#### ")[2].removesuffix(".").lower()


def _same_value(answer: str, final: str) -> bool:
    """Compare values, with the reference read as PQCache reads an output, so that -10 equals 10."""
    wanted = pqcache(final)
    return wanted is not None and float(answer) == float(wanted)


READERS = {
    "pqcache": Reader(pqcache, _same_value),
    "strict": Reader(strict, _same_text),
    "flexible": Reader(flexible, _same_text),
    "openai": Reader(openai, lambda answer, final: answer == final.replace(",", "")),
}
