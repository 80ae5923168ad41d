"""The documentation as a site: it builds, every page is in its menu, and a broken link fails the build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason="needs mkdocs-material: pip install '.[docs]'")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository's documents, to be changed."""
    for name in ("docs", "results/published", "results/paper"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=folder, env=dict(os.environ, NO_COLOR="1"), capture_output=True, text=True)


def test_the_site_builds(copy: Path) -> None:
    done = build(copy)
    assert done.returncode == 0, done.stderr
    pages = [copy / "README.md", copy / "CONTRIBUTING.md", *(copy / "docs").glob("*.md")]
    for page in pages:
        place = page.relative_to(copy).with_suffix("")
        assert (copy / "build" / "site" / ("" if place.name == "README" else place) / "index.html").is_file()
    assert (copy / "build" / "site" / "docs" / "img" / "headline.png").is_file()
    leaderboard = (copy / "build" / "site" / "leaderboard.html").read_text()
    assert all(
        f'data-table="{path.stem}"' in leaderboard for path in (copy / "results/published/tables").glob("*k.csv")
    )
    assert 'href="leaderboard.html"' in (copy / "build" / "site" / "index.html").read_text()
