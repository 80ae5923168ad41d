"""The cards: complete, read without importing a method, and the page in docs is what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.catalogue import entries
from harness.list import main
from methods.card import Card

ROOT = Path(__file__).parents[2]
METHODS = {entry.name: entry for entry in entries("method")}


@pytest.mark.parametrize("name", METHODS)
def test_every_card_is_complete(name: str) -> None:
    facts = METHODS[name].facts()
    assert tuple(facts) == Card._fields
    assert all(text and "{" not in text for text in facts.values())


def test_a_card_names_the_yamls_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["method=pqcache"]) == 0
    shown = capsys.readouterr().out
    assert "index cost    2 codes of 6 bits per token" in shown
    assert "method.b=6" in shown


def test_the_page_in_docs_is_what_the_cards_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--markdown"]) == 0
    written = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == written, "run: python -m harness.list --markdown > docs/methods.md"


def test_cards_need_no_torch() -> None:
    code = "import sys; from harness.list import main; main(['--markdown']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
