"""`harness.check_numbers`: the numbers of a published row come out again, and one that does not is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from harness.commands import check_numbers
from harness.config.catalogue import experiments
from tests.fast import MODEL_ARGS, TASK_ARGS

Main = Callable[..., int]
PROMPTS = Path(__file__).parents[2] / "results" / "published" / "prompts"


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Main:
    """The command on a tiny model, with an empty folder of published numbers."""
    (tmp_path / "prompts").mkdir()
    monkeypatch.setattr(check_numbers, "PUBLISHED", tmp_path)
    words = ["headline_8k", *MODEL_ARGS, "task=niah", *TASK_ARGS]
    return lambda *more: check_numbers.main([*words, *more])


def test_numbers_come_out_again_and_one_that_does_not_is_named(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main() == 2
    assert "headline_8k.csv is not there" in capsys.readouterr().err
    assert main("dtype=fp32", "--record", "fp32") == main("--record", "bf16, this CPU") == 0
    assert main() == 0
    file = tmp_path / "prompts" / "headline_8k.csv"
    rows = pd.read_csv(file)
    published = (rows["method"] == "full") & (rows["arithmetic"] != "fp32")
    turned = rows.index[published][:1]
    rows.loc[turned, "score"] = 100 - rows.loc[turned, "score"]
    rows.to_csv(file, index=False)
    assert main() == 0
    rows.loc[rows["method"] == "full", "NLL"] += 1
    rows.to_csv(file, index=False)
    capsys.readouterr()
    assert main() == 1
    *_, said = capsys.readouterr().out.splitlines()
    assert "NLL of full." in said
    assert "pqcache" not in said
    rows.assign(prompt_sha256="of another prompt").to_csv(file, index=False)
    assert main() == 2
    assert "constraints.txt" in capsys.readouterr().err


@pytest.mark.parametrize("file", PROMPTS.glob("*.csv"), ids=lambda file: file.stem)
def test_published_prompts_have_an_experiment_and_a_measured_rounding(file: Path) -> None:
    rows = pd.read_csv(file)
    assert f"small/tables/{file.stem}" in experiments()
    first, *others = rows["arithmetic"].unique()
    assert first != check_numbers.EXACT
    assert check_numbers.EXACT in others
    assert (rows[rows["arithmetic"] == first].groupby("method")["id"].nunique() == 10).all()
