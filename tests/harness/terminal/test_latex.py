"""LaTeX that compiles whatever a label holds: escaped, aligned, with as many cells as columns."""

from __future__ import annotations

import re
from pathlib import Path

from harness.commands import report
from harness.terminal.tables import Column, cell, escaped, latex_table
from tests.fake_records import records, write_run


def test_every_special_character_is_escaped() -> None:
    assert escaped("a_b & 5% #1 {x} ~ ^ \\ $") == (
        r"a\_b \& 5\% \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} \$"
    )


def test_cells_have_a_real_minus_and_small_intervals() -> None:
    assert cell("-8.3 [-17, -1]") == r"$-$8.3 {\scriptsize [$-$17, $-$1]}"
    assert cell("<.001*") == r"\textless{}.001$^{*}$"
    assert cell("float-16") == "float-16"


def test_empty_columns_and_tables_are_left_out() -> None:
    columns = [Column("method", "", ["a", "b"], left=True), Column("x", "%", ["", ""]), Column("y", "ms", ["1", "2"])]
    text = "\n".join(latex_table(columns, "50 % & more", "tab:a-b", ["one", "", "100 %"]))
    assert r"\begin{tabular}{lr}" in text
    assert r"\caption{50 \% \& more}" in text
    assert "a & 1 \\\\" in text
    assert latex_table(columns[1:2], "nothing", "tab:c") == []


def test_a_report_in_latex_is_whole(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 10))
    method = {"_target_": "x.quest.Q", "a_b": "5%"}
    write_run(tmp_path, records([0.0] * 10, attended_prompt=10.0), "quest", method=method)
    path = tmp_path / "all.tex"
    assert report.main([str(tmp_path), "--tex", str(path)]) == 0
    text = path.read_text()
    for kind in ("table", "tabular"):
        assert text.count(rf"\begin{{{kind}}}") == text.count(rf"\end{{{kind}}}") >= 2
    for table in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        rows = [line for line in table[1].splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(table[0])}
    shown = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert not re.search(r"(?<!\\)[%#_]", shown.replace("{%\n", "{\n"))
    assert "95 \\% CI" in shown or "95\\% CI" in shown
    assert r"\footnotesize\raggedright Prompts: 100 tokens." in shown
    assert r"\caption{All measurements: " in shown
