"""A report in all its forms, as it was read and found right: `python -m tests.harness.reports.test_snapshots` writes
the files anew. The runs have groups, likelihoods, bytes on the host, turns, a store, perplexities and warnings."""

from __future__ import annotations

import re
from html import unescape
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from harness.commands import report
from harness.reports.choice import Choice
from harness.reports.compare import comparisons
from harness.reports.document import as_markdown, as_text
from harness.reports.page import page
from harness.reports.paper.table import paper_table
from harness.reports.paper.writers import as_latex
from harness.results.run_folder import find, load
from tests.fake_records import record, talk, turn, write_run

SNAPSHOTS = Path(__file__).parent / "snapshots"
NASTY = "</script><script>window.broken = 1</script> & ${1}"
FORMS = {
    "details.txt": as_text,
    "report.md": as_markdown,
    "paper.tex": lambda tables: as_latex(paper_table(tables, Choice())),
}
MACHINE = {"cpu": "A CPU", "device_name": "A CPU", "threads": 2, "load_average": [0.1, 0, 0]}
FACTS = {
    "provenance": {
        "machine": MACHINE,
        "git": {"commit": "abcdef0123", "dirty": False},
        "versions": {"torch": "2.13.0"},
    },
    "started": "2026-01-01T09:30:00+00:00",
    "ended": "2026-01-01T10:30:00+00:00",
    "load_average_ended": [0.1, 0, 0],
}
FED = FACTS | {"task_info": {"metric": "perplexity", "version": "2", "chance": None}}


def needles(right: int, share: float, cost: float, **changes: Any) -> list[Any]:
    return [
        record(
            f"e{i}",
            score=float(i < right),
            group=f"niah/{512 * (1 + i % 2)}",
            tokens=[i, int(i < right), 2, 3],
            attended_prompt=100 * share,
            attended_total=100 * share + 2,
            union_prompt=110 * share if share < 1 else 100.0,
            kv_device_bytes=int(share * 2**30),
            moved_bytes_per_step=share * 2**20 if share < 1 else 0.0,
            answer_nll=cost + 0.01 * i,
            details={"leading_digits_share": (i % 4) / 4},
            fidelity={"recall": share, "recall_per_head": [[share]], "mass": share, "error": 0.1, "kl": 0.2},
            data={"length": 512 * (1 + i % 2), "depth": 20 * (i // 2 % 6)},
            **changes,
        )
        for i in range(24)
    ]


def write_all(root: Path) -> None:
    write_run(root, needles(24, 1.0, 0.1), facts=FACTS)
    write_run(root, needles(4, 0.1, 0.4), "h2o", budget=0.1, facts=FACTS)
    away = {"kv_host_bytes": 2**29, "stop": "length"}
    write_run(root, needles(23, 0.2, 0.1, **away), "quest", budget=0.2, facts=FACTS | {"host_is_cpu": True})
    method = {"_target_": "methods.snapkv.SnapKV", "note": NASTY}
    write_run(root, needles(9, 0.6, 0.1)[:5], "snapkv", "interrupted", method=method, budget=0.3, facts=FACTS)
    later = turn(score=0.5, hit_tier="disk", history_tokens=14, data={"turns_ago": 1})
    talks = [talk(name, turn(score=1.0, data={"turns_ago": 0}), later) for name in "ab"]
    write_run(root, talks, history="store", model={"name": "talker", "revision": None}, facts=FACTS)
    costs = 3 + 0.3 * np.sin(np.arange(30))
    for method, loss, share in (("full", 0.0, 100.0), ("quest", 0.02, 10.0)):
        texts = [
            record(
                f"w{i}",
                group="ab"[i % 2],
                score=exp(-cost),
                details={"nll": cost},
                stop="forced",
                attended_prompt=share,
            )
            for i, cost in enumerate((costs + loss + loss / 2 * np.cos(np.arange(30))).tolist())
        ]
        write_run(root, texts, method, model={"name": "reader", "revision": None}, facts=FED)


def forms(root: Path) -> dict[str, str]:
    tables = comparisons([load(folder) for folder in find([root])])
    return {name: write(tables) + "\n" for name, write in FORMS.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_all(folder)
    return folder


def test_every_form_is_as_it_was_found_right(root: Path) -> None:
    for name, text in forms(root).items():
        assert text == (SNAPSHOTS / name).read_text(encoding="utf-8"), name


def test_details_are_printed_and_fit_the_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(root), "--details"]) == 0
    out = capsys.readouterr().out
    assert out.strip() == (SNAPSHOTS / "details.txt").read_text(encoding="utf-8").strip()
    assert max(map(len, out.splitlines())) <= 160


def test_the_page_has_every_table_and_trusts_no_text(root: Path) -> None:
    tables = comparisons([load(folder) for folder in find([root])])
    text = page(tables, ["left out: <b>"])
    markdown = (SNAPSHOTS / "report.md").read_text(encoding="utf-8")
    captions = {"Scores, times and bytes", *re.findall(r"^#### (.*)", markdown, re.MULTILINE)}
    assert captions == set(map(unescape, re.findall("<caption>(.*?)</caption>", text)))
    assert "left out: &lt;b&gt;" in text
    assert text.count("<script>") == text.count("</script>") == 1
    assert text.count("data:image/png;base64,") == 3 + 1  # differences, frontier, needles; differences
    assert "method=quest" in text


def main() -> None:
    with TemporaryDirectory() as folder:
        write_all(Path(folder))
        for name, text in forms(Path(folder)).items():
            (SNAPSHOTS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
