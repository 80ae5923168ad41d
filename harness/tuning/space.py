"""Defines what a search tries: the parameters of a method, each with its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_type_hints

from harness.config.catalogue import plain
from harness.config.plugins import PluginError, fits, spell
from methods.base import Method

Point = tuple[tuple[str, Any], ...]  # the parameters in which a candidate differs from the start
START: Point = ()


class SpaceError(ValueError):
    """There is nothing to search, or a value cannot be tried; the message says what to do."""


@dataclass(frozen=True)
class Space:
    """The values that a search tries. `start`: the method with its present parameters; `grids`: for
    each parameter at least two values in order, the start's among them; `left_out`: sentences on
    values that are not tried. A point is a candidate, given as its (parameter, value) pairs that
    differ from the start."""

    start: Method
    grids: Mapping[str, tuple[Any, ...]]
    left_out: tuple[str, ...]

    def method(self, point: Point) -> Method:
        return replace(self.start, **dict(point))  # type: ignore[type-var]

    def value(self, point: Point, name: str) -> Any:
        return dict(point).get(name, getattr(self.start, name))

    def curve(self, name: str) -> list[Point]:
        """Return one candidate per value of a parameter; all other parameters stay at the start's
        values."""
        return self.combinations({name: self.grids[name]})

    def combinations(self, values: Mapping[str, Sequence[Any]]) -> list[Point]:
        """Return one candidate for each combination of the `values`, given by parameter."""
        names = [name for name in self.grids if name in values]
        combined = [zip(names, chosen, strict=True) for chosen in product(*(values[name] for name in names))]
        return [
            tuple((name, value) for name, value in point if value != getattr(self.start, name)) for point in combined
        ]

    def distance(self, point: Point) -> tuple[int, int]:
        """Return how many parameters of a candidate differ from the start's, and by how many steps
        on their grids in total."""
        places = [
            (self.grids[name].index(value), self.grids[name].index(self.value(START, name))) for name, value in point
        ]
        return len(point), sum(abs(place - start) for place, start in places)

    def label(self, point: Point) -> str:
        return " ".join(f"{name}={plain(value)}" for name, value in point)


def grids_of(start: Method, asked: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Return the values to try by parameter: those of the command line, or, if it names none, those
    that the method declares in `tunable`."""
    grids = {name: tuple(_typed(start, name, values)) for name, values in (asked or start.tunable).items()}
    if not grids:
        raise SpaceError(_nothing(start))
    return grids


def space_of(
    start: Method, grids: Mapping[str, tuple[Any, ...]], refusal: Callable[[Method], str | None], strict: bool
) -> Space:
    """Return the space of those values that can run. `refusal` returns the reason why a method
    cannot run here, or None. A value with a reason is left out, or, if `strict`, raises
    `SpaceError`."""
    left_out = list[str]()
    legal: dict[str, list[Any]] = {name: [getattr(start, name)] for name in grids}
    for name, values in grids.items():
        for value in values:
            try:
                reason = refusal(replace(start, **{name: value}))  # type: ignore[type-var]
            except ValueError as error:
                reason = str(error)
            if reason and strict:
                raise SpaceError(reason)
            if reason:
                left_out.append(f"{name}={plain(value)}: {reason}")
            else:
                legal[name].append(value)
    with_choice = {name: ordered for name, values in legal.items() if len(ordered := _in_order(values)) > 1}
    if not with_choice:
        raise SpaceError(_nothing(start, left_out))
    return Space(start, with_choice, tuple(left_out))


def _typed(method: Method, name: str, values: Sequence[Any]) -> Iterator[Any]:
    """Yield the values after checking their types as for a run; an int becomes a float if the field
    is one. Raise `PluginError` for a value of the wrong type."""
    hint = get_type_hints(type(method))[name]
    for value in values:
        if not fits(value, hint):
            raise PluginError(f"method.{name}={plain(value)} should be {spell(hint)}.")
        yield float(value) if hint is float else value


def _in_order(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return each value once; numbers are sorted, other values stay in their order."""
    once = list(dict.fromkeys(values))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in once)
    return tuple(sorted(once) if numbers else once)


def _nothing(start: Method, left_out: Sequence[str] = ()) -> str:
    lacks = "no parameter with a second value to try" if start.tunable else "declared no parameter to tune"
    why = f" ({'; '.join(left_out)})" if left_out else ""
    return (
        f"{type(start).__name__} has {lacks}{why}: name values, as in method.PARAMETER=A,B, or choose another method."
    )
