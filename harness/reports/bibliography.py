"""BibTeX of what a report rests on: the paper of every method in it, and this harness."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.reports.compare import Comparison
from harness.reports.papers import RESULTS
from harness.results.compared import FULL
from harness.results.summary_file import method_of

ENTRIES = RESULTS / "paper" / "methods.bib"  # keys are the modules of methods
OURS = "kv-harness"
WITHOUT = (FULL, "oracle")  # these have no paper


def bibtex(tables: Sequence[Comparison]) -> str:
    """Return the entries, and a comment for each method of which none is known."""
    known = {
        found[1]: found[0] for found in re.finditer(r"^@\w+\{([^,]+),.*?^\}", ENTRIES.read_text("utf-8"), re.M | re.S)
    }
    used = sorted({method_of(entry.run) for table in tables for entry in table.entries} - {*WITHOUT})
    lacking = [f"% no entry is known for {method}: see its card\n" for method in used if method not in known]
    return "\n".join([*(f"{known[name]}\n" for name in [OURS, *used] if name in known), *lacking])
