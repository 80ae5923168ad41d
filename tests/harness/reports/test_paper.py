"""The table of a paper: what its columns and cells are, what marks mean, and the same numbers in every form."""

from __future__ import annotations

import csv
import math
import re
import shutil
import subprocess
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from evals import stats
from harness.commands import report
from harness.config.catalogue import ConfigError, entries
from harness.reports import table
from harness.reports.choice import LAYOUTS, Choice, checked
from harness.reports.compare import comparisons
from harness.reports.document import as_rows
from harness.reports.paper.layout import Layout
from harness.reports.paper.table import PaperTable, paper_table
from harness.reports.paper.writers import BIB, as_latex, as_markdown
from harness.results.run_folder import find, load
from tests.fake_records import record, write_run

RULER = {"task": {"_target_": "evals.ruler.Ruler", "lengths": [1024]}}
OTHER = {"model": {"name": "org/A_model & more", "revision": None}}
METHODS = entries("method")
DOCS = Path(__file__).parents[3] / "docs" / "results.md"
GOOD, BAD = [1.0] * 24, [0.0, 0.25] * 12


def write(root: Path, scores: list[float], method: str, budget: float | None = None, /, **changes: Any) -> Path:
    """A run on needles, or with `RULER` in `changes` on RULER, with two groups of different size."""
    ruler = "ruler" in str(changes.get("task"))
    groups = ["vt/1024", "cwe/1024", "cwe/1024"] if ruler else ["niah/512"]
    lines = [
        record(f"e{i}", score=score, group=groups[i % len(groups)], attended_prompt=100 * share, tokens=[i, 1, 2, 3])
        for share in [changes.pop("share", budget or 1.0)]
        for i, score in enumerate(scores)
    ]
    facts = {
        "presets": {"method": method, "task": "ruler" if ruler else "niah", "model": None},
        "averages": {"mean": fmean(scores), "half": 0.5, "effective_length": 4096.0},
    }
    return write_run(root, lines, method, budget=budget, facts=facts, method=METHODS[method].values(), **changes)


def write_groups(root: Path, scores: dict[str, float], size: int = 1, /, **facts: Any) -> Path:
    """A run of Full on RULER with these scores of groups; their examples of one number are about one text."""
    lines = [
        record(f"{group} {i}", group=group, score=score, unit=f"text {i}")
        for group, score in scores.items()
        for i in range(size)
    ]
    return write_run(root, lines, facts={"presets": {"method": "full", "task": "ruler"}} | facts, **RULER)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks. SnapKV is bad and at 10 % reads too much, Quest is good; at 20 % it was not run on RULER."""
    root = tmp_path_factory.mktemp("runs")
    for task in ({}, RULER):
        write(root, GOOD, "full", **task)
        write(root, BAD, "snapkv", 0.1, share=0.3, **task)
        write(root, [*GOOD[1:], 0.5], "quest", 0.1, **task)
        write(root, BAD, "snapkv", 0.2, **task)
    write(root, [*GOOD[:-1], 0.5], "quest", 0.2)
    return root


def made(root: Path, **choice: Any) -> PaperTable:
    return paper_table(comparisons([load(run) for run in find([root])]), Choice.read(choice))


def test_every_form_has_the_same_numbers_and_marks(root: Path, tmp_path: Path) -> None:
    frame = table(root)
    assert not frame.xs("value", axis=1, level=-1).isna().all(axis=1).any()
    columns = [name for name, part in frame.columns if part == "value"]
    assert columns == ["Needle in a haystack", "RULER", "Avg."]
    for suffix in ("tex", "csv", "md"):
        assert report.main([str(root), "--paper", "--out", str(tmp_path / f"t.{suffix}")]) == 0
    with open(tmp_path / "t.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = (tmp_path / "t.tex").read_text().splitlines()
    tex = [line.removesuffix(r" \\").split(" & ") for line in lines if line.endswith(r"\\")][1:]
    md = [line.strip("| ").split(" | ") for line in (tmp_path / "t.md").read_text().splitlines()[2 : 2 + len(rows)]]
    method = ""
    for row, latex, markdown, (line, numbers) in zip(rows, tex, md, frame.iterrows(), strict=True):
        method = latex[0] or method  # which stands in its first row alone
        assert [(row["Method"], row["Budget"]), (method, latex[1].replace("\\", ""))] == [line, line]
        for place, column in enumerate(columns):
            value, marks, best = (numbers[column, part] for part in ("value", "marks", "best"))
            texts = latex[2 + place], markdown[2 + place]
            if math.isnan(value):
                assert (row[column], *texts) == ("", "--", "--")
                continue
            assert (float(row[column]), row[f"{column} marks"], row[f"{column} best"]) == (value, marks, str(best))
            distance = max(value - numbers[column, "low"], numbers[column, "high"] - value)
            for text, bold in zip(texts, ("textbf", "**"), strict=True):
                assert re.findall(r"\d+\.\d", text) == [f"{value:.1f}", f"{distance:.1f}"]
                assert (bold in text) == best
                shown = text.replace("**", "").replace("dagger", "†")
                assert "".join(mark for mark in "†*" if mark in shown) == marks
    marks = {(*line, column): frame.loc[line][column, "marks"] for line in frame.index for column in columns}
    assert {place: mark for place, mark in marks.items() if mark} == {
        ("SnapKV", "10%", "Needle in a haystack"): "†*",
        ("SnapKV", "10%", "RULER"): "†*",
        ("SnapKV", "10%", "Avg."): "†*",
        ("SnapKV", "20%", "Needle in a haystack"): "*",
        ("SnapKV", "20%", "RULER"): "*",
        ("SnapKV", "20%", "Avg."): "*",
    }


def test_scores_and_stars_are_those_of_the_raw_rows_after_holms_correction_over_the_table(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "full")
    for method, lost in (("snapkv", 6), ("quest", 7), ("h2o", 4), ("streaming", 24)):
        write(tmp_path, [0.0] * lost + GOOD[lost:], method, 0.1)
    raw = {row["presets.method"]: row for row in as_rows(comparisons([load(run) for run in find([tmp_path])]))}
    frame = table(tmp_path, {"methods": list(raw), "table": {"columns": ["score"]}})["Needle in a haystack"]
    ps = [raw[method]["full.p"] for method in raw if method != "full"]
    differs = [p < stats.ALPHA for p in stats.holm(ps)]
    assert [p < stats.ALPHA for p in ps] != differs  # the correction decides for one of them
    assert [mark == "*" for mark in frame["marks"]] == [False, *differs]
    for row, (_, shown) in zip(raw.values(), frame.iterrows(), strict=True):
        ends = row["score.ci95.low"], row["score.ci95.high"]
        assert [shown["value"], shown["low"], shown["high"]] == pytest.approx(
            [100 * row["score.mean"], *(100 * end for end in ends)]
        )


def test_bold_are_the_best_of_a_budget_and_what_no_test_tells_from_it(root: Path) -> None:
    frame = table(root)["Needle in a haystack"]["best"]
    assert frame[frame].index.tolist() == [("Quest", "10%"), ("Quest", "20%")]
    near = made(root, budgets=[0.1], methods=["quest"]).cells  # alone, it has nothing to be better than
    assert not any(cell.best for cell in near.values())
    assert not table(root, {"table": {"bold": False}})["Needle in a haystack"]["best"].any()


def test_rows_are_the_best_among_those_of_their_budget_alone_and_full_is_no_rival(tmp_path: Path) -> None:
    for method, budget, scores in (
        ("full", None, GOOD),
        ("kivi", None, BAD),
        ("kivi_2bit", None, BAD),
        ("quest", 0.1, BAD),
        ("snapkv", 0.1, BAD),
        ("quest", 0.2, BAD),
        ("snapkv", 0.2, GOOD),
    ):
        write(tmp_path, scores, method, budget)
    best = table(tmp_path)["Needle in a haystack"]["best"]
    assert best[best].index.tolist() == [("SnapKV", "20%")]


def test_what_cannot_be_told_from_the_best_is_bold_and_perplexity_is_best_where_it_is_low(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "snapkv", 0.1)
    write(tmp_path, [*GOOD[1:], 0.0], "quest", 0.1)
    assert not table(tmp_path)["Needle in a haystack"]["best"].any()  # it would say nothing
    write(tmp_path, BAD, "h2o", 0.1)
    best = table(tmp_path)["Needle in a haystack"]["best"]
    assert best[~best].index.tolist() == [("H2O", "10%")]
    for method, loss in (("full", 0.0), ("h2o", 0.1), ("tova", 0.5)):
        lines = [record(f"w{i}", stop="forced", details={"nll": 2 + loss + 0.01 * i}) for i in range(30)]
        fed = {"task_info": {"metric": "perplexity"}, "presets": {"task": "wikitext2", "method": method}}
        budget = None if method == "full" else 0.1
        write_run(tmp_path / "fed", lines, method, budget=budget, facts=fed)
    frame = table(tmp_path / "fed")["WikiText-2 (perplexity)"]
    assert frame["value"].tolist() == pytest.approx([math.exp(2.145 + loss) for loss in (0, 0.1, 0.5)])
    assert frame["best"].tolist() == [False, True, False]
    assert frame["marks"].tolist() == ["", "†*", "†*"]


def test_an_average_gives_tasks_the_same_weight_and_needs_all_of_them(root: Path) -> None:
    frame = table(root).xs("value", axis=1, level=-1)
    both = frame[["Needle in a haystack", "RULER"]].mean(axis=1, skipna=False)
    assert frame["Avg."].tolist() == pytest.approx(both.tolist(), nan_ok=True)
    assert "Quest 20%: not run or not measured: RULER, Avg." in list(made(root).notes())
    groups = [("niah", "")] * 24 + [("ruler", "vt" if i % 3 == 0 else "cwe") for i in range(24)]
    ends = stats.interval([*GOOD[1:], 0.5] * 2, groups)
    shown = table(root).loc[("Quest", "10%")]["Avg."]
    assert [shown["low"], shown["high"]] == pytest.approx([100 * end for end in ends])
    own = {"averages": {"mine": ["cwe", "niah"]}, "columns": ["mine", "cwe", "niah"]}
    frame = table(root, {"table": own}).xs("value", axis=1, level=-1)
    assert frame.columns.tolist() == [("", "mine"), ("RULER", "cwe"), ("", "Needle in a haystack")]
    both = frame.iloc[:, 1:].mean(axis=1, skipna=False)
    assert frame["", "mine"].tolist() == pytest.approx(both.tolist(), nan_ok=True)


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ({"law": 1.0, "law/civil": 0.5, "law/penal": 0.0}, {"law": 100, "civil": 50, "penal": 0}),
        ({"tax": 0.0, "law": 1.0, "law/civil": 0.5}, {"tax": 0, "law": 100, "law/civil": 50}),
        ({"law/civil": 1.0, "civil/law": 0.0}, {"law": 100, "civil": 0}),
    ],
)
def test_a_column_of_a_group_has_no_group_but_its_own(tmp_path: Path, scores: Any, shown: Any) -> None:
    write_groups(tmp_path, scores)
    means = table(tmp_path).xs("value", axis=1, level=-1).iloc[0]
    assert means.iloc[:-1].to_dict() == shown
    columns = {"table": {"columns": [*scores, "civil"]}}
    named = table(tmp_path, columns).xs("value", axis=1, level=-1).iloc[0]
    assert {group: named[group] / 100 for group in scores} == scores
    assert named["civil"] == 50  # a part stands for all groups that have it


def test_questions_on_one_text_count_as_one_in_all_groups_of_an_average(tmp_path: Path) -> None:
    write_groups(tmp_path, {"vt": 1.0, "cwe": 1.0}, 12)
    averages = {"both": ["vt", "cwe"], "twice": ["vt", "vt"]}
    frame = table(tmp_path, {"table": {"averages": averages, "columns": [*averages, "score", "vt"]}})
    low = frame.xs("low", axis=1, level=-1).iloc[0]
    assert [low["both"], low["twice"]] == [low["Avg."], low["vt"]]


def test_an_average_of_the_task_is_a_number_in_all_rows_if_it_is_one_in_any(tmp_path: Path) -> None:
    for number, length in enumerate((0.5, 2.0)):
        averages = {"length": length, "share": length / 4}
        write_groups(tmp_path / f"{number}", {"vt": 1.0}, averages=averages)
    frame = table(tmp_path, {"table": {"columns": ["length", "share"]}}).xs("value", axis=1, level=-1)
    assert frame.to_numpy().tolist() == [[0.5, 12.5], [2.0, 50.0]]


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({}, ["Needle in a haystack", "RULER", "Avg."]),
        ({"tasks": ["ruler"]}, ["vt", "cwe", "Avg."]),
        ({"tasks": ["ruler"], "names": {"vt": "VT", "average": "Mean"}}, ["VT", "cwe", "Mean"]),
        ({"tasks": ["niah"]}, ["Needle in a haystack", "KV on device (B)", "TPOT (ms)"]),
        (
            {"table": {"columns": ["ruler", 1024, "half"]}},
            ["RULER/Avg.", "RULER/1024", "Needle in a haystack/half", "RULER/half"],
        ),
        (
            {"table": {"columns": {"A": ["vt", "niah"], "B": "tpot"}}},
            ["A/vt", "A/Needle in a haystack", "B/Needle in a haystack: TPOT (ms)", "B/RULER: TPOT (ms)"],
        ),
        (
            {"tasks": ["niah"], "table": {"columns": ["memory.host_peak_bytes", "effective_length"]}},
            ["memory.host_peak_bytes (KiB)", "effective_length"],
        ),
        ({"table": {"columns": ["vt", "qa_1"], "missing": "drop"}}, ["vt"]),
        (
            {"table": {"columns": ["QA", "A"], "averages": {"QA": "qa_1", "A": ["vt", "qa_1"]}, "missing": "drop"}},
            ["A"],
        ),
        ({"table": {"columns": {"Long": 1024}}}, ["Long/1024"]),
        ({"table": {"columns": [{"Long": 1024}, "average"]}}, ["Long/1024", "Avg."]),
        ({"table": {"columns": [1], "averages": {1: 1024}}}, ["1"]),
        ({"table": {"columns": {"A": ["ruler", "vt", "average"]}}}, ["A/RULER: Avg.", "A/vt", "A/Avg."]),
    ],
)
def test_columns_are_tasks_groups_averages_and_measures(root: Path, choice: Any, shown: list[str]) -> None:
    assert ["/".join(filter(None, line)) for line in made(root, **choice).columns] == shown


def test_models_stand_side_by_side_or_below_each_other_and_a_table_may_be_turned(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "runs")
    write(tmp_path / "runs", GOOD, "full", **OTHER)
    write(tmp_path / "runs", BAD, "snapkv", 0.1, **OTHER)
    wide = made(tmp_path / "runs", table={"columns": ["score"], "size": "scriptsize"})
    assert wide.columns[0] == ("A_model & more", "Needle in a haystack")
    assert wide.rows[:2] == [("Full", ""), ("Quest", "10%")]
    long = made(tmp_path / "runs", table={"rows": ["model", "method", "budget"]})
    assert long.rows[:3] == [("A_model & more", "Full", ""), ("A_model & more", "SnapKV", "10%"), ("tiny", "Full", "")]
    assert long.breaks == {1, 2, 3}
    assert "}{l}{\\textit{tiny}} \\\\\nFull &" in as_latex(long)
    turned = made(root, tasks=["ruler"], names={"10%": "1/10"}, table={"rows": ["column"]})
    assert turned.rows == [("vt",), ("cwe",), ("Avg.",)]
    assert turned.columns == [("", "Full"), ("1/10", "Quest"), ("1/10", "SnapKV"), ("20%", "SnapKV")]
    assert r" & Full & Quest & SnapKV & SnapKV \\" in as_latex(turned)
    assert r"\multicolumn{2}{c}{1/10}" in as_latex(turned)


def test_models_stand_below_each_other_where_a_line_is_too_short_and_a_wider_table_is_told(
    root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root, tmp_path / "runs")
    write(tmp_path / "runs", GOOD, "full", **OTHER)
    long = made(tmp_path / "runs", names={"niah": "A long name of a task"})
    assert long.row_names == ["Model", "Method", "Budget"]
    assert long.width < long.line
    narrow = made(
        tmp_path / "runs", names={"niah": "A long name of a task"}, table={"size": "scriptsize", "wide": True}
    )
    assert narrow.row_names == ["Method", "Budget"]
    columns = {"columns": ["groups", "score", "kv_device", "moved"]}
    wide = made(root, table=columns)
    assert next(wide.notes()).startswith(
        f"In LaTeX the table is about {wide.width:.0f} points wide, and a line of text 345"
    )
    assert "In LaTeX" not in next(made(root, table=columns | {"fit": True}).notes())


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"table": {"columns": ["vtt"]}}, "columns: vtt is in no run; did you mean vt?"),
        ({"table": {"column": ["vt"]}}, "table: there is no key column; did you mean columns?"),
        ({"names": {"vt": "X", "cwe": "X"}, "tasks": ["ruler"]}, "several columns are called RULER: X: give each"),
        ({"table": {"columns": ["A"], "averages": {"A": ["vt", "qa_1"]}}}, "averages: A: no run has a score of qa_1"),
        ({"table": {"rows": ["model", "method", "budget", "column"]}}, "leaves nothing for the columns"),
        ({"table": {"interval": "wide"}}, "interval"),
        ({"table": {"columns": ["qa_1"], "missing": "drop"}}, "no run has one of the columns qa_1"),
    ],
)
def test_a_wrong_layout_is_refused_in_one_sentence(root: Path, choice: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(root, **choice)
    assert said in str(error.value)


def test_the_command_says_what_is_wrong_and_what_the_author_must_know(root: Path, tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "t.tex")
    for words, said in (
        (["--paper", "nope.yaml", "--out", out], "nope.yaml is no file: name a yaml file, or a layout: pqcache,"),
        (["--paper", "--out", f"{tmp_path / 't.pdf'}"], "name a file in .tex, .csv or .md"),
        (["--paper", "snapkv", "--out", out], "tasks: longbench is in no run"),
    ):
        assert report.main([str(root), *words]) == 2
        assert said in capsys.readouterr().err
    for words in (["--paper"], ["--out", out]):
        with pytest.raises(SystemExit):
            report.main([str(root), *words])
        assert capsys.readouterr().err.startswith("error: --paper and --out FILE go together")
    (tmp_path / "a.yaml").write_text("methods: [snapkv, quest]\nbudgets: [0.2]")
    assert report.main([str(root), "--paper", str(tmp_path / "a.yaml"), "--out", out]) == 0
    assert capsys.readouterr().out.startswith("Quest 20%: not run or not measured: RULER, Avg.\n")
    alone = tmp_path / "alone"
    write(alone, BAD, "snapkv", 0.1, share=0.3, **RULER)
    assert report.main([str(alone), "--paper", "--out", out]) == 0
    said = capsys.readouterr().out
    assert "SnapKV 10% on RULER, tiny: compared with no Full, because there is no run of Full on its prompts" in said
    assert "SnapKV 10% on RULER, tiny: † read 30.0 % of the prompt, not 10.0 %" in said


@pytest.mark.parametrize("name", [file.stem for file in LAYOUTS.glob("*.yaml")])
def test_a_layout_shows_what_was_run_of_its_table(tmp_path: Path, name: str) -> None:
    task = Choice.read(name).tasks[0]
    groups = ["niah_single_1/4096", "vt/4096", "cwe/4096"]
    if task == "longbench":
        groups = ["qasper", "hotpotqa", "multifieldqa_zh"]
    for method, budget in (("full", None), ("snapkv", 0.1), ("quest", 0.1)):
        lines = [record(f"e{i}", group=groups[i % 3], score=i % 3 < 2) for i in range(6)]
        facts = {"presets": {"method": method, "task": task}}
        write_run(tmp_path, lines, method, budget=budget, method=METHODS[method].values(), facts=facts)
    table = paper_table(comparisons([load(run) for run in find([tmp_path])]), Choice.read(name))
    words = {word for line in (*table.rows, *table.columns) for word in line}
    assert {"Full", "Quest", "SnapKV"} < words
    assert {"HotpotQA" if task == "longbench" else "N-S1"} < words
    assert name == "snapkv" or words & {"Average", "Avg."}
    assert {cell.value for cell in table.cells.values()} == {100}  # the last group is no column of the paper's
    assert "% \\usepackage{booktabs" in as_latex(table)


def test_citations_name_the_papers_of_methods_and_their_presets(tmp_path: Path) -> None:
    for method in ("full", "snapkv_kernel15", "press_expected_attention", "shadowkv"):
        write(tmp_path, GOOD, method)
    for rows in ("method", "column"):
        text = as_latex(made(tmp_path, table={"cite": True, "rows": [rows]}))
        keys = re.findall(r"citep{(\w+)}", text)
        assert keys == ["expectedattention", "shadowkv", "snapkv"]
    assert all(f"{{{key}," in BIB.read_text() for key in keys)


def test_the_file_in_docs_is_one(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(methods:.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "table.yaml").write_text(text)
    choice = Choice.read(tmp_path / "table.yaml")
    assert choice.names["20%"] == "1/5"
    assert checked(Layout, choice.table, "table").columns[0] == "vt"


def test_no_name_is_a_command_of_the_form_it_is_written_in(root: Path, tmp_path: Path) -> None:
    text = as_latex(made(root, names={"quest": "[Ours]", "snapkv": "*", "niah": " [a] & b"}))
    assert "\n{}[Ours] & 10\\% &" in text
    assert "\n{}* &" in text
    assert r"& {} [a] \& b &" in text
    write(tmp_path, GOOD, "full", model={"name": "<img src=x>", "revision": None})
    assert "<img" not in as_markdown(made(tmp_path))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex (texlive-latex-recommended)")
def test_latex_compiles_in_the_document_of_docs_whatever_the_names_are(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "runs")
    write(tmp_path / "runs", GOOD, "full", **OTHER)
    names = {"snapkv": r"50 % \_{x}^~#$&<|>", "vt": "[±†]", "cwe": "*", "quest": "Größe", "full": "[2]"}
    [page] = re.findall(r"```latex\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    layouts: list[dict[str, Any]] = [
        {},
        {"interval": "small", "cite": True, "wide": True, "size": "small", "angle": 30},
        {"rows": ["column"], "fit": True},
    ]
    for number, layout in enumerate(layouts):
        shown = made(tmp_path / "runs", names=names, table={"columns": ["groups", "average"]} | layout)
        (tmp_path / f"t{number}.tex").write_text(as_latex(shown))
        page = page.replace(r"\input{table.tex}", rf"\input{{t{number}.tex}}\input{{table.tex}}")
    (tmp_path / "page.tex").write_text(page.replace(r"\input{table.tex}", ""))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Missing character" not in (tmp_path / "page.log").read_text(errors="replace")
