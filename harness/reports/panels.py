"""The costs that a score is held against, and the colours of the lines: the same in every picture and on the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.results.pairs import FULL

LOAD = "L"  # the stamp of such times
Row = Mapping[str, Any]  # a summary, with `label` naming its line, and its `stamps`

# Twelve that differ for normal and for colour-blind eyes (after M. Krzywinski, mk.bcgsc.ca/colorblind); Full is black,
# and grey is for what is within the noise.
COLOURS = (
    "#008df9", "#e20134", "#009f81", "#ff6e3a", "#8400cd", "#ffc33b",
    "#ff5aaf", "#00c2f9", "#9f0162", "#00d302", "#a0522d", "#7a7a00",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Panel:
    """One cost to hold the score against; rows without it, or where it is 0, are not drawn. `timed`: a time,
    which says something only beside Full's, and little of a machine that others used."""

    name: str
    cost: Callable[[Row], float | None]
    log: bool = False
    timed: bool = False

    def shows(self, rows: Sequence[Row]) -> bool:
        """Whether another method than Full has the cost with a score; and Full too, if it is there and wanted."""
        priced = [row["method"] == FULL for row in rows if row["score"]["mean"] is not None and self.cost(row)]
        lacks_full = self.timed and not any(priced) and any(row["method"] == FULL for row in rows)
        return not all(priced) and not lacks_full

    def title(self, rows: Sequence[Row]) -> str:
        """Its name, and below it how many points are times of a machine that others used."""
        doubtful = [LOAD in row.get("stamps", "") for row in rows if self.timed and self.cost(row)]
        caution = f"\n{LOAD}: others used the machine for {sum(doubtful)} of {len(doubtful)} points"
        return self.name + caution * any(doubtful)

    def points(self, rows: Sequence[Row]) -> dict[str, list[tuple[float, Row]]]:
        lines: dict[str, list[tuple[float, Row]]] = defaultdict(list)
        for row in rows:
            if row["score"]["mean"] is not None and (x := self.cost(row)):
                lines[row["label"]].append((x, row))
        return {label: sorted(points, key=lambda point: point[0]) for label, points in lines.items()}


def _read(row: Row) -> float | None:
    """Percent of the prompt: over all query heads of a KV head, where that was counted."""
    share = row["budget"]["union"]["share"] or row["budget"]["attended"]["share"]
    return _scaled(share, 100)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


PANELS = (
    Panel("prompt tokens a KV head reads per step (%)", _read, log=True),
    Panel("KV cache on the device, largest (MiB)", lambda row: _scaled(row["memory"]["kv_device_bytes"], 2**-20)),
    Panel(
        "bytes moved between tiers per step, mean (MiB)",
        lambda row: _scaled(row["memory"]["moved_bytes_per_step"], 2**-20),
    ),
    Panel("median time per output token (ms)", lambda row: _scaled(row["tpot_s"]["p50"], 1000), timed=True),
)
