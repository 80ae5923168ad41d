"""BibTeX of what a report rests on: the paper of every method in it, and this harness."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.reports.compare import Comparison
from harness.reports.papers import RESULTS
from harness.results.compared import FULL
from harness.results.run_folder import StoredRun
from harness.results.summary import method_of

ENTRIES = RESULTS / "paper" / "methods.bib"  # keys are the modules of methods, or presses without their last word
OURS = "kv-harness"
WITHOUT = {FULL, "oracle", "merging", "composed"}  # these have no paper
ALSO = {"streamingllm": "streaming"}  # a press by the key of its paper


def bibtex(tables: Sequence[Comparison]) -> str:
    """Return the entries, and a comment for each method of which none is known."""
    known = {
        found[1]: found[0] for found in re.finditer(r"^@\w+\{([^,]+),.*?^\}", ENTRIES.read_text("utf-8"), re.M | re.S)
    }
    used = sorted({name for table in tables for entry in table.entries for name in _used(entry.run)} - WITHOUT)
    lacking = [f"% no entry is known for {method}: see its card\n" for method in used if method not in known]
    return "\n".join([*(f"{known[name]}\n" for name in [OURS, *used] if name in known), *lacking])


def _used(run: StoredRun) -> Iterator[str]:
    """Yield the method of a run, and all presses in its parameters."""
    yield method_of(run)
    waiting: list[Any] = [run.info["config"]["method"].get("press")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if "name" in part:
                press = str(part["name"]).removesuffix("Press").lower()
                yield ALSO.get(press, press)
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
