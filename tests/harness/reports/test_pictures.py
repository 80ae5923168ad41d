"""Pictures show what they say, one per task, with nothing cut off."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from harness.commands import report
from harness.reports.compare import Comparison, comparisons
from harness.reports.pictures import draw, figures
from harness.reports.pictures.frontier import PANELS, front, frontier, has_frontier
from harness.reports.pictures.heatmap import grid, heatmap, needles_by_task
from harness.results.records import Record
from harness.results.run_folder import find, load
from tests.fake_records import record, write_run

METHODS = "h2o infinigen infllm lm_infinite oracle pqcache pyramidkv quest shadowkv snapkv sparq streaming".split()


def planted(
    task: str, depths: list[float], score: float = 1.0, lengths: tuple[int, ...] = (2048, 4096)
) -> list[Record]:
    return [
        record(f"{task}/{n}/{d}", group=f"{task}/{n}", score=score, data={"task": task, "length": n, "depth": d + i})
        for i, n in enumerate(lengths)
        for d in depths
    ]


def table_of(root: Path) -> Comparison:
    [table] = comparisons([load(run) for run in find([root])])
    return table


def drawn(root: Path) -> dict[str, Figure]:
    return {kind: figure for _, kind, figure in draw.pictures(table_of(root))}


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def rows(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_depths_that_lie_anywhere_share_ten_bins_and_nothing_is_cut(tmp_path: Path) -> None:
    [needles] = needles_by_task(planted("multikey", [1.5, 7.25, 33.1, 98.0], 0.5)).values()
    figure = heatmap(needles, "a title " * 30)
    assert rows(figure) == [f"{10 * i}-{10 * i + 10}" for i in range(10)]
    assert texts(figure) == ["50"] * 6  # two of the four share a cell, at each length
    other = tmp_path / "somebody's"
    other.write_text("stays")
    (tmp_path / "x.png").symlink_to(other)
    path, vector = figures.save(figure, tmp_path / "x.png")
    assert other.read_text() == "stays"
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert path.stat().st_size < 200_000
    for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]):
        assert (edge == 255).all()
    assert b"/FontFile2" in vector.read_bytes()  # as publishers want it
    assert b"/Type3" not in vector.read_bytes()


def test_depths_of_a_grid_are_rows_of_their_own_even_where_a_run_broke_off() -> None:
    lines = [record(f"{n}/{d}", data={"length": n, "depth": d}) for n in (512, 1024) for d in (0, 25, 50, 90)]
    found = grid(needles_by_task(lines[:6])["g"])
    assert (found.depths, found.lengths) == (["0", "25", "50", "90"], ["512", "1K"])
    assert found.means[-1] == [100, None]
    assert needles_by_task([record(), *planted("single", [5.0], lengths=(2048,))]) == {}  # one cell is no map


def test_runs_of_one_length_share_a_map_and_others_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lengths, maps in (("one", (2048,), 1), ("two", (2048, 4096), 2)):
        lines = planted("single", [1.0, 50.0, 88.0], lengths=lengths)
        write_run(tmp_path / name, lines)
        write_run(tmp_path / name, lines[:1] + planted("single", [50.0, 88.0], 0.0, lengths), "quest")
        figures_of_kind = [figure for _, kind, figure in draw.pictures(table_of(tmp_path / name)) if "heat" in kind]
        assert len(figures_of_kind) == maps
        if maps == 1:
            assert rows(figures_of_kind[0]) == ["full", "quest 10%"]
            assert texts(figures_of_kind[0]) == ["100", "100", "100", "100", "0", "0"]
    monkeypatch.setattr(figures, "MOST", 1)  # rows of a picture
    [heat] = [figure for _, kind, figure in draw.pictures(table_of(tmp_path / "two")) if "heat" in kind]
    assert "the first 1 of 2 rows" in heat.get_suptitle().replace("\n", " ")


def test_files_have_names_of_their_own_however_long_a_label_is(tmp_path: Path) -> None:
    lines = planted("single", [1.0, 50.0])
    write_run(tmp_path, lines)
    for letter in "yz":
        many = {f"x{i}": letter * 39 for i in range(9)}
        write_run(tmp_path, lines, "quest", method={"_target_": "methods.quest.Quest", **many})
    assert report.main([str(tmp_path), "--plots"]) == 0
    paths = list((tmp_path / "plots").iterdir())
    kinds = {path.suffix: path.read_bytes()[:4] for path in paths}
    assert kinds == {".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert len(paths) == 2 * (2 + 3)
    assert draw.slug("niah lengths=[512, 1024]") == "niah-lengths=512-1024"


def test_differences_to_full_are_drawn_best_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, [record(f"e{i}") for i in range(60)])
    for method, right in {"h2o": 0, "quest": 59, "snapkv": 30}.items():
        write_run(tmp_path, [record(f"e{i}", score=float(i < right)) for i in range(60)], method)
    figure = drawn(tmp_path)["differences"]
    assert rows(figure) == ["h2o 10% *", "snapkv 10% *", "quest 10%"]  # from below
    points = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [float(line.get_xdata()[0]) for line in points] == pytest.approx([-1, -0.5, -1 / 60])
    assert [line.get_markerfacecolor() == "white" for line in points] == [False, False, True]
    monkeypatch.setattr(figures, "MOST", 2)  # rows of a picture
    pictures = drawn(tmp_path)
    assert rows(pictures["differences"]) == ["snapkv 10% *", "quest 10%"]
    assert [text.get_text() for text in pictures["frontier"].legends[0].texts] == ["full", "quest", "snapkv", ANY]
    best = "the best 2 of 3"
    assert all(best in pictures[kind].get_suptitle() for kind in ("differences", "frontier"))


def test_a_front_is_what_nothing_beats() -> None:
    points = [(1, 0.5), (2, 0.5), (2, 0.9), (3, 0.9), (4, 0.8), None, (1, 0.5), (5, 1.0)]
    assert front(points) == {0, 2, 6, 7}
    assert front([]) == front([None]) == set()


def write_frontier(root: Path, names: list[str], **of_full: Any) -> Comparison:
    """Write Full and three budgets of each method, which score 0, 1/4, 2/4, 3/4 and so on."""
    budgets = [("full", None), *((name, budget) for name in names for budget in (0.1, 0.2, 0.5))]
    for number, (name, budget) in enumerate(budgets):
        read = 100 * (budget or 1)
        more = {"union_prompt": read, "attended_total": read} | (of_full if name == "full" else {})
        lines = [record(str(i), score=float(i < number % 5), attended_prompt=read, **more) for i in range(4)]
        write_run(root, lines, name, budget=budget)
    return table_of(root)


def test_few_methods_show_their_front_and_intervals(tmp_path: Path) -> None:
    figure = frontier(write_frontier(tmp_path, ["h2o"]))
    [dotted] = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert [round(float(x), 6) for x in dotted.get_xdata()] == [10, 20, 50]
    assert len(figure.axes[0].collections) == 1


def test_twelve_methods_are_told_apart(tmp_path: Path) -> None:
    figure = frontier(write_frontier(tmp_path, METHODS))
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 3 and line.get_marker() != "None"]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 12
    [legend] = figure.legends
    assert {text.get_text() for text in legend.texts} == {"full", *METHODS, "Pareto front"}


def test_times_are_drawn_where_fulls_are_beside_them(tmp_path: Path) -> None:
    read, held, _, time = PANELS
    table = write_frontier(tmp_path / "untimed", ["h2o"], token_s=[1.0])
    assert [panel.shows(table.entries) for panel in (read, held, time)] == [True, True, False]
    assert time.shows(table.entries[1:])  # a table without Full
    assert not read.shows(table.entries[:1])
    assert has_frontier(table)
    memory = {"kv_device_bytes": 8 * 2**20, "kv_host_bytes": 120 * 2**20, "kv_disk_bytes": None}
    assert held.scale * held.cost({"memory": memory}) == 128
    assert held.cost({"memory": {"kv_device_bytes": None}}) is None


def test_costs_along_answers_are_drawn_from_stretches_and_times(tmp_path: Path) -> None:
    """64 steps of 10 ms, then 36 of 20 ms, behind a prompt of 100 tokens; the seal lies before the second token."""
    times = [1.0, 5.0, *(5 + 0.01 * i for i in range(1, 64)), *(5.63 + 0.02 * i for i in range(1, 37))]
    costs = {"steps": [64, 100], "attended": [132.5, 182.5], "moved_bytes": [0.0, 0.0], "used_bytes": [2**20, 2**21]}
    half = costs | {"attended": [132.5 / 2, 182.5 / 2], "moved_bytes": [2**20, 2**20]}
    write_run(tmp_path, [record("a", token_s=times, along=costs), record("short")])
    write_run(tmp_path, [record("a", token_s=times, along=half), record("short")], "h2o")
    figure = drawn(tmp_path)["along"]
    lines = {
        axes.get_title(): {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
        for axes in figure.axes
    }
    time, share, used, moved = lines
    assert lines[time]["full"] == ([64, 100], pytest.approx([10, 20]))
    assert lines[share] == {"full": ([64, 100], [100, 100]), "h2o 10%": ([64, 100], [50, 50])}
    assert lines[used]["h2o 10%"][1] == [1, 2]
    assert lines[moved]["h2o 10%"][1] == [1, 1]
    write_run(tmp_path / "short", [record("a")])
    assert "along" not in drawn(tmp_path / "short")


# The page in a real browser: one table and one figure at first, sorted by a click, no request and no complaint.


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Any]:
    """Open a page in a phone's width, and fail if it says anything or asks for anything but itself."""
    playwright = pytest.importorskip("playwright.sync_api")
    complaints, requests = list[str](), list[str]()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(viewport={"width": 380, "height": 800}, **options).new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(url)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # tables scroll by themselves
        yield page
        browser.close()
    assert {address for address in requests if not address.startswith("data:")} == {url}
    assert complaints == []


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_the_page_opens_and_sorts(tmp_path: Path) -> None:
    write_run(tmp_path, [record(f"e{i}") for i in range(12)])
    for method, right in (("h2o", 9), ("quest", 11), ("snapkv", 2)):
        write_run(tmp_path, [record(f"e{i}", score=float(i < right)) for i in range(12)], method)
    assert report.main([str(tmp_path), "--html", str(tmp_path / "page")]) == 0
    url = (tmp_path / "page" / "index.html").as_uri()
    with opened(url) as page:
        assert page.locator("table:visible").count() == page.locator("img:visible").count() == 1
        shown = page.locator("img:visible")
        assert shown.bounding_box()["width"] == float(shown.get_attribute("width")) > 380  # its type stays readable
        rows = page.locator("table").first.locator("tbody th")
        assert rows.all_inner_texts() == ["full", "h2o", "quest", "snapkv"]
        head = page.locator("table").first.locator("th", has_text="vs Full").first
        for order in (["quest", "h2o", "snapkv", "full"], ["snapkv", "h2o", "quest", "full"]):
            head.click()
            assert rows.all_inner_texts() == order  # what is unknown comes last either way
