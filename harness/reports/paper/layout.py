"""Says how a table of a paper is laid out, and which measures its columns can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.terminal.tables import BYTES, SECONDS, Scale

PERCENT = ((0.01, "%"),)
PLAIN = ((1.0, ""),)
Size = Literal["tiny", "scriptsize", "footnotesize", "small", "normalsize"]
# in points
SIZES: dict[Size, int] = {
    "tiny": 5,
    "scriptsize": 7,
    "footnotesize": 8,
    "small": 9,
    "normalsize": 10,
}
Dimension = Literal["model", "method", "budget", "column"]
DIMENSIONS: tuple[Dimension, ...] = ("model", "budget", "method", "column")  # of what is no row


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The section `table` of a choice (harness/reports/choice.py); docs/results.md explains the
    keys."""

    # names of columns, or headings that each span some; none: what suits the runs
    columns: list[Any] | dict[str, Any] = field(default_factory=list)
    # name of a column -> the tasks and groups that it averages
    averages: dict[str, Any] = field(default_factory=dict)
    # a column, or a member of an average, that no run has
    missing: Literal["refuse", "drop"] = "refuse"
    rows: Sequence[Dimension] = ()  # none: method and budget
    interval: Literal["pm", "small", "none"] = "pm"
    digits: Literal[0, 1, 2, 3] = 1
    bold: bool = True
    cite: bool = False
    caption: str | None = None
    label: str = "tab:results"
    legend: bool = True
    wide: bool = False  # over both columns of a page
    fit: bool = False  # drawn as wide as a line of text
    size: Size | None = None  # of the type
    angle: int = 0  # of the columns' names, in degrees


def items_of(value: Any) -> Sequence[Any]:
    """Return the items of a list of a layout; one item is a list of one."""
    return value if isinstance(value, (list, tuple)) else [value]


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of summary.json that a column can show."""

    head: str
    path: str

    def of(self, summary: Mapping[str, Any]) -> float | None:
        value: Any = summary
        for key in self.path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if known else None

    @property
    def units(self) -> Scale:
        """The units of the number, which the names of its key have: `tpot_s`, `kv_host_bytes`."""
        words = self.path.replace(".", "_").split("_")
        if "bytes" in words:
            return BYTES
        if "tok" in words:  # tokens per second
            return PLAIN
        return SECONDS if "s" in words else PERCENT if "share" in words else PLAIN

    @property
    def per(self) -> str:
        return "/step" if self.path.endswith("_per_step") else ""


# by the word that names one in a choice; any other is named by its key in summary.json
MEASURES = {
    word: Measure(head, path)
    for word, head, path in (
        ("attended", "attended", "budget.attended.share"),
        ("kv_device", "KV on device", "memory.kv_device_bytes"),
        ("kv_host", "KV on host", "memory.kv_host_bytes"),
        ("moved", "moved", "memory.moved_bytes_per_step"),
        ("ttft", "TTFT", "ttft_s.p50"),
        ("tt2t", "TT2T", "tt2t_s.p50"),
        ("tpot", "TPOT", "tpot_s.p50"),
        ("throughput", "tokens/s", "throughput_tok_s"),
        ("nll", "NLL", "likelihood.mean"),
    )
}
USUAL = ("kv_device", "moved", "tpot")
