"""Pictures show what they say, one per task, with nothing cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from harness.commands import report
from harness.reports import needles
from harness.reports.costs import PANELS
from harness.reports.pictures import draw, figures, frontier, heatmap
from harness.results.records import Record
from harness.results.summary import summarise
from tests.fake_records import config, record, write_run

METHODS = "h2o infinigen infllm lm_infinite oracle pqcache pyramidkv quest shadowkv snapkv sparq streaming".split()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they are saved."""
    found: list[Figure] = []
    save = figures.save
    monkeypatch.setattr(figures, "save", lambda figure, path: (found.append(figure), save(figure, path))[1])
    return found


def planted(
    task: str, depths: list[float], score: float = 1.0, lengths: tuple[int, ...] = (2048, 4096)
) -> list[Record]:
    return [
        record(f"{task}/{n}/{d}", group=f"{task}/{n}", score=score, data={"task": task, "length": n, "depth": d + i})
        for i, n in enumerate(lengths)
        for d in depths
    ]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def rows(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def uncut(path: Path) -> None:
    """A margin all around is white."""
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert min(pixels.shape[:2]) > 300
    assert path.stat().st_size < 200_000
    for edge in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]):
        assert (edge == 255).all()


def test_depths_that_lie_anywhere_share_ten_bins(tmp_path: Path, drawn: list[Figure]) -> None:
    lines = planted("multikey", [1.5, 7.25, 33.1, 98.0], 0.5)
    [found] = needles.by_task(lines).values()
    heatmap.heatmap(found, tmp_path / "x.png", "a title " * 30)
    assert rows(drawn[0]) == [f"{10 * i}-{10 * i + 10}" for i in range(10)]
    assert texts(drawn[0]) == ["50"] * 6  # two of the four share a cell, at each length
    uncut(tmp_path / "x.png")


def test_depths_of_a_grid_are_rows_of_their_own(tmp_path: Path, drawn: list[Figure]) -> None:
    lines = [record(f"{n}/{d}", data={"length": n, "depth": d}) for n in (512, 1024) for d in (0, 33.3, 66.7, 100)]
    heatmap.heatmap(needles.by_task(lines)["g"], tmp_path / "x.png", "needles")
    assert rows(drawn[0]) == ["0", "33.3", "66.7", "100"]
    assert texts(drawn[0]) == ["100"] * 8
    assert drawn[0].axes[0].collections[0].get_clim() == (0, 100)


def test_a_grid_that_broke_off_keeps_its_rows() -> None:
    """Of two lengths, the second had come to its second depth."""
    lines = [record(f"{n}/{d}", data={"length": n, "depth": d}) for n in (512, 1024) for d in (0, 25, 50, 90)]
    found = needles.grid(needles.by_task(lines[:6])["g"])
    assert found.depths == ["0", "25", "50", "90"]
    assert found.means[-1] == [100, None]


@pytest.mark.slow
def test_a_picture_per_task_and_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = planted("single", [1.0, 50.0]) + planted("multikey", [2.0, 60.0], 0.0) + [record("no depth")]
    write_run(tmp_path, lines)
    for letter in "yz":  # labels longer than a file's name may be
        many = {f"x{i}": letter * 39 for i in range(9)}
        write_run(tmp_path, lines, "quest", method={"_target_": "methods.quest.Quest", **many})
    assert report.main([str(tmp_path), "--plots"]) == 0
    paths = [Path(line[6:]) for line in capsys.readouterr().out.splitlines() if line.startswith("wrote ")]
    assert len(set(paths)) == len(paths) == 2 * (2 + 3 * 2)
    kinds = {path.suffix: path.read_bytes()[:4] for path in paths}
    assert kinds == {".png": b"\x89PNG", ".pdf": b"%PDF"}


def test_runs_of_one_length_share_a_picture(tmp_path: Path, drawn: list[Figure]) -> None:
    lines = planted("single", [1.0, 50.0, 88.0], lengths=(2048,))
    write_run(tmp_path, lines)
    for budget in (0.1, 0.2):
        write_run(tmp_path, lines[:1] + planted("single", [50.0, 88.0], 0.0, (2048,)), "quest", budget=budget)
    assert report.main([str(tmp_path), "--plots"]) == 0
    [found] = [figure for figure in drawn if "depth" in figure.axes[0].get_xlabel()]
    assert rows(found) == ["full", "quest 10%", "quest 20%"]
    assert texts(found) == ["100", "100", "100", "100", "0", "0", "100", "0", "0"]


def test_differences_to_full_are_drawn_best_first(tmp_path: Path, drawn: list[Figure]) -> None:
    scores = {"h2o": 0, "quest": 59, "snapkv": 30}
    write_run(tmp_path, [record(f"e{i}") for i in range(60)])
    for method, right in scores.items():
        write_run(tmp_path, [record(f"e{i}", score=float(i < right)) for i in range(60)], method)
    assert report.main([str(tmp_path), "--plots"]) == 0
    axes = drawn[0].axes[0]
    assert rows(drawn[0]) == ["h2o 10% *", "snapkv 10% *", "quest 10%"]  # from below
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(line.get_xdata()[0]) for line in points] == pytest.approx([-1, -0.5, -1 / 60])
    assert [line.get_markerfacecolor() == "white" for line in points] == [False, False, True]
    assert "95 % interval" in drawn[0].get_suptitle()


def test_fonts_are_such_that_publishers_take(tmp_path: Path) -> None:
    figure, _ = figures.side_by_side(1)
    figures.title(figure, "a title")
    _, vector = figures.save(figure, tmp_path / "x.png")
    assert b"/FontFile2" in vector.read_bytes()
    assert b"/Type3" not in vector.read_bytes()


def test_the_front_is_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    found = frontier_rows(["h2o"])  # full and three budgets score 0, 1/4, 2/4, 3/4
    frontier.frontier(found, tmp_path / "x.png")
    [dotted] = [line for line in drawn[0].axes[0].lines if line.get_linestyle() == ":"]
    assert [round(float(x), 6) for x in dotted.get_xdata()] == [10, 20, 50]


def test_a_list_in_a_title_is_no_negative_number_in_a_name() -> None:
    assert draw._slug("niah lengths=[512, 1024], 20%") == "niah-lengths=512-1024-20"


def test_a_heat_map_needs_more_than_one_cell() -> None:
    assert needles.by_task([record(), *planted("single", [5.0], lengths=(2048,))]) == {}


def frontier_rows(names: list[str]) -> list[dict[str, Any]]:
    found = []
    for number, (name, budget) in enumerate([("full", None), *((name, b) for name in names for b in (0.1, 0.2, 0.5))]):
        read = 100 * (budget or 1)
        lines = [
            record(str(i), score=float(i < number % 5), attended_prompt=read, attended_total=read, union_prompt=read)
            for i in range(4)
        ]
        summary = summarise(lines, config=config(name, budget=budget), info={"method": name}, full=None)
        found.append(summary | {"label": name})
    return found


def test_twelve_methods_are_told_apart_and_none_is_cut(tmp_path: Path, drawn: list[Figure]) -> None:
    names = [name + "_with_a_long_name_and page=16 ratio=0.25" for name in METHODS]
    frontier.frontier(frontier_rows(names), tmp_path / "x.png", "a title")
    uncut(tmp_path / "x.png")
    [figure] = drawn
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 3 and line.get_marker() != "None"]
    assert len({line.get_color() for line in lines}) == 12
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 12
    assert not any(line.get_clip_on() for line in lines)
    [legend] = figure.legends
    assert {" ".join(text.get_text().split()) for text in legend.texts} == {"full", *names, "Pareto front"}
    assert "95 % intervals:" in figure.get_suptitle()
    canvas, plot = figure.get_window_extent(), figure.axes[-1].get_window_extent()
    box = legend.get_window_extent()
    assert canvas.y0 <= box.y0
    assert box.y1 <= canvas.y1
    assert box.x0 >= plot.x1
    assert box.x1 <= canvas.x1


def test_styles_come_back_late() -> None:
    styles = [frontier._style(number) for number in range(132)]
    assert len({(style["color"], style["marker"]) for style in styles}) == 132


def test_few_methods_show_their_intervals(tmp_path: Path, drawn: list[Figure]) -> None:
    frontier.frontier(frontier_rows(METHODS[:3]), tmp_path / "x.png")
    assert "95 % interval" in drawn[0].axes[0].get_ylabel()
    assert len(drawn[0].axes[0].collections) == 3


def test_the_cost_of_reading_is_the_union_where_it_was_counted() -> None:
    row = {"budget": {"union": {"share": 0.28}, "attended": {"share": 0.2}}}
    assert PANELS[0].cost(row) == pytest.approx(28)
    assert PANELS[0].cost({"budget": row["budget"] | {"union": {"share": None}}}) == pytest.approx(20)


def test_a_full_disk_stays_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").symlink_to("/dev/full")
    figure = Figure()
    figure.subplots().set_title("a title")
    with pytest.raises(OSError, match="No space left"):
        figures.save(figure, tmp_path / "a.png")
