"""The page in a real browser: sorted, filtered, searched, compared, light and dark, with no request and no error."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.commands import report
from harness.reports.columns import score_table
from harness.reports.compare import comparisons
from harness.reports.page import outputs
from harness.reports.page.build import as_json
from harness.reports.page.data import meaning
from harness.results.records import Record
from harness.results.run_folder import load
from tests.fake_records import record, talk, turn, write_run
from tests.quick import mostly_slow

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
NASTY = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'> & ${1}"
METHODS = ("h2o", "pqcache", "quest")
BUDGETS = (0.1, 0.2)
SIZE = 24


def lines(right: int, share: float, seconds: float, lengths: int = 2) -> list[Record]:
    """Needles of so many lengths and six depths; the first `right` are found."""
    heads = [[share, share], [share / 2, share / 2]]
    return [
        record(
            f"e{i}",
            score=float(i < right),
            group=f"niah/{1024 * (1 + i % lengths)}",
            output=f"needle {i} {NASTY}" if i < right else f"nothing of {i} at {share}",
            tokens=[i, int(i < right), 2, 3],
            token_s=[1.0, 1.5, 1.5 + seconds, 1.5 + 2 * seconds],
            attended_prompt=100 * share,
            attended_total=100 * share + 2,
            kv_device_bytes=int(share * 2**30),
            moved_bytes_per_step=share * 2**20 if share < 1 else 0.0,
            peaks={"prefill_device": None, "prefill_host": 3 << 30, "decode_device": None, "decode_host": 2 << 30},
            fidelity={"recall": share, "recall_per_head": heads, "mass": share, "error": 0.1, "kl": 0.2},
            data={"length": 1024 * (1 + i % lengths), "depth": 20 * (i // 2 % 6)},
        )
        for i in range(SIZE)
    ]


def page_of(folder: Path, *arguments: object) -> Path:
    out = folder / "page"
    assert report.main([str(folder), "--html", str(out), *map(str, arguments)]) == 0
    return out / "index.html"


def data_of(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods at two budgets, Full twice, one run that broke off, one that never began."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, lines(SIZE, 1.0, 0.3))
    write_run(folder, lines(SIZE - 1, 1.0, 0.2), dtype="bfloat16")
    for place, method in enumerate(METHODS):
        for budget in BUDGETS:
            write_run(folder, lines(8 * place + int(20 * budget), budget, 0.1 + budget), method, budget=budget)
    write_run(folder, lines(3, 0.3, 0.1)[:5], "snapkv", "interrupted", budget=0.3, facts={"num_expected": SIZE})
    write_run(folder, [], "sparq", "failed")
    return page_of(folder)


def test_what_all_rows_share_is_said_once_at_the_top(path: Path) -> None:
    data = data_of(path)
    lines = "\n".join(line for table in data["tables"] for line in table["conditions"])
    assert data["conditions"].startswith("device: cpu; machine: ")
    assert "machine: " not in lines
    assert "dtype: float32, but bfloat16 (full" in lines  # in which rows differ


def test_a_folder_for_the_page_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, lines(3, 1.0, 0.2))
    (tmp_path / "file").touch()
    assert report.main([str(tmp_path), "--html", str(tmp_path / "file" / "page")]) == 2
    err = capsys.readouterr().err
    assert f"Cannot use {tmp_path / 'file'}" in err
    assert "results.root" not in err


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH: the page is not opened")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=OPTIONS.split())
        yield opened
        opened.close()


class Opened:
    """The page, with all it asked for and all it complained of."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.page = browser.new_context(**context).new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.own = path.as_uri()
        for details in self.page.locator("details.more > summary").all():
            details.click()  # what is folded is tested, too

    def names(self) -> list[str]:
        """Method and budget of the rows of the main table, from top to bottom."""
        rows = self.page.locator(".table .grid").first.locator("tbody tr:not(.details)").all()
        cells = [[row.locator("th").inner_text(), row.locator("td").nth(1).inner_text()] for row in rows]
        return [" ".join(cell).replace("\u2605", "").strip(" ●■◆▲▼\n") for cell in cells]

    def draw_all(self) -> None:
        """Scrolls every chart into view."""
        for figure in self.page.locator("figure").all():
            figure.scroll_into_view_if_needed()
            figure.locator(".main-svg").first.wait_for()

    def sort(self, column: str) -> None:
        self.page.locator(".table .grid").first.locator(f'.sort[data-column="{column}"]').click()

    def check(self) -> None:
        """Nothing was asked of any network, and nothing went wrong."""
        assert [url for url in self.asked if url != self.own and not url.startswith(("data:", "blob:"))] == []
        assert self.said == []
        assert self.page.evaluate("window.broken") is None


@pytest.fixture
def opened(browser: Any, path: Path) -> Iterator[Opened]:
    found = Opened(browser, path)
    yield found
    found.check()
    found.page.context.close()


def test_the_page_opens_with_one_table_and_one_figure(browser: Any, path: Path) -> None:
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.locator("table.grid:visible").count() == 1
    assert page.locator("figure:visible").count() == 1
    assert 1 <= page.locator(".lines li").count() <= 4
    page.close()


def test_tables_are_sorted_opened_searched_and_scrolled(opened: Opened) -> None:
    columns_are_sorted_both_ways(opened)
    a_row_opens_its_command_and_provenance(opened)
    two_outputs_stand_side_by_side_and_are_searched(opened)
    heads_and_names_stay_in_sight(opened)


def test_charts_are_drawn_in_both_themes_and_filtered(opened: Opened, path: Path) -> None:
    # a function each time: the page's policy forbids what an expression would be evaluated by
    opened.page.wait_for_function("() => window.Plotly")
    opened.draw_all()
    charts_of_every_kind_are_drawn_in_both_themes(opened)
    filled_marks_are_the_pareto_front(opened, path)
    filters_hold_for_every_table_and_chart(opened)


def columns_are_sorted_both_ways(opened: Opened) -> None:
    ranking = opened.names()
    assert ranking[0].startswith("full")
    assert [name for name in ranking if "quest" in name] == ["quest 20%", "quest 10%"]
    assert ranking[-1] == "h2o 10%"
    opened.sort("score")
    assert opened.names()[0] == "h2o 10%"
    opened.sort("budget")
    assert opened.names()[0].startswith("snapkv")
    opened.sort("method")
    methods = [name.split()[0] for name in opened.names()]
    assert methods == sorted(methods)
    assert opened.page.locator('.table .grid >> nth=0 >> th[aria-sort="ascending"]').count() == 1


def filters_hold_for_every_table_and_chart(opened: Opened) -> None:
    page = opened.page
    menu = page.locator('[data-menu="methods"]')
    menu.locator("summary").focus()
    page.keyboard.press("Enter")
    menu.locator('input[value="pqcache"]').uncheck()
    assert not any("pqcache" in name for name in opened.names())
    assert menu.locator("summary").inner_text().split() == ["Methods", "5", "of", "6"]
    assert page.locator(".grid >> text=pqcache").count() == 0
    page.keyboard.press("Escape")
    opened.draw_all()
    page.wait_for_function(
        "() => ![...document.querySelectorAll('.chart')].some((one) => one.textContent.includes('pqcache'))"
    )
    assert all("quest" in one.text_content() for one in page.locator(".chart").all())
    assert menu.get_attribute("open") is None
    page.locator('[data-menu="budgets"] summary').click()
    page.locator('[data-menu="budgets"] >> text=None').click()
    assert page.locator("text=Nothing is left by the filters.").count() > 0


def two_outputs_stand_side_by_side_and_are_searched(opened: Opened) -> None:
    page = opened.page
    section = page.locator(".outputs")
    section.get_by_label("Second run").select_option(label="h2o 10%")
    count = section.locator(".count")
    assert count.inner_text() == f"{SIZE} examples in common, {SIZE - 2} with different answers, {SIZE} found"
    assert section.locator(".pair").first.locator("strong").inner_text() == "e2"  # the first that differs
    marked = " ".join(section.locator(".pair").first.locator(".side").nth(1).locator("mark").all_inner_texts())
    assert "nothing" in marked
    assert "2" not in marked  # which both answers have
    section.get_by_label("Search outputs").fill("NEEDLE 7 ")
    assert section.locator(".pair").count() == 1
    assert NASTY in section.locator(".pair pre").first.inner_text()  # as text, not as markup
    section.get_by_label("Search outputs").fill("")
    section.locator("text=only where they differ").click()
    assert count.inner_text().endswith(f"{SIZE - 2} found")


def a_row_opens_its_command_and_provenance(opened: Opened) -> None:
    opened.sort("method")
    button = opened.page.get_by_label("Command and provenance of quest 10%")
    button.focus()
    opened.page.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    details = opened.page.locator("tr.details:not([hidden])")
    assert "method=quest" in details.locator("code").inner_text()
    assert "float32, cpu, 1, 0" in details.inner_text()
    details.get_by_label("Copy the command of quest 10%").click()
    opened.page.wait_for_function(
        "() => document.querySelector('tr.details:not([hidden]) .copy').textContent === 'Copied'"
    )
    opened.sort("score")
    assert "method=quest" in details.locator("code").inner_text()  # still open
    assert opened.page.locator("tr.details:not([hidden])").count() == 1


def charts_of_every_kind_are_drawn_in_both_themes(opened: Opened) -> None:
    page = opened.page
    kinds = page.evaluate("[...document.querySelectorAll('.chart')].map((node) => node.data[0].type)")
    assert kinds.count("heatmap") == 1
    assert len(kinds) >= 1 + 4 + 1 + 1  # differences, four costs, needles, layers
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("#theme").click()
    assert page.evaluate(paper) != light
    assert page.locator("#theme").inner_text() == "Light"


def filled_marks_are_the_pareto_front(opened: Opened, path: Path) -> None:
    marked = "(one) => one.data.flatMap((t) => (t.text ?? []).map((name, i) => [name, t.marker.symbol[i]]))"
    [table] = data_of(path)["tables"]
    for place, panel in enumerate(table["panels"]):
        marks = opened.page.locator(".panels .chart").nth(place).evaluate(marked)
        filled = {name.split("<br>")[0] for name, symbol in marks if not symbol.endswith("-open")}
        points = [
            (x, row) for x, row in zip(panel["xs"], table["rows"], strict=True) if x and row["status"] == "complete"
        ]
        beaten = {
            row["title"]
            for x, row in points
            if any(
                other <= x and rival["score"] >= row["score"] and (other, rival["score"]) != (x, row["score"])
                for other, rival in points
            )
        }
        assert filled == {row["title"] for _, row in points} - beaten


def test_a_dark_phone_needs_no_sideways_scrolling(browser: Any, path: Path) -> None:
    found = Opened(browser, path, viewport={"width": 380, "height": 800}, color_scheme="dark")
    found.page.wait_for_function("() => document.querySelector('.chart .main-svg')")
    assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert found.page.locator("#theme").inner_text() == "Light"
    score = found.page.locator('.sort[data-column="score"]').first.bounding_box()
    assert score["x"] + score["width"] <= 380
    found.check()
    found.page.context.close()


def heads_and_names_stay_in_sight(opened: Opened) -> None:
    page = opened.page
    page.set_viewport_size({"width": 700, "height": 420})
    grid = page.locator(".grid").first
    names, budget = grid.locator("tbody .name").first, grid.locator("tbody .budget").first
    before = [names.bounding_box()["x"], budget.bounding_box()["x"]]
    page.evaluate("document.querySelector('.scroll').scrollLeft = 300")
    middle = grid.locator("tbody tr:not(.details)").nth(3)
    middle.evaluate("(node) => scrollTo(0, node.getBoundingClientRect().top + scrollY - 180)")
    page.wait_for_function("() => document.querySelector('.grid thead').style.transform")
    head, bar = grid.locator("thead").bounding_box(), page.locator("#filters").bounding_box()
    assert head["y"] == pytest.approx(bar["y"] + bar["height"], abs=1)
    assert names.bounding_box()["x"] <= before[0]
    assert budget.bounding_box()["x"] == pytest.approx(before[1], abs=40)  # its place, less the column of openers


def test_the_page_holds_the_numbers_of_the_text(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(path.parents[1]), "--details"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    [table] = data_of(path)["tables"]
    assert {block["name"] for block in table["blocks"]} == {"overview", "scores", "costs", "groups"}
    assert report.main([str(path.parents[1])]) == 0
    text += " ".join(capsys.readouterr().out.split())
    for block in table["blocks"]:
        for column in block["columns"]:
            assert all(cell in text for cell in column["cells"])
            signed = any(cell.startswith(("+", "-")) for cell in column["cells"])
            assert not signed or len(column["values"]) == len(column["cells"])  # "-9" is sorted as a number
    assert all(" ".join(note.split()) in text for note in [*table["notes"], *table["warnings"]])


def test_what_is_in_no_table_is_said(path: Path) -> None:
    [said] = data_of(path)["left_out"]
    assert "sparq" in said


def test_differences_that_chance_explains_are_grey(path: Path) -> None:
    [table] = data_of(path)["tables"]
    grey = {row["title"]: row["grey"] for row in table["rows"]}
    assert not grey["h2o 10%"]
    assert grey["snapkv 30%"]  # five examples
    unfinished = list(grey).index("snapkv 30%")
    assert not any(unfinished in panel["front"] for panel in table["panels"])
    assert any(panel["front"] for panel in table["panels"])
    assert not any(grey[title] for title in grey if title.startswith("full"))


@pytest.mark.parametrize("methods", mostly_slow([("full",), ("quest",), ("full", "quest")], ("quest",)))
def test_few_runs_make_a_page_too(
    browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], methods: tuple[str, ...]
) -> None:
    for method in methods:
        write_run(tmp_path, [record(output="a")], method)
    found = Opened(browser, page_of(tmp_path))
    assert len(found.names()) == len(methods)
    texts = "[...document.querySelector('section.table').childNodes].filter((one) => one.nodeType === 3)"
    assert found.page.evaluate(f"{texts}.map((one) => one.data.trim()).filter(Boolean)") == []
    found.page.wait_for_function("() => window.Plotly")
    found.check()
    found.page.context.close()


@pytest.mark.slow
def test_on_paper_every_chart_is_drawn(browser: Any, path: Path) -> None:
    """And from a dark screen, on white, no wider than the paper."""
    found = Opened(browser, path, viewport={"width": 1900, "height": 800}, color_scheme="dark")
    page = found.page
    page.wait_for_selector(".js-plotly-plot")
    drawn = "document.querySelectorAll('.chart.js-plotly-plot').length"
    all_charts = page.locator(".chart").count()
    assert page.evaluate(drawn) < all_charts
    page.emulate_media(media="print", color_scheme="dark")
    dispatch = "(name) => dispatchEvent(new Event(name))"
    page.evaluate(dispatch, "beforeprint")
    assert page.evaluate(drawn) == all_charts
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    paper = page.evaluate("document.body.clientWidth")
    assert paper < 1040  # A4, landscape, less its margins
    widths = "[...document.querySelectorAll('.grid, .main-svg')].map((one) => one.getBoundingClientRect().width)"
    assert max(page.evaluate(widths)) <= paper
    page.evaluate(dispatch, "afterprint")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    page.pdf()
    found.check()
    page.context.close()


def test_conversations_have_their_tables(browser: Any, tmp_path: Path) -> None:
    for history in ("recompute", "store"):
        turns = [turn(score=0.5, data={"turns_ago": ago}) for ago in (0, 1)]
        write_run(tmp_path, [talk("a", *turns), talk("b", *turns)], history=history)
    made = page_of(tmp_path)
    found = Opened(browser, made)
    captions = found.page.locator(".grid caption").all_inner_texts()
    [table] = data_of(made)["tables"]
    assert sorted(captions) == sorted(block["caption"] for block in table["blocks"])  # none is made and not shown
    assert {"Score by turn", "Score by turns between telling and asking"} <= {*captions}
    found.page.locator('[data-menu="methods"] summary').click()
    found.page.locator('[data-menu="methods"] input[value="full history=store"]').uncheck()
    assert found.page.locator(".grid >> text=history=store").count() == 0
    assert found.page.locator(".grid >> text=history=recompute").count() >= 4
    assert found.page.locator(".grid tr.full").count() == 0  # where all rows are Full, none stands out
    found.check()
    found.page.context.close()


@pytest.mark.slow
def test_many_runs_are_still_told_apart(browser: Any, tmp_path: Path) -> None:
    """Of one length: needles and recall share a map, a line each; no two lines of costs look alike."""
    write_run(tmp_path, lines(SIZE, 1.0, 0.3, lengths=1))
    for place in range(15):
        budgets = (0.1, 0.2) if place else (0.1,)
        for budget in budgets:
            some = lines(8 + place, budget, 0.1 + budget, lengths=1)
            write_run(tmp_path, some, "quest", budget=budget, method={"_target_": "methods.quest.Q", "page": place})
    found = Opened(browser, page_of(tmp_path))
    found.page.wait_for_function("() => window.Plotly")
    found.draw_all()
    charts = found.page.evaluate("[...document.querySelectorAll('.chart')].map((one) => one.data)")
    maps = [chart[0] for chart in charts if chart[0]["type"] == "heatmap"]
    assert [len(one["z"]) for one in maps] == [1 + 29, 29]  # needles with Full, recall without it
    assert maps[0]["customdata"][0] == [4] * 6  # examples of each depth
    looks = [
        [
            (one["line"]["color"], one["line"].get("dash"), one["marker"]["symbol"])
            for one in chart
            if one["x"] == [None]
        ]
        for chart in charts
        if chart[0]["type"] == "scatter"
    ]
    costs = [look for look in looks if look]
    assert costs
    assert all(len({*look}) == len(look) >= 15 for look in costs)  # Full moves nothing
    found.check()
    found.page.context.close()


def test_a_folder_without_records_makes_an_empty_page(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path, [], "quest", "failed")
    found = Opened(browser, page_of(tmp_path))
    assert "0 runs in 0 tables" in found.page.locator("body").inner_text()
    assert "quest" in found.page.locator(".left-out").inner_text()
    found.check()
    found.page.context.close()


@pytest.mark.slow
def test_scores_fill_their_charts_however_low(browser: Any, tmp_path: Path) -> None:
    """Such as 1/perplexity: 4 of 100."""
    for method, score in (("full", 0.043), ("quest", 0.041), ("h2o", 0.028)):
        some = [record(f"e{i}", score=score, attended_prompt=100.0 if method == "full" else 10.0) for i in range(9)]
        write_run(tmp_path, some, method)
    found = Opened(browser, page_of(tmp_path))
    found.page.wait_for_function("() => window.Plotly")
    found.draw_all()
    axis = found.page.locator(".panels .chart").first.evaluate("(one) => one.layout.yaxis")
    low, high = axis["range"]
    assert low < 2.8 < 4.3 < high < 50  # with the intervals of nine examples
    assert "recall" in axis["title"]["text"]  # what the score is
    found.check()
    found.page.context.close()


def test_every_head_of_the_main_table_says_what_it_means(tmp_path: Path) -> None:
    """Those of columns that are empty here, too."""
    [table] = comparisons([load(write_run(tmp_path, [record()]))])
    heads = [column.head for column in score_table(table)]
    assert [head for head in heads if meaning(head) is None] == ["method", "score"]  # the conditions name the score


def test_no_script_ends_in_the_data() -> None:
    found = as_json({"text": NASTY + "\u2028"})
    assert "<" not in found
    assert json.loads(found) == {"text": NASTY + "\u2028"}


def test_long_outputs_are_cut_and_many_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "LONGEST", 4)
    monkeypatch.setattr(outputs, "MOST", 10)
    room = outputs.Room()
    assert [room.add(text) for text in ("abcdef", "abcd", "efgh", "ij", "klm")] == [0, 0, 1, 2, None]
    assert list(room.texts) == ["abcd", "efgh", "ij"]
    assert "1 outputs are cut after 4 characters; 1 outputs are left out" in room.sentence


def test_scripts_read_no_text_as_markup() -> None:
    folder = Path(outputs.__file__).parent
    for file in sorted(folder.glob("*.js")):
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file.name
        assert len(text.splitlines()) <= 300, file.name
    assert "http" not in (folder / "template.html").read_text().replace("http-equiv", "")


def test_the_page_is_part_of_the_package() -> None:
    import tomllib

    told = tomllib.loads((Path(report.__file__).parents[2] / "pyproject.toml").read_text())
    patterns = told["tool"]["setuptools"]["package-data"]["*"]
    folder = Path(outputs.__file__).parent
    kinds = {f"*{file.suffix}" for file in folder.iterdir() if file.suffix not in (".py", "")}
    assert kinds <= set(patterns)
