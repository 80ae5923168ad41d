"""Numbers of docs/experiments.md: InfiniGen's figures, live and small."""

from __future__ import annotations

from collections.abc import Iterator

from tests.numbers.files import machine, row


def held() -> list[str]:
    return [*_batches(), *_parameters(), f"On a {machine('infinigen/batches')['cores']}-core Xeon"]


def _batches() -> Iterator[str]:
    for method, what in (("infinigen", "one of InfiniGen"), ("infinigen_alpha99", "one of `infinigen_alpha99`")):
        first, second, last = (_faster("batches", method=method, batch=batch) for batch in (1, 2, 4))
        yield f"{first}, {second} and {last} times as long as {what}"
    yield "in batches of 1, 2 and 4"


def _parameters() -> Iterator[str]:
    few, many = (_faster("parameters", method=f"infinigen:alpha={alpha}") for alpha in (1, 9))
    yield f"At a batch of 2, alpha sets the gain ({few} times at `alpha=1`, {many} at `alpha=9`)"
    few, many = (_faster("parameters", method=f"infinigen:partial_ratio={ratio}") for ratio in (0.1, 1.0))
    yield f"({few} at `partial_ratio=0.1`, {many} at `partial_ratio=1.0`)"


def _faster(name: str, **which: object) -> str:
    """How many times as long a step of FlexGen's way takes."""
    return f"{row(f'infinigen/{name}', **which)['tpot_s_ratio'][0]:.1f}"
