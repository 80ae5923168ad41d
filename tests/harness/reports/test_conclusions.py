"""Sentences at the head of the page: they name what the stars say, and what the examples cannot show."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.reports.compare import Comparison, comparisons
from harness.reports.conclusions import conclusions
from harness.reports.page.data import page_data
from harness.results.run_folder import find, load
from tests.fake_records import record, write_run

MIB = 2**20


def run(root: Path, method: str, scores: list[float], costs: list[float], **changes: object) -> None:
    lines = [
        record(
            f"e{i}",
            score=score,
            tokens=[i, 1, 2, int(100 * score)],
            answer_nll=costs[i],
            kv_device_bytes=4 * MIB,
            **changes,
        )
        for i, score in enumerate(scores)
    ]
    write_run(root, lines, method)


def table_of(root: Path) -> Comparison:
    [table] = comparisons([load(run) for run in find([root])])
    return table


@pytest.fixture
def table(tmp_path: Path) -> Comparison:
    """Full; one that loses; one that only makes answers less likely; two that are as good."""
    calm = [0.2 + 0.01 * i for i in range(30)]
    noise = [cost + 0.001 * (-1) ** i * (i + 1) for i, cost in enumerate(calm)]
    run(tmp_path, "full", [1.0] * 30, calm)
    run(tmp_path, "snapkv", [0.0] * 20 + [1.0] * 10, [cost + 2 for cost in calm])
    run(tmp_path, "pqcache", [1.0] * 30, [cost + 0.1 + 0.001 * i for i, cost in enumerate(calm)], kv_host_bytes=8 * MIB)
    run(tmp_path, "sparq", [1.0] * 30, noise)
    run(tmp_path, "quest", [1.0] * 29 + [0.0], noise[::-1])
    return table_of(tmp_path)


def test_who_differs_from_full_and_at_what_bytes(table: Comparison) -> None:
    differ, same, *_ = conclusions(table)
    assert differ == (
        "Different from Full: pqcache 10% (+0.115 nats; 4.00 MiB KV dev + 8.00 MiB KV host), "
        "snapkv 10% (-66.7 points and +2.00 nats; 4.00 MiB KV dev)."
    )
    assert same.startswith("Not told from Full, which does not make them equal: ")
    assert "sparq 10% (4.00 MiB KV dev)" in same
    assert "snapkv" not in same


def test_what_the_examples_cannot_show(table: Comparison) -> None:
    [unseen] = [text for text in conclusions(table) if text.startswith("By the score")]
    largest = max(size for _, size in table.detectable if size is not None)
    wanted = max(number for numbers in table.needed if (number := numbers[0.1]) is not None)
    assert f"a loss below {100 * largest:.0f} points may go unseen; 10 points would take {wanted} examples" in unseen


def test_pairs_are_told_apart_by_either_measure(table: Comparison) -> None:
    """SnapKV is too far from the others to need a test; PQCache's likelihoods differ from SparQ's."""
    [pairs] = [text for text in conclusions(table) if "pairs of rows" in text]
    assert pairs.startswith("Of 3 pairs of rows whose scores differ by at most 25 points, ")
    assert "pqcache 10% from sparq 10%" in pairs
    assert "quest 10% from sparq 10%" not in pairs


def test_where_too_few_pairs_are_told_apart_the_table_says_how_many_examples_would_do_it(tmp_path: Path) -> None:
    """Five losses of 40 have p = 1/16, a deviate of 1.86; as the first of two tests, 80 % power takes one of 3.08."""
    costs = [0.2 + 0.01 * i for i in range(40)]
    run(tmp_path, "full", [1.0] * 40, costs)
    run(tmp_path, "sparq", [1.0] * 40, costs)
    run(tmp_path, "quest", [1.0] * 35 + [0.0] * 5, costs)
    *_, apart, said = conclusions(table_of(tmp_path))
    assert ", 0 are told apart by score or likelihood" in apart
    assert said == "If examples go on to differ as these do, about 110 would tell 1 of these pairs apart."


def test_pairs_that_never_differ_say_nothing_of_how_many_would(tmp_path: Path) -> None:
    for method in ("full", "sparq", "quest"):
        run(tmp_path, method, [1.0] * 10, [0.5] * 10)
    *_, said = conclusions(table_of(tmp_path))
    assert said.startswith("Too many pairs have not differed at all so far")


def test_too_few_examples_see_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, [record(f"e{i}", score=1.0) for i in range(5)])
    write_run(tmp_path, [record(f"e{i}", score=0.0, attended_prompt=10.0) for i in range(5)], "quest")
    assert any("no loss, however large, can be seen" in text for text in conclusions(table_of(tmp_path)))


def test_full_alone_concludes_nothing_and_the_page_says_the_rest(tmp_path: Path, table: Comparison) -> None:
    write_run(tmp_path / "alone", [record("e")])
    assert list(conclusions(table_of(tmp_path / "alone"))) == []
    assert page_data([table], (), "now")["tables"][0]["conclusions"] == list(conclusions(table))
