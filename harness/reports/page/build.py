"""`index.html`: template, styles, scripts, Plotly and the data in one file.

Plotly travels compressed (a third of its size) and is unpacked by the browser: tables are there before the charts. A
content security policy forbids the page every request.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from harness.reports.compare import Comparison
from harness.reports.page.data import page_data
from harness.results import files
from harness.results.provenance import now

HERE = Path(__file__).parent
SCRIPTS = ("dom", "tables", "plots", "maps", "outputs", "page")  # in the order in which they need each other


def write_page(folder: Path, tables: Sequence[Comparison], left_out: Sequence[str] = ()) -> Path:
    """Writes FOLDER/index.html. `left_out`: sentences on what was found and is in no table."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    files.write_atomically(path, page(page_data(tables, left_out, made=now())))
    return path


def page(data: dict[str, Any]) -> str:
    parts = {
        "title": escape(data["title"]),
        "style": _read("page.css"),
        "scripts": "\n".join(_read(f"{name}.js") for name in SCRIPTS),
        "data": as_json(data),
        "plotly": packed_plotly(),
    }
    return Template(_read("template.html")).substitute(parts)


def as_json(data: Any) -> str:
    """JSON that ends no script: `<` is written as an escape wherever it stands."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def packed_plotly() -> str:
    """gzip, base64."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
