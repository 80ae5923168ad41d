"""Numbers of pages that hold few of them: docs/budgets.md, methods.md, multiturn.md, results.md and trust.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from evals.multiturn.law import MEAN_TURNS, MOST_TURNS, ONE_TURN, OVER
from tests.numbers.comparison import MIB, Scores

ROOT = Path(__file__).parents[2]


def budgets() -> Iterator[str]:
    needles = Scores("needles")
    read, union = (needles.of("quest", 20, f"budget.{of}.share") for of in ("attended", "union"))
    yield f"Quest attends to {read:.0f} % per query head and reads {union:.0f} % per KV head"


def methods() -> Iterator[str]:
    """The tables, as they stand on the page: they are generated, and tests/harness/test_list.py holds them."""
    yield from re.findall(r"^\|.*\d.*\|$", (ROOT / "docs" / "methods.md").read_text("utf-8"), re.MULTILINE)


def multiturn() -> Iterator[str]:
    more = [f"{100 * share:.0f} %" for share in OVER.values()]
    yield (
        f"A conversation has {MEAN_TURNS} turns on average and at most {MOST_TURNS}; {100 * ONE_TURN:.0f} % have one "
        f"turn. Its tokens are log-normal: {more[0]} of the conversations have more than 2K and {more[1]} more than 4K"
    )
    assert [*OVER] == [2048, 4096]


def results() -> Iterator[str]:
    needles = Scores("needles")
    assert needles.of("oracle") == needles.of("full") == 100, "equal pairs"
    yield f"after 20 equal pairs the difference may still be {needles.of('oracle', 20, 'full.ci95.high'):.0f} points"
    rotation = 30 * 3 * 64 * 64 * 4  # layers, KV heads, and a square of fp32 for each
    yield f"InfiniGen's A ({rotation / MIB:.1f} MiB for the embedded model)"


def trust() -> Iterator[str]:
    expected = json.loads((ROOT / "harness" / "canonical_checks" / "expected.json").read_text("utf-8"))
    wide, narrow = (expected[f"perplexity, {dtype}"]["perplexity"] for dtype in ("fp32", "bf16"))
    yield f"differs by {100 * abs(narrow / wide - 1):.1f} % from that in fp32"
    for file in sorted((ROOT / "tests" / "official").glob("*.py")):
        if not file.name.startswith("test_"):
            for commit in re.findall(r'Repository\("\S+/\S+", "(\w{12})\w{28}"\)', file.read_text("utf-8")):
                yield f"| {commit} |"
