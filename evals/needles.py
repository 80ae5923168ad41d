"""Defines the needles: what is hidden, how it is asked for, and when it counts as found."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from evals.base import Score

CITIES = (
    "Amsterdam Athens Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Budapest Cairo Chicago Copenhagen Dakar "
    "Delhi Dublin Edinburgh Geneva Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Madrid Manila "
    "Melbourne Milan Montreal Moscow Munich Nairobi Oslo Paris Prague Quito Rome Santiago Seoul Shanghai Singapore "
    "Stockholm Sydney Tokyo Toronto Vienna Warsaw Zurich"
).split()
SANDWICH = "eat a sandwich and sit in Dolores Park on a sunny day."


class Planted(NamedTuple):
    """Hold one needle (a fact to be hidden in a long text) with its random values filled in: the
    sentence, the question about it, what it is about, and the right answers."""

    text: str
    question: str
    topic: str
    answers: tuple[str, ...]


class Needle(NamedTuple):
    """Define one kind of needle: `plant` draws one, and `score` rates an output against its
    answers."""

    plant: Callable[[random.Random], Planted]
    score: Callable[[Sequence[str], str], Score]


def contains(answers: Sequence[str], output: str) -> Score:
    """Score 1 if an answer stands in the output, whatever its case.

    >>> contains(["1234567"], "It is 1234567.").value
    1.0
    """
    return Score(
        float(any(answer.lower() in output.lower() for answer in answers)),
        leading_digits(answers, output),
    )


def leading_digits(answers: Sequence[str], output: str) -> dict[str, float]:
    """Measure how much of a number came out before it went wrong: the most of its first digits that
    any number in the output has.

    Returns means over the answers, as a count and as a share of their digits, or nothing if an
    answer is no number. It distinguishes a cache that kept half of a needle from one that lost it;
    both score 0.

    >>> leading_digits(["1234567"], "It is 12349, or 99.")
    {'leading_digits': 4.0, 'leading_digits_share': 0.5714285714285714}
    """
    if not answers or not all(answer.isdecimal() for answer in answers):
        return {}
    numbers = {"", *re.findall(r"\d+", output)}
    right = [
        max(
            size
            for size in range(len(answer) + 1)
            if any(number.startswith(answer[:size]) for number in numbers)
        )
        for answer in answers
    ]
    shares = [count / len(answer) for count, answer in zip(right, answers, strict=True)]
    return {"leading_digits": fmean(right), "leading_digits_share": fmean(shares)}


def word_overlap(answers: Sequence[str], output: str) -> Score:
    """Return the share of the answer's distinct words in the output (KVCache-Factory's heat map).
    `exact` says that the whole answer is there.

    >>> word_overlap([SANDWICH], "You should eat a sandwich today.").value
    0.2727272727272727
    """
    words = set(answers[0].lower().split())
    shared = words & set(output.lower().split())
    exact = answers[0].lower().rstrip(".") in output.lower()
    return Score(1.0 if exact else len(shared) / len(words), {"exact": float(exact)})


def _sandwich(rng: random.Random) -> Planted:
    topic = "the best thing to do in San Francisco"
    text = f"\nThe best thing to do in San Francisco is {SANDWICH}\n"
    return Planted(text, f"What is {topic}?", topic, (SANDWICH,))


def _magic_city(rng: random.Random) -> Planted:
    """Draw a needle that gives a random city a seven-digit number, as ShadowKV and MInference
    do."""
    return magic_number(rng.choice(CITIES), rng.randrange(1_000_000, 10_000_000))


def magic_number(city: str, number: int) -> Planted:
    """Return the needle that states `number` as the special magic number of `city`."""
    topic = f"the special magic {city} number"
    text = f"\nThe special magic {city} number is: {number}\n"
    return Planted(text, f"What is {topic}?", topic, (str(number),))


def _passkey(rng: random.Random) -> Planted:
    """Draw a needle that states a five-digit number twice, as Quest does."""
    number = str(rng.randrange(10_000, 50_000))
    text = f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n"
    return Planted(text, "What is the pass key?", "the pass key", (number,))


NEEDLES = {
    "magic_city": Needle(_magic_city, contains),
    "passkey": Needle(_passkey, contains),
    "sandwich": Needle(_sandwich, word_overlap),
}
