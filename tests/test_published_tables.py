"""docs/comparison.md shows what the committed tables hold."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parents[1]
tables = run_path(str(ROOT / "docs" / "tables.py"))


def test_the_page_holds_the_numbers_of_the_tables() -> None:
    page = tables["PAGE"].read_text(encoding="utf-8")
    assert tables["TABLE"].search(page)
    assert tables["written"](page) == page, "run: python docs/tables.py"


def test_every_published_table_is_an_experiment() -> None:
    experiments = {file.stem for file in (ROOT / "conf" / "experiment" / "tables").glob("*.yaml")}
    assert {file.stem for file in tables["PUBLISHED"].iterdir()} <= experiments
