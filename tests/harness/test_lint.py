"""`python -m harness.lint`: whole files of prompts, each kind of finding once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.commands import lint
from tests.fast import MODEL_ARGS

NEWS = ["task=longbench", "task.datasets=[multi_news]", *MODEL_ARGS]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert lint.main(list(arguments)) == code
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.slow
def test_the_whole_of_multi_news(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *NEWS, "task.max_prompt_tokens=4000", f"data.root={shared_data}")
    first, finding = text.splitlines()
    assert first.startswith("200 prompts of ")
    assert finding.startswith("warning: ")
    assert "200 prompts, first" in finding


def test_each_kind_of_finding_is_told_once_with_its_first_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"_id": f"row{i}", "context": "Some news. " * 10 * i, "input": "", "answers": ["sum"]} for i in range(1, 6)]
    (tmp_path / "longbench").mkdir()
    (tmp_path / "longbench" / "multi_news.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [*NEWS, "--show", "1", "task.max_prompt_tokens=400", f"data.root={tmp_path}"]
    text = printed(capsys, *arguments)
    assert text.startswith("--- row1\n<|im_start|>user\nYou are given several news passages.")
    assert "5 prompts of" in text
    assert "5 prompts, first" in text
    assert text.count("were cut from the middle") == 1


def test_prompts_that_a_method_reads_whole_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["task=niah", "task.lengths=[400,2000]", "task.depths=1", "method=snapkv", "method.window=100"]
    text = printed(capsys, *short, "budget=0.2", *MODEL_ARGS)
    assert "warning: 1 of 2 prompts, first magic_city/400/" in text
    assert "all is read: the budget gives 80 of 400 prompt tokens" in text
    assert "nothing found" not in text
    assert "nothing found" in printed(capsys, *short, "budget=0.5", *MODEL_ARGS)


def test_wrong_data_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *NEWS, f"data.root={tmp_path / 'absent'}", code=2)
    assert text.startswith("error: data.root=")
    assert text.count("\n") == 1


def test_a_number_in_place_of_essays_is_no_haystack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was one: 55555..."""
    (tmp_path / "PaulGrahamEssays.json").write_text('{"text": 5}')
    text = printed(capsys, "task=niah", "task.lengths=[400]", *MODEL_ARGS, f"data.root={tmp_path}", code=2)
    assert text.startswith(f"error: {tmp_path / 'PaulGrahamEssays.json'} has 5 as 'text', which should be text")
    assert text.count("\n") == 1
