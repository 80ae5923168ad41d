"""The tool that runs tests of equal tokens as on other CPUs, and the mark that it finds them by."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import instruction_sets
from tests.instruction_sets import PROBES, Outcome, bits, environment, main, ran

TESTS = Path(__file__).parent
# what holds the tokens of an answer, in a test of these folders (elsewhere `tokens` are numbers of tokens)
SAYS = re.compile(r"(?<!found)\.tokens\b(?!\()|\.said\b|(?<![.\w])(?:own_tokens|tokens|said|generated)\(")
FOLDERS = ("bench", "conversations", "engine", "jobs", "prompts", "serve")


def compared(function: ast.FunctionDef) -> list[str]:
    """Assertions that two ways to an answer say the same."""
    asserted = [node.test for node in ast.walk(function) if isinstance(node, ast.Assert)]
    equal = [node for one in asserted for node in ast.walk(one) if isinstance(node, ast.Compare)]
    sides = [
        (ast.unparse(node), [ast.unparse(side) for side in (node.left, *node.comparators)])
        for node in equal
        if isinstance(node.ops[0], ast.Eq)
    ]
    return [
        whole for whole, each in sides if SAYS.search(whole) and not any("len(" in one or one.isdigit() for one in each)
    ]


def test_every_test_of_equal_tokens_has_the_mark() -> None:
    """Else no other set of instructions is tried with it."""
    unmarked = []
    for file in [*(TESTS / "methods").glob("test_*.py"), *(TESTS / "harness").glob("*/test_*.py")]:
        if file.parent.name not in ("methods", *FOLDERS) or file.stem.endswith("_gpu"):
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and (found := compared(node)):
                marks = [ast.unparse(decorator) for decorator in node.decorator_list]
                unmarked += [] if "pytest.mark.tokens" in marks else [f"{file.name}::{node.name}: {found[0]}"]
    assert not unmarked, "give @pytest.mark.tokens to " + ", ".join(unmarked)


def probes(monkeypatch: pytest.MonkeyPatch, **digests: str) -> None:
    """`digests`: of all probes under each setting, by the first variable's value."""
    monkeypatch.setattr(
        instruction_sets, "probed", lambda setting: dict.fromkeys(PROBES, digests[setting.partition("=")[2] or "none"])
    )


def test_what_changes_no_bit_is_not_tested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    probes(monkeypatch, none="1", AVX2="1")
    monkeypatch.setattr(instruction_sets, "ran", lambda *words: pytest.fail("there is nothing to run"))
    assert main(["MKL_ENABLE_INSTRUCTIONS=AVX2"]) == 0
    told = capsys.readouterr().out
    assert "not tested: it changes no bit of any probe here; MKL heeds it on Intel alone" in told
    assert "passed" not in told


def test_what_fails_under_a_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probes(monkeypatch, none="1", AVX2="1", COMPATIBLE="2")
    outcomes = {"": Outcome(3, []), "MKL_CBWR=COMPATIBLE": Outcome(2, ["tests.test_a::test_b"])}
    monkeypatch.setattr(instruction_sets, "ran", lambda setting, *words: outcomes[setting])
    assert main(["", "MKL_CBWR=COMPATIBLE"]) == 1
    plain, other, name = capsys.readouterr().out.splitlines()
    assert plain.split() == ["as", "it", "is", "3", "passed,", "0", "failed"]
    assert "2 passed, 1 failed (other bits: product, " in other
    assert name.strip() == "tests.test_a::test_b"


def test_tests_run_under_the_setting_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # of another setting
    file = tmp_path / "test_it.py"
    file.write_text(
        "import os, pytest\n"
        "def test_a(): assert 'ONEDNN_MAX_CPU_ISA' not in os.environ\n"
        "def test_b(): assert os.environ['MKL_CBWR'] != 'COMPATIBLE'\n"
        "def test_c(): pytest.skip('')\n"
        "def test_d(): assert False\n"
    )
    few = ("-n", "0", "-c", "/dev/null", "--rootdir", str(tmp_path), str(file), "-k", "not test_d")
    assert ran("MKL_CBWR=COMPATIBLE", *few) == Outcome(1, ["test_it::test_b"])


def test_probes_are_the_same_each_time_and_settings_replace_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    now = environment("ATEN_CPU_CAPABILITY=default KV_HARNESS_MARCH=x86-64-v3")
    assert (now["ATEN_CPU_CAPABILITY"], now["KV_HARNESS_MARCH"]) == ("default", "x86-64-v3")
    assert "MKL_CBWR" not in now
    assert bits() == bits()
    assert len(set(bits().values())) == len(PROBES)
