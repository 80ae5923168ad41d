"""Records when something ran in parallel to something else, in seconds of one clock."""

from __future__ import annotations


class Spans:
    """Hold spans of time as pairs of start and end. Any thread may add one."""

    def __init__(self, *spans: tuple[float, float]) -> None:
        self._spans = list(spans)

    def add(self, began: float, ended: float) -> None:
        self._spans.append((began, ended))

    def since(self, moment: float) -> Spans:
        """Return the parts of the spans that lie after `moment`."""
        return Spans(*((max(start, moment), end) for start, end in self._spans if end > moment))

    def __add__(self, other: Spans) -> Spans:
        return Spans(*self._spans, *other._spans)

    @property
    def seconds(self) -> float:
        """Return the seconds in which at least one of the spans ran."""
        total, until = 0.0, 0.0
        for start, end in sorted(self._spans):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    def seconds_without(self, other: Spans) -> float:
        """Return the seconds in which one of the spans ran, and none of `other`."""
        return (self + other).seconds - other.seconds
