"""The page in a real browser: one table and one figure at first, sorted by a click, no request and no complaint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.commands import report
from tests.fake_records import record, write_run

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
        rows = page.locator("table").first.locator("tbody th")
        assert rows.all_inner_texts() == ["full", "h2o", "quest", "snapkv"]
        head = page.locator("table").first.locator("th", has_text="vs Full").first
        for order in (["quest", "h2o", "snapkv", "full"], ["snapkv", "h2o", "quest", "full"]):
            head.click()
            assert rows.all_inner_texts() == order  # what is unknown comes last either way
