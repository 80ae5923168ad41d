"""The cards: complete, read without importing a method, and the page in docs is what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.commands.list import main
from harness.config.catalogue import CARD, entries
from harness.config.compose import composed
from tests.generated_pages import COMMAND, methods_page

ROOT = Path(__file__).parents[2]
METHODS = entries("method")


@pytest.mark.parametrize("name", METHODS)
def test_every_card_is_complete(name: str) -> None:
    facts = METHODS[name].facts()
    assert tuple({**facts, "later_turns": ""}) == CARD
    assert all(text and "{" not in text for text in facts.values())


def test_a_name_alone_shows_its_card_whatever_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pqcache", "niah", "shadowkv_rank"]) == 0
    shown = capsys.readouterr().out
    assert all(card in shown for card in ("method=pqcache\n", "task=niah\n", "experiment=shadowkv_rank\n"))
    assert main(["pqcach"]) == 2
    assert "did you mean pqcache?" in capsys.readouterr().err


def test_the_page_in_docs_is_what_the_cards_say() -> None:
    written = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert methods_page(METHODS.values()) == written, f"run: {COMMAND}"


def test_a_preset_is_its_base_with_its_own_values(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "wide.yaml").write_text("# Wider.\ndefaults: [snapkv, _self_]\nkernel: 31  # far\n")
    [wide] = entries("method", (tmp_path,)).values()
    assert wide.base == METHODS["snapkv"]
    assert wide.values() == METHODS["snapkv"].values() | {"kernel": 31}
    comments = {name: comment for name, _, comment in wide.parameters()}
    assert comments["kernel"] == "far"
    assert comments["window"] == {name: text for name, _, text in METHODS["snapkv"].parameters()}["window"]
    assert "pooled over 31 tokens" in wide.facts()["index_cost"]


@pytest.mark.parametrize("name", [name for name, entry in METHODS.items() if entry.base])
def test_the_command_line_composes_a_preset_as_the_page_says(name: str) -> None:
    assert composed([f"method={name}"])["method"] == METHODS[name].values()
