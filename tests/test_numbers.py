"""Every number of README and of the pages of measurements comes from a published file, or has a reason to be there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from harness.config.experiments import experiments
from tests.generated_pages import experiments_table
from tests.numbers import (
    benchmarks,
    comparison,
    headline,
    history,
    infinigen,
    kernels,
    pages,
    plan,
    readme,
    simulator,
    tasks,
    triage,
    tuning,
)

ROOT = Path(__file__).parents[1]
GIVEN = yaml.safe_load((ROOT / "tests" / "numbers" / "given.yaml").read_text(encoding="utf-8"))
REASONS = {"paper", "setup", "meaning", "arithmetic", "tested", "maker"}  # the file says what each means
GENERATED = "docs/settings.md"  # whole, from the comments in conf/
HELD: dict[str, Callable[[], list[str]]] = {
    "README.md": readme.held,
    "docs/history.md": lambda: [*history.held(), *simulator.held()],
    "docs/benchmarks.md": benchmarks.held,
    "docs/comparison.md": lambda: [*headline.held(), *comparison.held()],
    "docs/budgets.md": lambda: [*pages.budgets()],
    "docs/commands.md": list,
    "docs/data.md": list,
    "docs/experiments.md": lambda: [*infinigen.held(), *experiments_table(experiments()).splitlines()],
    "docs/extending.md": list,
    "docs/glossary.md": list,
    "docs/kernels.md": kernels.held,
    "docs/method_contract.md": list,
    "docs/methods.md": lambda: [*pages.methods()],
    "docs/multiturn.md": lambda: [*pages.multiturn()],
    "docs/other_loops.md": list,
    "docs/peers.md": list,
    "docs/plan.md": plan.held,
    "docs/presses.md": list,
    "docs/report.md": list,
    "docs/results.md": lambda: [*pages.results()],
    "docs/serving.md": list,
    "docs/sweeps.md": list,
    "docs/tasks.md": tasks.held,
    "docs/triage.md": triage.held,
    "docs/trust.md": lambda: [*pages.trust()],
    "docs/tuning.md": tuning.held,
}
ELSEWHERE = (  # output and generated tables, which other tests hold; names, links, references; in their order
    r"^```.*?^```$",
    r"<!-- (?:rows|headline) of .*?<!-- end -->",
    r"^#.*?$|^\d+\. ",
    r"`[^`]*`",
    r"\]\([^)]*\)",
    r"\b(?:sections?|[Ff]igures?|tables?|arXiv|ATC|Gemma|Llama|RTX|kvpress|torch)[ :]"
    r"\d[\d.,]*(?:(?:,| and| to| or) \d[\d.]*)*",
    # sizes of what was run, which are no result, and the settings of the published tables
    r"\b(?:\d[\d,]*(?:,| and| to| or) )*\d[\d,]* (?:more )?(?:tokens|prompts|examples|samples|windows|rounds|layers|"
    r"sinks|channels|queries|heads|texts|conversations|centroids|bits)\b",
    r"\b[Aa]t (?:a budget of )?(?:10|20|50) %|\b[Aa]t (?:2048|4096|8192)\b|\bkernel (?:of )?\d+",
)
NUMBER = re.compile(r"(?<![\w.,])(?<![A-Za-z]-)\d[\w.,]*(?<![.,])")
MODEL_SIZE = re.compile(r"\d+[BM]")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def flat(text: str) -> str:
    return " ".join(text.split())


def unheld(page: str, held: Sequence[str]) -> list[str]:
    """The numbers of a page that stand in no phrase of `held`, each with the words around it."""
    text = re.sub(ELSEWHERE[0], "", page, flags=re.DOTALL | re.MULTILINE)
    text = flat(re.sub(ELSEWHERE[1], "", re.sub(ELSEWHERE[2], "", text, flags=re.MULTILINE), flags=re.DOTALL))
    for phrase in sorted(held, key=len, reverse=True):
        text = text.replace(flat(phrase), " ... ")
    for pattern in ELSEWHERE[3:]:
        text = re.sub(pattern, "", text)
    found = [number for number in NUMBER.finditer(text) if not MODEL_SIZE.fullmatch(number[0])]
    return [f"{number[0]}: {text[max(0, number.start() - 60) : number.end() + 40]}" for number in found]


@pytest.mark.parametrize("name", HELD)
def test_every_number_of_a_page_is_held(name: str) -> None:
    page = read(name)
    computed = [phrase for phrase in HELD[name]() if phrase]
    given = [phrase for phrases in GIVEN.get(name, {}).values() for phrase in phrases]
    missing = [phrase for phrase in [*computed, *given] if flat(phrase) not in flat(page)]
    assert missing == [], f"{name} says something else: files give tests/numbers these phrases"
    left = unheld(page, [*computed, *given])
    assert left == [], f"{name}: compute these from a file in tests/numbers, or say in given.yaml where they come from"


def test_a_number_that_nobody_holds_is_found() -> None:
    page = "It takes 12.5 ms, a tenth of 3 s.\n\n```\n7 in output\n```\nThe 8B model has `9` in figure 10."
    assert [told.split(":")[0] for told in unheld(page, ["a tenth of 3 s"])] == ["12.5"]


def test_no_page_with_numbers_is_left_out() -> None:
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - {GENERATED}
    assert {page for page in pages - set(HELD) if unheld(read(page), [])} == set()


def test_given_phrases_are_of_use() -> None:
    """A phrase without a number, or one that a file holds already, would only make the list longer."""
    for name, reasons in GIVEN.items():
        assert set(reasons) <= REASONS
        phrases = [phrase for listed in reasons.values() for phrase in listed]
        assert len(phrases) == len(set(phrases))
        for phrase in phrases:
            assert unheld(flat(phrase), []), f"{name}: {phrase}"
