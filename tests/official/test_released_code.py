"""`make test-official CLONES=folder`: the methods against their authors' code, as far as it runs on a CPU.

What differs, and why, stands in results/published/released_code.csv, from which docs/methods.md has it.
"""

from __future__ import annotations

import pytest

from tests.official.comparison import HEAD, TABLE, Comparison, stored
from tests.official.table import COMPARISONS

METHODS = [comparison.method for comparison in COMPARISONS]
SLACK = 0.002  # of what is compared, since another CPU rounds otherwise


@pytest.mark.model
@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_what_differs_is_what_the_table_says(comparison: Comparison) -> None:
    found = comparison.row()
    (row,) = [row for row in stored() if all(row[key] == found[key] for key in HEAD[:5])]
    assert found["of"] == row["of"]
    assert abs(int(found["same"]) - int(row["same"])) <= SLACK * int(row["of"]), found[HEAD[-1]]


def test_the_table_has_a_row_for_each_comparison() -> None:
    named = {" ".join(filter(None, (row["method"], row["setting"], row["compared"]))) for row in stored()}
    assert named == {comparison.name for comparison in COMPARISONS}


def test_the_page_names_every_clone_with_its_commit() -> None:
    page = (TABLE.parents[2] / "docs" / "comparison.md").read_text(encoding="utf-8")
    for repository in {comparison.repository for comparison in COMPARISONS}:
        methods = sorted({one.method for one in COMPARISONS if one.repository == repository}, key=METHODS.index)
        named = ", ".join(f"`{method}`" for method in methods)
        assert f"| {repository.name} | {named} | {repository.commit[:12]} |" in page
