"""The needles: what is hidden, how it is asked for, and when it counts as found."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """One needle with its values drawn."""

    text: str
    question: str
    topic: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Needle:
    plant: Callable[[random.Random], Planted]
    score: Callable[[Sequence[str], str], Score]


def contains(answers: Sequence[str], output: str) -> Score:
    """1 if an answer stands in the output, letter case aside.

    >>> contains(["1234567"], "It is 1234567.").value
    1.0
    """
    return Score(float(any(answer.lower() in output.lower() for answer in answers)))


def word_overlap(answers: Sequence[str], output: str) -> Score:
    """Share of the answer's distinct words in the output (KVCache-Factory's heat map); `exact`: all of it is there.

    >>> word_overlap([SANDWICH], "You should eat a sandwich.").value
    0.2727272727272727
    """
    words = set(answers[0].lower().split())
    found = words & set(output.lower().split())
    exact = answers[0].lower().rstrip(".") in output.lower()
    return Score(1.0 if exact else len(found) / len(words), {"exact": float(exact)})


def _sandwich(rng: random.Random) -> Planted:
    place = "the best thing to do in San Francisco"
    return Planted(f"\nThe best thing to do in San Francisco is {SANDWICH}\n", f"What is {place}?", place, (SANDWICH,))


def _magic_city(rng: random.Random) -> Planted:
    """ShadowKV's and MInference's: a seven-digit number of a city."""
    city, number = rng.choice(CITIES), str(rng.randrange(1_000_000, 10_000_000))
    topic = f"the special magic {city} number"
    return Planted(f"\nThe special magic {city} number is: {number}\n", f"What is {topic}?", topic, (number,))


def _passkey(rng: random.Random) -> Planted:
    """Quest's: the number is said twice."""
    number = str(rng.randrange(10_000, 50_000))
    return Planted(
        f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n",
        "What is the pass key?",
        "the pass key",
        (number,),
    )


NEEDLES = {
    "magic_city": Needle(_magic_city, contains),
    "passkey": Needle(_passkey, contains),
    "sandwich": Needle(_sandwich, word_overlap),
}
