"""Refuses a command line that says the budget in two ways, one of which would be ignored."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.types import Override

from harness.config.settings import SettingsError

TAKES_PLACE = ("budget_bytes",)  # of budget


def refuse_two_budgets(said: Sequence[Override], typed: Sequence[Override]) -> None:
    """Raise `SettingsError` where `budget` would be ignored, also at the value that it has unsaid. `said`: all words,
    those of an experiment and those `typed`; the last of two for one key counts."""
    last = {override.key_or_group.lstrip("+"): override for override in said}
    budget = last.get("budget")
    for name in TAKES_PLACE:
        if budget is not None and _says_something(budget) and name in last and _says_something(last[name]):
            way_out = "leave one of them out" if budget in typed else "set budget=null as well"
            raise SettingsError(f"{budget.input_line} would be ignored beside {last[name].input_line}: {way_out}.")


def _says_something(override: Override) -> bool:
    values = override.sweep_iterator() if override.is_discrete_sweep() else [override.value()]
    return any(value not in (None, []) for value in values)
