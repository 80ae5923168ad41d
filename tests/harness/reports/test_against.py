"""Methods against methods, tasks as columns, chosen columns and citations."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import yaml

from evals import stats
from evals.stats import shift
from harness.commands import report
from harness.reports.against import Contrasts, as_plain, contrasts
from harness.reports.bibliography import ENTRIES, WITHOUT, bibtex
from harness.reports.by_task import by_task
from harness.reports.compare import Comparison, comparisons
from harness.results.records import Record, StoreError
from harness.results.run_folder import find, load
from tests.fake_records import record, write_run

ROOT = Path(__file__).parents[3]


def lines(scores: list[float], costs: list[float] | None = None, prefix: str = "p") -> list[Record]:
    return [
        record(
            f"e{i}",
            prompt_sha256=f"{prefix}{i}",
            score=score,
            tokens=[i, 1, 2, int(100 * score)],
            attended_prompt=10.0,
            answer_nll=costs[i] if costs else None,
        )
        for i, score in enumerate(scores)
    ]


def tables_of(root: Path) -> list[Comparison]:
    return comparisons([load(run) for run in find([root])])


GOOD, BAD = [1.0] * 12, [0.0] * 8 + [1.0] * 4
CHEAP, DEAR = [0.1 + 0.01 * i for i in range(12)], [0.9 + 0.02 * i for i in range(12)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for budget in (0.1, 0.2):
        write_run(tmp_path, lines(GOOD, CHEAP), "snapkv", budget=budget)
        write_run(tmp_path, lines(BAD, DEAR), "quest", budget=budget)
    write_run(tmp_path, lines(BAD, DEAR), "h2o", budget=0.3)
    return tmp_path


def test_a_method_stands_for_its_row_of_the_same_budget(root: Path) -> None:
    [found] = contrasts(tables_of(root), "snapkv")
    assert [(one.row.title, one.other.title, one.n) for one in found.contrasts] == [
        ("quest 10%", "snapkv 10%", 12),
        ("quest 20%", "snapkv 20%", 12),
    ]
    assert found.left_out == ["h2o 30%"]
    wanted = stats.paired(BAD, GOOD, [""] * 12)
    assert found.contrasts[0].score == wanted
    cost = shift(DEAR, CHEAP)
    assert found.contrasts[0].cost is not None
    assert (found.contrasts[0].cost.diff, found.contrasts[0].cost.p) == (pytest.approx(cost.diff), cost.p)


def test_a_row_may_be_named_with_its_budget(root: Path) -> None:
    [found] = contrasts(tables_of(root), "snapkv 20%")
    assert [one.row.title for one in found.contrasts] == ["h2o 30%", "quest 10%", "quest 20%", "snapkv 10%"]
    assert {one.other.title for one in found.contrasts} == {"snapkv 20%"}
    assert found.left_out == []


def test_holms_correction_is_over_all_that_is_shown(root: Path) -> None:
    [found] = contrasts(tables_of(root), "snapkv")
    rows = as_plain(found)
    ps = [row[f"{what}.p"] for row in rows for what in ("score", "likelihood")]
    assert [row[f"{what}.p_holm"] for row in rows for what in ("score", "likelihood")] == stats.holm(ps)
    assert found.stars() == [(True, True)] * 2


def test_seeds_of_the_data_bring_prompts_and_sampling_seeds_are_averaged(tmp_path: Path) -> None:
    """Two seeds with prompts of their own, and one that repeats the prompts of the first."""
    for seed, prefix, scores in ((0, "a", [1.0, 0.0]), (1, "b", [1.0, 1.0]), (2, "a", [0.0, 0.0])):
        write_run(tmp_path, lines(scores, prefix=prefix), "quest", seed=seed)
        write_run(tmp_path, lines([1.0, 1.0], prefix=prefix), "snapkv", seed=seed)
    [found] = contrasts(tables_of(tmp_path), "snapkv")
    [contrast] = found.contrasts
    assert contrast.n == 4
    assert contrast.score == stats.paired([0.5, 0.0, 1.0, 1.0], [1.0] * 4, [""] * 4)
    assert len(contrast.row.runs) == 3


def test_questions_on_one_text_are_one_unit_of_their_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        for method, score in (("quest", 0.0), ("snapkv", 1.0)):
            some = [record(f"e{i}", prompt_sha256=f"{seed}/{i}", score=score, unit=f"u{i // 2}") for i in range(8)]
            write_run(tmp_path, some, method, seed=seed)
    [found] = contrasts(tables_of(tmp_path), "snapkv")
    [contrast] = found.contrasts
    assert contrast.score == stats.paired([0.0] * 8, [1.0] * 8, [""] * 8)  # 16 prompts on 8 texts


def test_a_name_that_nothing_has_is_refused(root: Path) -> None:
    with pytest.raises(StoreError, match="mean snapkv"):
        contrasts(tables_of(root), "snapvk")
    with pytest.raises(StoreError) as raised:
        contrasts(tables_of(root), "nothing like it")
    listed = re.findall(r"snapkv [\w%]+", str(raised.value))
    assert listed
    assert len(listed) == len(set(listed))  # each name once


def test_every_form_has_the_further_tables(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root, lines(BAD), "quest", budget=0.1, task={"_target_": "evals.niah.Niah", "lengths": [2048]})
    forms = {name: root / f"out/all.{name}" for name in ("md", "tex", "csv", "bib")}
    options = [word for name, path in forms.items() for word in (f"--{name}", str(path))]
    assert report.main([str(root), "--against", "snapkv", "--by-task", *options]) == 0
    text = capsys.readouterr().out
    assert "Against snapkv: niah" in text
    assert "task: tiny" in text
    assert "Against snapkv:" in forms["md"].read_text()
    tex = forms["tex"].read_text()
    assert "task: tiny, protocol=prompt}" in tex
    assert tex.count(r"\begin{table}") == tex.count(r"\end{table}")
    with (root / "out/all-against.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == ["quest", "quest"]
    assert "@misc{quest," in forms["bib"].read_text()


def test_tasks_are_columns_and_a_method_without_one_has_a_gap(root: Path) -> None:
    write_run(root, lines(BAD), "quest", budget=0.1, task={"_target_": "evals.niah.Niah", "lengths": [2048]})
    [joined] = by_task(tables_of(root))
    cells = {column.head: column.cells for column in joined.columns}
    rows = list(zip(cells["method"], cells["budget"], strict=True))
    assert rows == [("h2o", "30%"), ("quest", "10%"), ("quest", "20%"), ("snapkv", "10%"), ("snapkv", "20%")]
    short, long = (cells[f"niah lengths=[{length}]"] for length in (1024, 2048))
    assert short == ["33.3", "33.3", "33.3", "100.0", "100.0"]
    assert long == ["", "33.3", "", "", ""]
    assert by_task(tables_of(root)[:1]) == []


def test_columns_are_chosen_by_their_heads(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(root), "--columns", "Score, n"]) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("method"))
    assert head.split() == ["method", "budget", "score", "n"]
    assert report.main([str(root), "--columns", "scores"]) == 2
    assert "mean score" in capsys.readouterr().err


def test_every_method_has_its_paper(root: Path) -> None:
    modules = {path.stem for path in (ROOT / "methods").glob("[!_]*.py")} - {"budget", *WITHOUT}
    entries = ENTRIES.read_text(encoding="utf-8")
    for module in modules:
        [entry] = [part for part in entries.split("\n\n") if part.startswith(f"@misc{{{module},")]
        arxiv = entry.partition("eprint = {")[2].partition("}")[0]
        assert arxiv in (ROOT / "methods" / f"{module}.py").read_text(encoding="utf-8"), module
    text = bibtex(tables_of(root))
    assert [line.partition("{")[2].rstrip(",") for line in text.splitlines() if line.startswith("@")] == [
        "kv-harness",
        "h2o",
        "quest",
        "snapkv",
    ]


def test_a_press_has_the_paper_of_its_method_beside_kvpress(tmp_path: Path) -> None:
    """Every press of conf/method is known, whatever it stands on."""
    presses = [yaml.safe_load(path.read_text("utf-8"))["press"] for path in (ROOT / "conf/method").glob("press_*.yaml")]
    assert len(presses) >= 13
    for press in presses:
        write_run(
            tmp_path,
            lines(GOOD),
            "kvpress",
            method={"_target_": "harness.bridges.kvpress.kvpress.KVPress", "press": press},
        )
    text = bibtex(tables_of(tmp_path))
    assert "no entry is known" not in text
    keys = [line.partition("{")[2].rstrip(",") for line in text.splitlines() if line.startswith("@")]
    assert keys == [
        "kv-harness", "adakv", "chunkkv", "criticalkv", "expectedattention", "keydiff", "knorm", "kvpress", "lagkv",
        "pyramidkv", "snapkv", "streaming", "think", "tova",
    ]  # fmt: skip


def test_contrasts_of_perplexities_have_no_score(tmp_path: Path) -> None:
    facts = {"task_info": {"metric": "perplexity", "version": "2", "chance": None}}
    for method, nll in (("quest", 2.0), ("snapkv", 1.0)):
        some = [record(f"e{i}", score=0.1, stop="forced", details={"nll": nll + 0.01 * i}) for i in range(8)]
        write_run(tmp_path, some, method, facts=facts)
    found: list[Contrasts] = contrasts(tables_of(tmp_path), "snapkv")
    assert found[0].contrasts[0].score is None
    assert found[0].contrasts[0].cost is not None
