"""The settings of a simulated run, as in `policy=lru disk=2TB`; several values of a key make
several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_type_hints

from harness.cachedattention.simulation.trace import TracedConversation, drawn
from harness.cachedattention.store.placement import POLICIES
from harness.config.compose import combinations
from harness.config.plugins import fits, spell, suggestion
from harness.config.values import ABOVE_0, FROM_0, Range, SettingsError, check_values, size
from methods.tiers.tier import TIERS

RECOMPUTE = "recompute"
RANGES = {
    **dict.fromkeys(("truncation_ratio", "question_share"), Range(least=0, below=1)),
    "correlation": Range(least=-1, below=1),
    **dict.fromkeys(("sessions", "rate", "ttl_s"), ABOVE_0),
    **dict.fromkeys(("think_s", "warmup", "seed"), FROM_0),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The settings of one run of the simulator: a model, a store with a policy and tiers, and the
    conversations that arrive."""

    model: str = "llama-13b"  # one of the cost table
    # lru, fifo; recompute: no store, the history is computed in every turn
    policy: str = "scheduler_aware"
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
    # how loading and computing overlap
    preload: Literal["buffered", "layerwise", "off"] = "buffered"
    sessions: int = 9000
    rate: float = 1.0  # new sessions per second
    think_s: float = 30.0  # mean, from an answer to the next question
    question_share: float = 0.3  # of a drawn turn's tokens
    correlation: float = 0.5  # of turns and tokens of a drawn session
    warmup: int = 10_000  # turns before those that are counted
    seed: int = 0

    def __post_init__(self) -> None:
        known = [*POLICIES, RECOMPUTE]
        if self.policy not in known:
            raise SettingsError(
                f"There is no policy {self.policy!r}{suggestion(self.policy, known)}"
            )
        check_values(self, RANGES)
        if self.policy != RECOMPUTE and not any(self.capacities.values()):
            raise SettingsError(
                f"policy={self.policy} has no tier to store in: set host=128GB, or policy={RECOMPUTE}."
            )

    @property
    def capacities(self) -> dict[str, int]:
        """Return the bytes of each tier (device, host, disk) by its name."""
        return {tier: size(tier, getattr(self, tier)) for tier in TIERS}

    def trace(self) -> list[TracedConversation]:
        names = ("sessions", "rate", "seed", "think_s", "question_share", "correlation")
        return drawn(**{name: getattr(self, name) for name in names})


def scenarios(words: Sequence[str]) -> Iterator[Scenario]:
    """Yield the settings of a run for each combination of the values in `words`, which are
    `key=value,value`. Of two words for one key the last one counts. Raise `SettingsError` for
    unknown keys and values of another type."""
    hints = get_type_hints(Scenario)
    for point in combinations(words, slowest=""):
        for key, word in point.items():
            if key not in hints:
                raise SettingsError(f"simulate has no key {key!r}{suggestion(key, hints)}")
            if not fits(word.value, hints[key]):
                raise SettingsError(f"{word.text} should be {spell(hints[key])}.")
        yield Scenario(**{key: word.value for key, word in point.items()})


def varied(runs: Sequence[Scenario]) -> list[str]:
    """Return the names of the settings in which the runs differ, and always `policy`, in the order
    of the fields."""
    names = [field.name for field in fields(Scenario)]
    return [
        name for name in names if name == "policy" or len({getattr(run, name) for run in runs}) > 1
    ]
