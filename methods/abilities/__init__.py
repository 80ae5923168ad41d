"""What some methods can do besides keeping and reading rows: one file for each ability.

An ability is a small frozen object. A method lists those that it has whatever the settings
(`Method.abilities`), and says in `Method.takes` which of them settings may give it. `asked` makes
those that a budget or a codec asks for, and `abilities_of` (harness/jobs/resolve.py) adds those of
other settings; they come to the layers in `Request.abilities`. `refuse` is the one place that says,
by name, that a method cannot have an ability, or that two do not go together (`APART`).

What an ability must remember in a layer is a policy that its `start` returns and nobody inherits.
So it is saved, truncated, joined with that of other sequences, captured and copied as the method's
own policies are. An `AbilityState` (methods/layers/ability_state.py) can act before the seal, when
it is settled what stays, after the seal, and before each step; a layer whose abilities do not act
in steps calls nothing in a step. When rows go while the answer grows, every policy is told
beforehand which stay (`Policy.forget`). What an ability must know of a method's own policies is a
protocol in its file, and not a hook of the base classes.

To add one, write a file here with the object and its state, and say in `APART` with which abilities
it does not go. docs/extending.md has a complete example, and CONTRIBUTING.md says how a setting
gives it to methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeVar

from methods.abilities.bounded_answer import BoundedAnswer, CountedAnswer
from methods.abilities.evict_every import EvictEvery
from methods.abilities.kept_codec import KeptCodec
from methods.abilities.mass import Mass
from methods.abilities.merge import Merge
from methods.abilities.repeat import Repeat
from methods.base import Ability, Budget, Method
from methods.tiers.codec import Codec

A = TypeVar("A", bound=Ability)
# of a method or a setting, of a setting: why not both
APART: Mapping[tuple[type[Ability], type[Ability]], str] = {
    (CountedAnswer, BoundedAnswer): "its budget counts them already",
    (CountedAnswer, KeptCodec): "drops rows one by one, which a codec writes together",
    (CountedAnswer, Mass): "its budget counts prompt and answer, and a step reads all of both",
    (CountedAnswer, EvictEvery): "it drops rows at times of its own",
    (EvictEvery, BoundedAnswer): "evict_every counts them in its budget",
    (EvictEvery, KeptCodec): "evicts from plain rows under evict_every, and a codec writes them",
    (EvictEvery, Mass): "evict_every counts prompt and answer, and a step reads all of both",
    (EvictEvery, Merge): "evict_every ranks all rows anew and lets many go at once",
    (Repeat, EvictEvery): "it scores rows while the model repeats the prompt",
    (Repeat, Mass): "a step reads all that it keeps",
}


def asked(budget: Budget | None, codec: Codec | None = None) -> tuple[Ability, ...]:
    """Return the abilities that a budget and a codec ask for."""
    given = list[Ability]()
    if budget is not None and budget.mass is not None:
        given.append(Mass(budget.mass))
    if budget is not None and budget.generated is not None:
        given.append(BoundedAnswer(budget.generated))
    if codec is not None:
        given.append(KeptCodec(codec))
    return tuple(given)


def ability(method: Method, kind: type[A]) -> A | None:
    """Return the ability of class `kind` that `method` has by itself; None if it has none."""
    return next((own for own in method.abilities if isinstance(own, kind)), None)


def refuse(method: Method, given: Sequence[Ability]) -> None:
    """Raise `ValueError` if `method` cannot have one of the abilities that settings gave it. What it
    cannot have at all is said before what cannot have one another."""
    impossible = ((one, _apart(method.abilities, one) or one.refusal(method)) for one in given)
    together = ((one, _apart(given, one)) for one in given)
    for one, why in chain(impossible, together):
        if why is not None:
            raise one.error(method, why)


def _apart(others: Sequence[Ability], one: Ability) -> str | None:
    """Return why `one` cannot be had beside one of `others`, or None."""
    reasons = (APART.get((type(other), type(one))) for other in others)
    return next((reason for reason in reasons if reason), None)
