"""Which faults there are: every kind with every target equally often, in an order of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from tests.faults.harm import KINDS, TO_FILES
from tests.faults.targets import TARGETS, Subject, Target


class Fault(NamedTuple):
    """`moment`: of a harm to files. `seed`: of all that is drawn later."""

    number: int
    kind: str
    target: Target
    subject: Subject
    moment: str
    seed: str

    def __str__(self) -> str:
        return (
            f"{self.number}. {self.kind}, {self.target.name} ({self.subject.name}{self.moment and ', '}{self.moment})"
        )


def faults(seed: int) -> Iterator[Fault]:
    """Without an end; each round has every pair of a kind and a target once."""
    draw, number = random.Random(seed), 0
    while True:
        pairs = list(product(KINDS, TARGETS))
        draw.shuffle(pairs)
        for kind, target in pairs:
            number += 1
            subject = draw.choice(target.subjects)
            moment = draw.choice(target.moments) if kind in TO_FILES else ""
            yield Fault(number, kind, target, subject, moment, f"{seed} {number}")
