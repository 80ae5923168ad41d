"""A hook of mkdocs that makes the site of the repository's own documents, under the paths that they
have there."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from harness.reports.leaderboard import leaderboard

ROOT = Path(__file__).parents[1]
LEADERBOARD = "leaderboard.html"  # in the menu of mkdocs.yml
SHOWN = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/img/*",
    "results/paper/*",
    "results/published/**/*",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site: those of the theme, the repository's documents instead of what
    mkdocs found below docs/, from where links to the rest of the repository would be broken, and
    the page of all published tables."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted({path for pattern in SHOWN for path in ROOT.glob(pattern) if path.is_file()})
    places = [path.relative_to(ROOT).as_posix() for path in paths]
    page = File.generated(
        config, LEADERBOARD, content=leaderboard([ROOT / "results" / "published"])
    )
    return Files(
        [
            *theme,
            page,
            *(
                File(place, str(ROOT), config.site_dir, config.use_directory_urls)
                for place in places
            ),
        ]
    )
