"""Defines the policy in which a layer keeps the state of an ability (methods/abilities)."""

from __future__ import annotations

from typing import Any

from methods.layers.policy import Policy


class AbilityState(Policy, capturable=True, of_each={}):
    """Hold the state of one ability in one layer. It is saved, joined with that of other sequences,
    truncated and captured as every policy is, and acts at the moments that the hooks name. Nothing
    is called in a step of a layer whose abilities do not act in steps."""

    layer: Any  # a `Layer`

    def before_seal(self) -> None:
        """Act when the prompt is complete and all of it is stored."""

    def after_keep(self) -> None:
        """Act when it is settled what stays of the prompt, before an index is made of it."""

    def after_seal(self) -> bool:
        """Act when the prompt is sealed. Return whether `before_step` is to be called."""
        return False

    def before_step(self) -> None:
        """Act before a step stores its token."""

    def idle_steps(self) -> int:
        """Return how many steps can be taken before `before_step` must be called again."""
        return 0

    def capture_refusal(self) -> str | None:
        if self in self.layer.acting and not self.idle_steps():
            return f"{type(self).__name__} acts before each step"
        return super().capture_refusal()
