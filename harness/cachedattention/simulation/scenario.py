"""The settings of a run of the simulator, as in `policy=lru disk=2TB`; several values of a key make several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal, get_args, get_type_hints

import yaml

from harness.cachedattention.simulation.trace import TracedConversation, drawn
from harness.cachedattention.store.placement import POLICIES, without_copies
from harness.config.plugins import fits, spell, suggestion
from harness.config.values import ABOVE_0, FROM_0, Range, SettingsError, check_values, size
from methods.tiers.tier import DISK, TIERS

RECOMPUTE = "recompute"
RANGES = {
    **dict.fromkeys(("truncation_ratio", "question_share"), Range(least=0, below=1)),
    "correlation": Range(least=-1, below=1),
    **dict.fromkeys(("sessions", "rate", "ttl_s"), ABOVE_0),
    **dict.fromkeys(("think_s", "warmup", "seed"), FROM_0),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The settings of one run of the simulator."""

    model: str = "llama-13b"  # one of the cost table
    policy: str = "scheduler_aware"  # lru, fifo; recompute: no store, the history is computed in every turn
    device: str | int = 0  # bytes of each tier
    host: str | int = "128GB"
    disk: str | int = "10TB"
    write_buffer: str | int = "10GB"  # bytes that may wait to be written, on top of the tiers
    copies: bool = True  # room on disk for a copy of all that comes up from it
    ttl_s: float | None = None  # since the last use; null: for ever
    positions: Literal["decoupled", "coupled"] = (
        "decoupled"  # coupled: an overflow of the window makes the store's copy void
    )
    truncation_ratio: float = 0.5  # of the history, kept where it overflows the window
    preload: Literal["buffered", "layerwise", "off"] = "buffered"  # how loading and computing overlap
    sessions: int = 9000
    rate: float = 1.0  # new sessions per second
    think_s: float = 30.0  # mean, from an answer to the next question
    question_share: float = 0.3  # of a drawn turn's tokens
    correlation: float = 0.5  # of turns and tokens of a drawn session
    warmup: int = 10_000  # turns before those that are counted
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in (*POLICIES, RECOMPUTE):
            known = [*POLICIES, RECOMPUTE]
            raise SettingsError(f"There is no policy {self.policy!r}{suggestion(self.policy, known)}")
        check_values(self, RANGES)
        if self.policy == RECOMPUTE:
            return
        if not any(self.capacities.values()):
            raise SettingsError(f"policy={self.policy} has no tier to store in: set host=128GB, or policy={RECOMPUTE}.")
        if self.copies and self.capacities[DISK]:
            try:
                without_copies(self.capacities)
            except ValueError as error:
                raise SettingsError(f"{error}: raise disk={self.disk}, or set copies=false.") from error

    @property
    def capacities(self) -> dict[str, int]:
        """Return the bytes of the tiers by name."""
        return {tier: size(tier, getattr(self, tier)) for tier in TIERS}

    def trace(self) -> list[TracedConversation]:
        shape = {"question_share": self.question_share, "correlation": self.correlation}
        return drawn(self.sessions, self.rate, seed=self.seed, think_s=self.think_s, **shape)


def scenarios(words: Sequence[str]) -> Iterator[Scenario]:
    """Yield all combinations of the values in `key=value,value`; the last of two words for one key wins."""
    given: dict[str, list[Any]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if not equals:
            raise SettingsError(f"Cannot read {word!r}: write key=value, several values as key=a,b.")
        given[key] = [_value(key, value) for value in values.split(",")]
    for point in product(*given.values()):
        yield Scenario(**dict(zip(given, point, strict=True)))


def _value(key: str, text: str) -> Any:
    hints = get_type_hints(Scenario)
    if key not in hints:
        raise SettingsError(f"simulate has no key {key!r}{suggestion(key, hints)}")
    if text in get_args(hints[key]):
        return text  # a word as it stands: YAML reads off as false
    if not text.strip():
        raise SettingsError(f"{key} is empty: give it a value, or leave it out.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"Cannot read {key}={text}: write a plain value.") from error
    if not fits(value, hints[key]):
        raise SettingsError(f"{key}={text} should be {spell(hints[key])}.")
    return value


def varied(runs: Sequence[Scenario]) -> list[str]:
    """Return the keys in which the runs differ, and always policy."""
    names = [field.name for field in fields(Scenario)]
    return [name for name in names if name == "policy" or len({getattr(run, name) for run in runs}) > 1]
