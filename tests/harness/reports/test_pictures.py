"""Figures show what they say, in the size and the type that a paper asks for, with nothing cut off or covered."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
import pytest
import yaml
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox
from PIL import Image

from harness.commands import report
from harness.reports.choice import Choice, checked, choose
from harness.reports.compare import Comparison, comparisons
from harness.reports.pictures import beside, figures, kinds
from harness.reports.pictures.figures import Look
from harness.reports.pictures.heatmap import grid, needles_by_task
from harness.reports.pictures.scores import COSTS, front
from harness.results.records import Record
from harness.results.run_folder import find, load
from tests.fake_records import record, write_run

DOCS = Path(__file__).parents[3] / "docs" / "results.md"
COLUMN = Look()
METHODS = "h2o infinigen infllm lm_infinite oracle pqcache pyramidkv quest shadowkv snapkv sparq streaming".split()


def planted(
    task: str, depths: list[float], score: float = 1.0, lengths: tuple[int, ...] = (2048, 4096), **changes: Any
) -> list[Record]:
    return [
        record(
            f"{task}/{n}/{d}",
            group=f"{task}/{n}",
            score=score,
            data={"task": task, "length": n, "depth": d + i},
            **changes,
        )
        for i, n in enumerate(lengths)
        for d in depths
    ]


def tables_of(root: Path) -> list[Comparison]:
    return comparisons([load(run) for run in find([root])])


def draw(kind: str, root: Path, look: Look = COLUMN, **choice: Any) -> Figure:
    known = Choice(**choice)
    return kinds.of_paper(kind, choose(tables_of(root), known), look, known.names).figure


def rows(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def legend(figure: Figure) -> list[str]:
    [found] = figure.legends
    return [text.get_text() for text in found.texts]


def lines_of(axes: Axes) -> list[tuple[tuple[str, str], tuple[list[float], list[float]]]]:
    """Colour and mark of each joined line, and its points."""
    return [
        ((str(line.get_color()), str(line.get_marker())), (list(line.get_xdata()), list(line.get_ydata())))
        for line in axes.lines
        if line.get_marker() not in ("None", "") and line.get_linestyle() != "None"
    ]


# What every figure promises.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full and two methods at three budgets, on needles; with times, bytes, and costs along their answers."""
    root = tmp_path_factory.mktemp("runs")
    for place, method in enumerate(["full", "h2o", "quest"]):
        for budget in [None] if method == "full" else [0.1, 0.2, 0.4]:
            share = budget or 1.0
            step = 0.01 * (place + 1) * (1 + share)
            along = {"steps": [2, 4], "attended": [9.0, 9.0], "moved_bytes": [0.0, 0.0], "used_bytes": [2**20, 2**20]}
            found = [
                one
                for n in (1024, 4096)
                for one in planted(
                    "single",
                    [0.0, 50.0, 100.0],
                    float(n < 4096 or share > 0.15),
                    (n,),
                    token_s=[1.0, 1.1, *(1.1 + n / 1024 * step * i for i in range(1, 4))],
                    along=along,
                    prompt_tokens=n - 8,
                    attended_prompt=share * (n - 8),
                    kv_device_bytes=int(share * 2**24),
                    moved_bytes_per_step=3**place * share * 2**20,
                )
            ]
            write_run(root, found, method, budget=budget)
    return root


@pytest.fixture(scope="module")
def drawn(runs: Path) -> dict[str, Figure]:
    return {kind: draw(kind, runs) for kind in kinds.KINDS}


def visible(figure: Figure) -> dict[Text, Bbox]:
    """The texts that are seen, with their boxes. A tick that is outside its axis is not drawn."""
    figure.draw_without_rendering()
    axis = [one for axes in figure.axes for one in (axes.xaxis, axes.yaxis)]
    ticks = {label: one for one in axis for label in one.get_ticklabels()}
    known = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    drawn = [label for one in axis for tick in one._update_ticks() for label in (tick.label1,) if label.get_visible()]
    return {text: text.get_window_extent() for text in known if text not in ticks or text in drawn}


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_column_holds_type_that_can_be_read_and_nothing_is_cut_or_covered(
    kind: str, drawn: dict[str, Figure]
) -> None:
    figure = drawn[kind]
    assert figure.get_size_inches()[0] == 3.3
    assert figure.get_suptitle() == ""
    texts = visible(figure)
    assert min(text.get_fontsize() for text in texts) == 7
    assert not any("$" in text.get_text() for text in texts)  # an exponent would be smaller
    for (one, box), (other, its) in combinations(texts.items(), 2):
        assert not box.padded(-1).overlaps(its.padded(-1)), (one, other)
    for text, (x0, y0, x1, y1) in ((text, box.extents) for text, box in texts.items()):
        assert min(x0, y0) > -1, text
        assert x1 < figure.bbox.x1 + 1, text
        assert y1 < figure.bbox.y1 + 1, text
    for legend in figure.legends:
        assert not any(legend.get_window_extent().overlaps(axes.get_tightbbox()) for axes in figure.axes)


@pytest.mark.parametrize("kind", ["frontier", "length"])
def test_budgets_at_points_cover_no_point(kind: str, drawn: dict[str, Figure]) -> None:
    for axes in drawn[kind].axes:
        names = [text for text in axes.texts if isinstance(text, Annotation)]
        assert {"10%", "20%", "40%"} == {name.get_text() for name in names}
        points = [xy for _, points in lines_of(axes) for xy in axes.transData.transform(np.transpose(points))]
        for name in names:
            assert not any(name.get_window_extent().contains(*point) for point in points)


def test_points_that_meet_share_a_name_and_what_has_no_room_is_counted() -> None:
    def panel(size: float) -> Axes:
        figure, [axes], *_ = figures.panels(1, Look(width=size, height=size))
        axes.plot([0, 1], [0, 1], "o")
        figure.draw_without_rendering()
        return axes

    with figures.styled():
        axes = panel(3)
        named = [
            ((0.5, 0.5), "10%", "red"),
            ((0.5, 0.5), "20%", "red"),
            ((0.1, 0.1), "5%", "red"),
            ((0.1001, 0.1), "5%", "blue"),
        ]
        assert beside.write_beside(axes, named, 7) == 0
        assert [text.get_text() for text in axes.texts] == ["10%, 20%", "5%"]
        assert [to_rgb(text.get_color()) for text in axes.texts] == [(beside.SHADE, 0, 0), to_rgb(figures.INK)]
        assert beside.write_beside(panel(1), [((0.5, 0.5), "a name that is far too long", "red")], 7) == 1


def test_names_of_ticks_that_would_meet_are_left_out() -> None:
    with figures.styled():
        figure, [axes], *_ = figures.panels(1, Look(width=2))
        axes.set_xticks(range(16), [str(2**n) for n in range(16)])
        figure.draw_without_rendering()
        figures.spaced(axes)
        shown = [label for label in axes.get_xticklabels() if label.get_visible()]
        boxes = [label.get_window_extent() for label in shown]
    assert 4 < len(shown) < 16
    assert shown[0].get_text() == "1"
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize("suffix", figures.FORMATS)
def test_a_file_has_the_size_asked_for_and_is_written_through_no_link(suffix: str, runs: Path, tmp_path: Path) -> None:
    other, path = tmp_path / "somebody's", tmp_path / f"x{suffix}"
    other.write_text("stays")
    path.symlink_to(other)
    figures.save(draw("budget", runs), path)
    assert other.read_text() == "stays"
    content = path.read_bytes()
    if suffix == ".pdf":
        assert b"/MediaBox [ 0 0 237.6 " in content  # 3.3 inches
        assert b"/FontFile2" in content  # as publishers want it
        assert b"/Type3" not in content
    elif suffix == ".svg":
        assert b'width="237.6pt"' in content
    else:
        assert Image.open(path).width == 3.3 * 300
    figures.save(draw("budget", runs), tmp_path / f"y{suffix}")  # a second drawing of one moves its parts
    assert content == (tmp_path / f"y{suffix}").read_bytes()


def test_a_style_file_gives_the_look_to_other_figures() -> None:
    with matplotlib.style.context("harness.reports.pictures.paper"):
        assert matplotlib.rcParams["pdf.fonttype"] == 42
        assert matplotlib.rcParams["axes.edgecolor"] == figures.SOFT
    assert matplotlib.rcParams["pdf.fonttype"] != 42


@pytest.mark.parametrize(
    ("look", "size", "small"),
    [
        ({"width": "double"}, 7.0, 7),
        ({"width": 5, "height": 2}, (5, 2), 7),
        ({"font": 10, "height": 4}, (3.3, 4), 9),
        ({"width": None}, 3.3, 7),
    ],
)
def test_size_and_type_are_those_asked_for(look: dict[str, Any], size: Any, small: float, runs: Path) -> None:
    figure = draw("budget", runs, Look(**look))
    assert tuple(figure.get_size_inches())[: np.size(size)] == (size if isinstance(size, tuple) else (size,))
    assert min(text.get_fontsize() for text in visible(figure)) == small
    if "height" not in look:  # what is drawn is two thirds as high as wide, whatever its labels need
        assert figure.axes[0].bbox.height / figure.dpi == pytest.approx(figure.get_size_inches()[0] * 2 / 3, rel=0.01)


def test_a_choice_gives_rows_names_and_order(runs: Path) -> None:
    figure = draw(
        "differences", runs, methods=["full", "quest"], budgets=[0.2, 0.1], names={"quest": "ours", "10%": "1/10"}
    )
    assert rows(figure.axes[0]) == ["ours 1/10", "ours 20%"]  # best first, from below
    figure = draw("budget", runs, methods=["quest", "h2o", "full"], names={"h2o": "H$_2$O"})
    assert legend(figure) == ["Full", "Quest", "H$_2$O"]  # what is typed may be mathematics
    assert lines_of(figure.axes[0])[0][0][0] == figures.COLOURS[0]


@pytest.mark.parametrize(("side", "headings"), [("task", "ABab"), ("model", "AaBb")])
def test_panels_stand_by_task_or_by_model(side: Any, headings: str, tmp_path: Path) -> None:
    for model in ("small", "large"):
        for method, budget in (("full", None), ("h2o", 0.1), ("h2o", 0.2)):
            for length in (512, 1024):
                write_run(
                    tmp_path,
                    [record(f"{length}", prompt_tokens=length)],
                    method,
                    budget=budget,
                    model={"name": model, "revision": None},
                    task={"_target_": "evals.niah.Niah", "lengths": [length]},
                )
    short = {"niah lengths=[512]": "512", "niah lengths=[1024]": "1024"}
    figure = draw("budget", tmp_path, Look(panels=side), models=["small", "large"], names=short)
    known = {"A": ("1024", "small"), "B": ("512", "small"), "a": ("1024", "large"), "b": ("512", "large")}
    shown = [axes.get_title() for axes in figure.axes]
    assert [all(word in title for word in known[one]) for title, one in zip(shown, headings, strict=True)] == [True] * 4
    assert len(draw("budget", tmp_path, Look(panels=side), models=["small"]).axes) == 2
    one = draw("length", tmp_path, models=["small", "large"])  # of all tasks of a model
    assert [axes.get_title() for axes in one.axes] == ["small", "large"]


def test_groups_have_panels_of_their_own(tmp_path: Path) -> None:
    for budget in (None, 0.1, 0.2):
        right = [record(f"{g}/{i}", group=f"{g}/4096") for g in ("vt", "cwe", "fwe") for i in range(4)]
        lines = right if not budget else [replace(one, score=float(one.id[0] == "v" or budget == 0.2)) for one in right]
        write_run(tmp_path, lines, "h2o" if budget else "full", budget=budget)
    figure = draw("budget", tmp_path, Look(groups=["vt", "cwe"]), names={"vt": "tracing"})
    assert [axes.get_title() for axes in figure.axes] == ["tracing", "cwe"]
    assert [points[1] for axes in figure.axes for _, points in lines_of(axes)] == [[100, 100], [0, 100]]
    whole = draw("budget", tmp_path, Look(groups=["4096"]))
    assert [points[1] for _, points in lines_of(whole.axes[0])] == [[pytest.approx(100 / 3), 100]]
    with pytest.raises(ValueError, match="cwf is in no run; did you mean cwe"):
        draw("budget", tmp_path, Look(groups=["cwf"]))


# What each kind shows.


def test_depths_that_lie_anywhere_share_ten_bins(tmp_path: Path) -> None:
    write_run(tmp_path, planted("multikey", [1.5, 7.25, 33.1, 98.0], 0.5))
    axes = draw("needles", tmp_path, Look(width="double")).axes[0]
    assert rows(axes) == [f"{10 * i}-{10 * i + 10}" for i in range(10)]
    assert [text.get_text() for text in axes.texts] == ["50"] * 6  # two of the four share a cell, at each length


def test_depths_of_a_grid_lie_true_to_scale_even_where_a_run_broke_off() -> None:
    lines = [record(f"{n}/{d}", data={"length": n, "depth": d}) for n in (512, 1024) for d in (0, 25, 50, 90)]
    found = grid(needles_by_task(lines[:6])["g"])
    assert (found.down, found.across) == (["0", "25", "50", "90"], ["512", "1K"])
    assert found.edges == [-12.5, 12.5, 37.5, 70, 110]
    assert found.means[-1] == [100, None]
    assert needles_by_task([record(), *planted("single", [5.0], lengths=(2048,))]) == {}  # one cell is no map


def test_runs_of_one_length_share_a_map_and_others_have_their_own(tmp_path: Path) -> None:
    for name, lengths, maps in (("one", (2048,), 1), ("two", (2048, 4096), 2)):
        lines = planted("single", [1.0, 50.0, 88.0], lengths=lengths)
        write_run(tmp_path / name, lines)
        write_run(tmp_path / name, lines[:1] + planted("single", [50.0, 88.0], 0.0, lengths), "quest")
        *found, bar = draw("needles", tmp_path / name, Look(width=None)).axes
        assert len(found) == maps
        assert bar.get_ylabel() == "score (0-100)"
        if maps == 1:
            assert rows(found[0]) == ["Full", "Quest 10%"]
            assert [text.get_text() for text in found[0].texts] == ["100", "100", "100", "100", "0", "0"]
        else:
            assert [axes.get_title() for axes in found] == ["Full", "Quest 10%"]
            below = draw("needles", tmp_path / name, Look(columns=1)).axes[:2]
            for row, shown in ((found, [True, True]), (below, [False, True])):
                assert [bool(axes.get_xticklabels()) for axes in row] == shown


def test_differences_to_full_are_drawn_best_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, [record(f"e{i}") for i in range(60)])
    for method, right in {"h2o": 0, "quest": 59, "snapkv": 30}.items():
        write_run(tmp_path, [record(f"e{i}", score=float(i < right)) for i in range(60)], method)
    [axes] = draw("differences", tmp_path).axes
    assert rows(axes) == ["H2O 10%", "SnapKV 10%", "Quest 10%"]  # from below
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(line.get_xdata()[0]) for line in points] == pytest.approx([-100, -50, -100 / 60])
    assert [line.get_markerfacecolor() == "white" for line in points] == [False, False, True]
    assert [text.xy[1] for text in axes.texts if isinstance(text, Annotation)] == [0, 1]  # *
    monkeypatch.setattr(kinds, "MOST", 3)  # rows
    shown = dict(kinds.of_page(tables_of(tmp_path)[0]))
    assert rows(shown["differences"].figure.axes[0]) == ["snapkv 10%", "quest 10%"]
    assert legend(shown["frontier"].figure) == ["full", "quest", "snapkv", "Pareto front"]
    assert all("the 3 rows of 4 that score best" in one.caption for one in shown.values())


def test_a_front_is_what_nothing_beats() -> None:
    points = [(1, 0.5), (2, 0.5), (2, 0.9), (3, 0.9), (4, 0.8), None, (1, 0.5), (5, 1.0)]
    assert front(points) == {0, 2, 6, 7}
    assert front([]) == front([None]) == set()


def write_frontier(root: Path, names: list[str], **of_full: Any) -> Path:
    """Write Full and three budgets of each method, which score 0, 1/4, 2/4, 3/4 and so on."""
    budgets = [("full", None), *((name, budget) for name in names for budget in (0.1, 0.2, 0.5))]
    for number, (name, budget) in enumerate(budgets):
        read = 100 * (budget or 1)
        more = {"union_prompt": read, "attended_total": read} | (of_full if name == "full" else {})
        lines = [record(str(i), score=float(i < number % 5), attended_prompt=read, **more) for i in range(4)]
        write_run(root, lines, name, budget=budget)
    return root


def test_few_methods_show_their_front_and_intervals(tmp_path: Path) -> None:
    axes = draw("frontier", write_frontier(tmp_path, ["h2o"]), Look(costs=["read"])).axes[0]
    [dotted] = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert [round(float(x), 6) for x in dotted.get_xdata()] == [10, 20, 50]
    assert len(axes.collections) == 2  # intervals of Full's and of H2O's


def test_a_short_axis_of_shares_has_several_plain_numbers_and_the_caption_says_that_it_is_logarithmic(
    tmp_path: Path,
) -> None:
    for budget, read in ((None, 100.0), (0.3, 30.0), (0.5, 50.0)):
        write_run(tmp_path, [record("a", attended_prompt=read)], "quest" if budget else "full", budget=budget)
    shown = kinds.of_paper("frontier", choose(tables_of(tmp_path), Choice()), Look(costs=["read"]))
    names = [text.get_text() for text in shown.figure.axes[0].get_xticklabels() if text.get_visible()]
    assert names == ["30", "50", "70", "100"]
    assert "reads per step, log axis" in shown.caption


@pytest.mark.parametrize("kind", ["differences", "needles"])
def test_a_long_heading_is_broken_at_spaces_and_stays_on_the_figure(kind: str, runs: Path) -> None:
    heading = "Small-Language-2 with our own my-lora"
    [table] = tables_of(runs)
    entries = [replace(row, label=heading) for row in table.entries]
    with figures.styled():
        figure, _ = kinds.KINDS[kind].draw([Comparison(heading, table.metric, entries)], COLUMN)
    titles = [axes.title for axes in figure.axes if axes.get_title()]
    assert titles
    for title, box in visible(figure).items():
        assert box.x0 >= 0, title
        assert box.x1 <= figure.bbox.x1, title
    assert all(heading in title.get_text().replace("\n", " ") for title in titles)


def test_twelve_methods_are_told_apart(tmp_path: Path) -> None:
    figure = draw("frontier", write_frontier(tmp_path, METHODS), Look(width="double"))
    shown = [style for style, points in lines_of(figure.axes[0]) if len(points[0]) == 3]
    assert len(set(shown)) == 12
    assert len(legend(figure)) == 2 + 12
    assert not figure.axes[0].collections  # intervals of so many cover each other


@pytest.mark.parametrize("kind", ["frontier", "budget"])
def test_lines_join_points_in_the_order_of_budgets(kind: str, tmp_path: Path) -> None:
    for budget, read in ((512, 30.0), (64, 20.0), (1024, 10.0), (None, 100.0)):
        answers = [record(str(i), attended_prompt=read, score=i / 9) for i in range(9)]
        write_run(tmp_path, answers, "h2o" if budget else "full", budget=budget)
    axes = draw(kind, tmp_path, Look(costs=["read"]), budgets=[1024, 64, 512]).axes[0]
    [(across, up)] = [points for _, points in lines_of(axes) if len(points[0]) > 1]
    assert up == pytest.approx([400 / 9] * 3)
    if kind == "budget":
        assert across == list(axes.get_xticks()) == [64, 512, 1024]
        assert axes.get_xlabel() == "budget (tokens)"
    else:
        assert across == pytest.approx([20, 30, 10])
        assert [text.get_text() for text in axes.texts] == ["64", "512", "1024"]


def test_what_did_not_keep_its_budget_is_hollow(tmp_path: Path) -> None:
    for budget, read in ((0.1, 10.0), (0.2, 60.0)):
        write_run(tmp_path, [record("a", attended_prompt=read)], "h2o", budget=budget)
    shown = kinds.of_paper("budget", choose(tables_of(tmp_path), Choice()), COLUMN)
    [hollow] = [line for line in shown.figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [hollow.get_xdata()[place] for place in hollow.get_markevery()] == [20]
    assert "hollow: budget not kept" in shown.caption


def test_times_are_drawn_where_fulls_are_known(tmp_path: Path) -> None:
    [table] = tables_of(write_frontier(tmp_path / "untimed", ["h2o"], token_s=[1.0]))
    assert [COSTS[cost].shows(table) for cost in ("read", "held", "tpot")] == [True, True, False]
    assert COSTS["tpot"].shows(replace(table, entries=table.entries[1:]))  # a table without Full
    assert not COSTS["read"].shows(replace(table, entries=table.entries[:1]))
    held = COSTS["held"]
    memory = {"kv_device_bytes": 8 * 2**20, "kv_host_bytes": 120 * 2**20, "kv_disk_bytes": None}
    assert held.scale * held.of({"memory": memory}) == 128
    assert held.of({"memory": {"kv_device_bytes": None}}) is None


def test_costs_along_answers_are_drawn_from_stretches_and_times(tmp_path: Path) -> None:
    """64 steps of 10 ms, then 36 of 20 ms, after a prompt of 100 tokens; the seal lies before the second token."""
    times = [1.0, 5.0, *(5 + 0.01 * i for i in range(1, 64)), *(5.63 + 0.02 * i for i in range(1, 37))]
    costs = {"steps": [64, 100], "attended": [132.5, 182.5], "moved_bytes": [0.0, 0.0], "used_bytes": [2**20, 2**21]}
    half = costs | {"attended": [132.5 / 2, 182.5 / 2], "moved_bytes": [2**20, 2**20]}
    write_run(tmp_path, [record("a", token_s=times, along=costs), record("short")])
    write_run(tmp_path, [record("a", token_s=times, along=half), record("short")], "h2o")
    figure = draw("along", tmp_path)
    assert legend(figure) == ["Full", "H2O 10%"]
    full, h2o = zip(*([points for _, points in lines_of(axes)] for axes in figure.axes), strict=True)
    time, share, used, moved = range(4)
    assert full[time] == ([64, 100], pytest.approx([10, 20]))
    assert (full[share], h2o[share]) == (([64, 100], [100, 100]), ([64, 100], [50, 50]))
    assert h2o[used][1] == [1, 2]
    assert h2o[moved][1] == [1, 1]


def test_times_lie_over_the_lengths_of_prompts(runs: Path, tmp_path: Path, drawn: dict[str, Figure]) -> None:
    [axes] = drawn["length"].axes
    points = [points for _, points in lines_of(axes)]
    assert points[0] == ([1016, 4088], pytest.approx([20, 80]))  # Full
    assert points[1] == ([1016, 4088], pytest.approx([22, 88]))  # H2O 10%
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1K", "4K"]
    # without a length asked for, prompts between two powers of two are taken together
    write_run(tmp_path, [record(str(n), prompt_tokens=n) for n in (600, 1000, 1024, 1500)])
    assert lines_of(draw("length", tmp_path).axes[0])[0][1][0] == [1000, 1500]


# What cannot be drawn.


@pytest.mark.parametrize(
    ("kind", "budgets", "says"),
    [
        ("needles", [0.1], "run task=niah"),
        ("along", [0.1], "long enough"),
        ("length", [0.1], "task.lengths="),
        ("budget", [0.1], "-m budget="),
        ("budget", [0.1, 0.2, 512], "20% and 512 have no axis"),
        ("frontier", [], "run a method other than Full"),
        ("differences", [], "run Full on the same prompts"),
    ],
)
def test_what_runs_cannot_show_is_said_with_a_remedy(
    kind: str, budgets: list[float], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for budget in [None, *budgets]:
        write_run(tmp_path, [record(str(i)) for i in range(9)], "h2o" if budget else "full", budget=budget)
    assert report.main([str(tmp_path), "--figure", kind, "--out", str(tmp_path / "x.pdf")]) == 2
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert says in said
    assert not (tmp_path / "x.pdf").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--figure", "fronter", "--out", "x.pdf"], "did you mean frontier?"),
        (["--figure", "budget", "--out", "x.tiff"], "--out x.tiff: name a file, --out FILE.pdf"),
        (["--figure", "budget"], "--out FILE.pdf"),
    ],
)
def test_a_figure_of_no_kind_or_without_a_file_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main(["DIR", *words])
    assert says in capsys.readouterr().err


def test_the_section_in_docs_is_one() -> None:
    [text] = re.findall(r"```yaml\n(figure:.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    section = yaml.safe_load(text)["figure"]
    assert section.keys() == {field.name for field in fields(Look)}
    assert checked(Look, section, "figure").inches == 7


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("{width: wide}", "width"),
        ("{font: 6}", "at least 7"),
        ("{costs: [reads]}", "costs"),
        ("{size: 3}", "there is no key size"),
    ],
)
def test_a_wrong_section_of_the_file_is_refused(
    section: str, says: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper = tmp_path / "paper.yaml"
    paper.write_text(f"figure: {section}\n")
    words = [str(runs), "--figure", "budget", "--paper", str(paper), "--out", str(tmp_path / "x.pdf")]
    assert report.main(words) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_the_command_writes_the_chosen_figure_and_prints_its_caption(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paper, out = tmp_path / "paper.yaml", tmp_path / "new" / "x.pdf"
    paper.write_text("methods: [full, quest]\nfigure: {width: double, costs: [held]}\n")
    assert report.main([str(runs), "--figure", "frontier", "--paper", str(paper), "--out", str(out)]) == 0
    assert b"/MediaBox [ 0 0 504 " in out.read_bytes()
    said = capsys.readouterr()
    assert said.out.startswith("Scores against costs; ")
    with pytest.raises(SystemExit, match="0"):
        report.main(["--help"])
    help_text = capsys.readouterr().out
    assert all(kind in help_text for kind in kinds.KINDS)


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
