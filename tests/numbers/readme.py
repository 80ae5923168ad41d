"""Numbers of README: those of its sentences about the table of `make demo`, which `tests/test_readme.py` holds."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def held() -> list[str]:
    """A sentence from the row of PQCache."""
    found = re.search(r"^pqcache .*?\s\+(0\.\d+) \[", README.read_text("utf-8"), re.MULTILINE)
    assert found
    return [f"the right answer costs {float(found[1]):.2f} nats per token more"]
