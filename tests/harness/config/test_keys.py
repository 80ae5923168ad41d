"""The list of all keys: each has a default and a meaning, --help prints them, the page in docs is up to date."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config.catalogue import GROUPS, entries, plain
from harness.config.entry import RARE_SECTIONS
from harness.config.keys import settings, settings_text
from harness.config.settings import CHOICES, KEYS
from tests.generated_pages import COMMAND, CONFIG, config_yaml, methods_page, settings_page

ROOT = Path(__file__).parents[3]
Cli = Callable[..., tuple[int, str, str]]
LISTED = {row.key: row for row in settings()}


def test_every_key_that_can_be_set_is_listed_with_a_meaning() -> None:
    assert set(LISTED) == set(KEYS)
    assert [row.key for row in LISTED.values() if row.values and not row.meaning] == []
    assert [row.key for row in LISTED.values() if not row.section] == []


def test_defaults_and_values_are_those_of_the_schema() -> None:
    assert LISTED["budget"].given == "budget=0.2"
    assert LISTED["generation.max_new_tokens"][2:4] == ("null", "a whole number or null")
    for name, choices in CHOICES.items():
        assert LISTED[name].values == ", ".join(map(plain, choices))


def test_each_parameter_stands_on_one_page() -> None:
    pages = {"method": methods_page(entries("method").values()), "task": settings_page(), "model": settings_page()}
    assert "`method.m=" not in settings_page()
    for group in GROUPS:
        page, prefix = pages[group], "" if group == "method" else f"{group}."
        whole = {entry.target: entry for entry in reversed(entries(group).values())}  # the first of each class
        for entry in whole.values():
            for name, _, comment in entry.parameters():
                assert f"`{prefix}{name}=" in page
                assert comment.replace("|", "\\|") in page


def test_the_page_in_docs_is_up_to_date() -> None:
    assert config_yaml() == CONFIG.read_text(encoding="utf-8"), f"run: {COMMAND}"
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert settings_page() == written, f"run: {COMMAND}"


def test_help_lists_all_keys_and_the_parameters_of_what_is_named(cli: Cli) -> None:
    code, out, err = cli("-m", "method=quest,h2o", "task=ruler", "--help")
    assert (code, err) == (0, "")
    for row in LISTED.values():
        if row.values:
            assert (f"  {row.given} " in out) == (row.section not in RARE_SECTIONS)
            assert f"  {row.given} " in settings_text()
    assert "(device, host, disk)" in out
    for known in ("method=quest", "method.page_size=16", "method=h2o", "method.sinks=0", "task.tasks=[niah_single_1"):
        assert known in out
    assert "method.alpha" not in out


def test_help_knows_the_methods_of_other_folders(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("# Mine.\n_target_: mine.Mine\nwidth: 3  # of mine\n")
    code, out, _ = cli("--config-dir", str(tmp_path), "method=mine", "-h")
    assert code == 0
    assert "lm_infinite, mine, oracle" in out
    assert "  method.width=3  of mine" in out


@pytest.mark.parametrize("words", [["-m", "harness", "--help"], ["-m", "harness.list", "settings"]])
def test_they_need_no_torch(words: list[str]) -> None:
    code = f"import sys, runpy; sys.argv = {words[1:]!r}\n"
    code += f"try: runpy.run_module({words[1]!r}, run_name='__main__', alter_sys=True)\n"
    code += "except SystemExit as end: assert end.code == 0\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
